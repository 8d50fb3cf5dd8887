"""Pictures and the page: what stands in them, and that nothing else is needed to see them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sp24cli.bench import plot
from sp24cli.bench.page import page
from sp24cli.bench.plot import picture
from sp24cli.errors import Sp24Error
from tests.cpu.benchresult import LARGE, OURS, case, result, row, two_cases

RESULT = two_cases()


def words(svg: bytes) -> list[str]:
    """The texts that an SVG of matplotlib draws; it notes each beside its outline."""
    return re.findall(r"<!-- (.*?) -->", svg.decode())


@pytest.fixture(scope="module")
def svg():
    return picture(RESULT, "svg")


def test_every_axis_and_product_is_named(svg):
    found = words(svg)
    for text in (
        "burst, e4m3", "sustained, e4m3", "roofline; numbers as above",
        "dense-equivalent flops a byte of A, B and D (each moved once)",
        "copying memory: 4.00 TB/s", "4096×8192", "28672×16", "(1)", "(2)",
        "sp24 bench on NVIDIA H200, 2026-01-31 12:00 UTC, kernels abababababab",
        "tensor cores, e4m3 2:4, at 1980 MHz: 4282 TFLOPS",
        "tensor cores, e4m3 dense, at 1980 MHz: 2141 TFLOPS",
    ):  # fmt: skip
        assert text in found, text
    assert found.count("TFLOPS, dense-equivalent") == 3
    for label in ("sp24", "cuSPARSELt, fastest of all ids", "cuSPARSELt, default",
                  "cuBLASLt, dense"):  # fmt: skip
        assert found.count(label) == 1, "in one legend"
    assert found.count("sp24: burst") == 1
    assert found.count("sustained") == 3


def test_every_figure_stands_on_its_bar(svg):
    found = words(svg)
    for case_ in RESULT.cases:
        for row_ in case_.rows:
            for figure in (row_.burst, row_.sustained):
                assert f"{figure.tflops:.0f}" in found


def test_without_peers_or_copy_there_is_no_word_of_them():
    alone = result(case(LARGE, row(OURS, LARGE, 260.0, 300.0)))
    found = " ".join(words(picture(alone, "svg")))
    assert "sp24: burst" in found
    assert "cuSPARSELt" not in found
    assert "copying" not in found


def test_types_of_one_peak_share_a_line():
    """The dense peak of e4m3 is the sparse one of f16."""
    half = replace(RESULT.cases[0], type="f16", out="f16")
    found = words(picture(replace(RESULT, cases=(RESULT.cases[0], half)), "svg"))
    assert "tensor cores, e4m3 dense and f16 2:4, at 1980 MHz: 2141 TFLOPS" in found
    assert "burst, e4m3 and f16" in found


def test_the_same_result_gives_the_same_bytes(svg):
    assert picture(RESULT, "svg") == svg


def test_png(svg):
    assert picture(RESULT, "png").startswith(b"\x89PNG\r\n")


def test_nothing_to_draw_is_an_error():
    with pytest.raises(Sp24Error, match="a case with figures"):
        picture(result(), "svg")


def test_without_matplotlib_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Sp24Error, match=r"^a plot needs matplotlib .*pip install 'sp24\[plot\]'$"):
        plot.require()


def test_matplotlib_is_loaded_for_a_plot_only():
    code = (
        "import sys, sp24cli.cli.bench, sp24cli.bench.run, sp24cli.bench.plot, sp24cli.bench.page\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tables, self.outside = [], 0, []

    def handle_starttag(self, tag, attrs):
        self.tables += tag == "table"
        # Elements without an end; those of the SVG end themselves.
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href") and not value.startswith("#"):
                self.outside.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class TestPage:
    def test_it_is_whole_and_needs_nothing_else(self):
        text = page(RESULT, ["against the run of <old>"])
        parser = _Links()
        parser.feed(text)
        assert parser.open == []
        assert parser.outside == []
        assert parser.tables == 2
        assert text.count("<svg") == 1
        assert "<?xml" not in text
        assert "against the run of &lt;old&gt;" in text
        for part in ("dense-equivalent", "4096x8192x8192", "(by table)", "id 9: refused",
                     "copying memory: 4.00 TB/s"):  # fmt: skip
            assert part in text

    def test_names_from_files_are_text(self):
        evil = replace(RESULT.cases[0], weight="<script>x</script> & co")
        text = page(replace(RESULT, cases=(evil,)))
        assert "<script" not in text
        assert "&lt;script&gt;x&lt;/script&gt; &amp; co" in text
