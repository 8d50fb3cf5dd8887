"""The report for whoever must decide: what it counts, what it doubts, and that it can be read."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sp24cli.cli.main import run
from sp24cli.ops import QuantizeReport, prune_file, quantize_file, stream
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.reporting import as_html, as_markdown, summarize
from sp24cli.reporting.markdown import sparkline
from sp24cli.scaling import ScaleSpec
from tests.cpu.checkpoints import INDEX, contents, write_checkpoint
from tests.cpu.modelfile import Array, load, naive_prune, normal, save

ODD = "odd.<b>&|\x1b[1m.weight"


def model() -> dict[str, Array]:
    tensors = {f"l{i}.weight": normal(i, (64, 64), "BF16") for i in range(6)}
    # Equal magnitudes: pruning takes half of the energy.
    signs = np.random.default_rng(1).choice([-1, 1], (64, 64))
    tensors["flat.weight"] = (signs * 0.1).astype(ml_dtypes.bfloat16)
    # One value takes all of the range.
    tensors["outlier.weight"] = normal(9, (64, 64), "BF16")
    tensors["outlier.weight"][3, 5] = 30000
    tensors[ODD] = normal(10, (64, 32), "F32")
    tensors["norm.weight"] = normal(11, (64,), "BF16")
    # Several bands, the least scale in none of the outer ones.
    tensors["tall.weight"] = normal(12, (200, 32), "BF16")
    tensors["tall.weight"][100] *= tensors["tall.weight"].dtype.type(0.125)
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", model())


def quantized(source: Path, **options: object) -> QuantizeReport:
    arguments = {
        "optype": OPERAND_TYPES["e4m3"],
        "spec": ScaleSpec("tensor"),
        "prune": True,
        "histograms": True,
    } | options
    return quantize_file(source, None, **arguments)  # type: ignore[arg-type]


class Page(HTMLParser):
    """The text of a page by tag, with a check that what is opened is closed."""

    EMPTY = ("meta", "path", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if any(tag in ("td", "th") for tag in self.open):
            self.cells[-1][-1] += data


def test_a_histogram_counts_the_codes_by_powers_of_two(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    for layout in ("row", "sm90"):
        output = tmp_path / layout
        arguments = {"spec": ScaleSpec("vector"), "optype": OPERAND_TYPES["e4m3"], "prune": True}
        report = quantize_file(source, output, layout=layout, histograms=True, **arguments)
        quantize_file(source, tmp_path / "row2", overwrite=True, **arguments)
        parts = load(tmp_path / "row2")[0]
        for tensor in report.tensors:
            values = np.abs(parts[f"{tensor.name}_values"].astype(np.float64)).reshape(-1)
            want = [0] * 18
            for value in values[values > 0]:
                want[math.floor(math.log2(value)) + 9] += 1
            assert list(tensor.histogram) == want
            assert sum(want) + tensor.underflowed == tensor.kept
            scale = parts[f"{tensor.name}_scale"]
            assert (tensor.scale_min, tensor.scale_max) == (scale.min(), scale.max())
    assert report.tensors[0].scale_min != report.tensors[0].scale_max


def test_a_histogram_is_not_made_unasked_or_of_other_types(source: Path) -> None:
    assert all(t.histogram == () for t in quantized(source, histograms=False).tensors)
    options = {"optype": OPERAND_TYPES["bf16"], "spec": ScaleSpec("none")}
    report = quantized(source, **options)
    assert all(t.histogram == () and t.scale_min is None for t in report.tensors)
    Page(as_html(summarize(report)))


def test_the_change_is_that_of_the_weight(source: Path, tmp_path: Path) -> None:
    arguments = {"spec": ScaleSpec("vector"), "optype": OPERAND_TYPES["e4m3"], "prune": True}
    report = quantize_file(source, tmp_path / "packed", **arguments)
    assert run(["unpack", str(tmp_path / "packed"), "-o", str(tmp_path / "d"), "--dtype=f32"]) == 0
    dense = load(tmp_path / "d")[0]
    for layer in summarize(report).layers:
        old = model()[layer.name].astype(np.float64)
        change = np.linalg.norm(dense[layer.name] - old) / np.linalg.norm(old)
        assert layer.error == pytest.approx(change, rel=1e-5)
    for layer in summarize(prune_file(source, None)).layers:
        old = model()[layer.name].astype(np.float64)
        change = np.linalg.norm(naive_prune(old) - old) / np.linalg.norm(old)
        assert layer.error == pytest.approx(change, rel=1e-5)


def test_the_worst_come_first_with_the_reason(source: Path) -> None:
    summary = summarize(quantized(source))
    assert [layer.name for layer in summary.layers[:2]] == ["flat.weight", "outlier.weight"]
    flat, outlier = summary.layers[:2]
    assert flat.doubts[0] == "keeps less than 80% of its energy"
    assert flat.doubts[1].startswith("changed 1.9 times as much")
    assert any("became zero" in doubt for doubt in outlier.doubts)
    assert any("have lost bits" in doubt for doubt in outlier.doubts)
    rest = summary.layers[2:]
    assert all(layer.doubts == () for layer in rest)
    assert [layer.error for layer in rest] == sorted((x.error for x in rest), reverse=True)
    assert summary.verdict == (
        "2 of 10 layers stand out; the largest change of a weight is 70.7 %."
    )


def test_clipping_and_noise_are_doubted(tmp_path: Path) -> None:
    weight = naive_prune(normal(1, (64, 64)))
    weight[0, :4] = [1e39, 0, 0, 0] if weight.dtype == np.float64 else [3e38, 0, 0, 0]
    source = save(tmp_path / "in", {"a.weight": weight})
    f16 = {"optype": OPERAND_TYPES["f16"], "spec": ScaleSpec("none"), "prune": False}
    (layer,) = summarize(quantized(source, **f16)).layers
    assert layer.doubts[:2] == ("SNR below 28 dB", "1 value clipped")


@pytest.mark.parametrize("suffix", [".html", ".md", ".json"])
def test_what_is_not_finite_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    weight = normal(1, (64, 64)).astype(np.float64)
    source = save(tmp_path / "in", {"a.weight": weight * 1e30, "b.weight": weight})
    options = ["--type", "f16", "--overflow", "nan"]
    page = tmp_path / f"report{suffix}"
    arguments = ["--prune", "--dry-run", "--report", str(page), *options]
    assert run(["quantize", str(source), *arguments]) == 0
    assert "exact" not in capsys.readouterr().out
    text = page.read_text()
    assert text.index("a.weight") < text.index("b.weight")
    assert "1 of 2 layers stand out; the largest change of a weight is not finite." in text
    assert "its change is not finite" in text


@pytest.mark.parametrize("name", list(OPERAND_TYPES))
def test_a_usual_layer_is_not_doubted_in_any_type(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (64, 256))})
    optype = OPERAND_TYPES[name]
    spec = ScaleSpec("vector" if optype.scaled else "none")
    (layer,) = summarize(quantized(source, optype=optype, spec=spec)).layers
    assert layer.doubts == ()
    # Beside a column of outliers the others fall between the even steps of integers alone.
    weight = normal(2, (64, 256))
    weight[:, 0] *= 2000
    (layer,) = summarize(
        quantized(save(source, {"a.weight": weight}), optype=optype, spec=spec)
    ).layers
    assert bool(layer.doubts) == (name == "s8")


def test_nothing_to_doubt_is_said_too(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (64, 64))})
    verdict = summarize(quantized(source)).verdict
    assert re.fullmatch(r"Nothing stands out in 1 layer; the largest .* is 36\.\d %\.", verdict)
    empty = save(tmp_path / "empty", {"norm.weight": normal(1, (4,))})
    assert summarize(quantized(empty)).verdict == "No weight was changed."
    Page(as_html(summarize(quantized(empty))))


def test_the_page_stands_alone_and_shows_every_layer(source: Path) -> None:
    text = as_html(summarize(quantized(source)))
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "b"}
    assert not page.attributes & {"src", "href", "onload", "onclick", "style"}
    assert "url(" not in text
    assert "@import" not in text
    rows = {row[0]: row for row in page.cells}
    assert rows["layer"] == [
        "layer", "dtype", "shape", "change", "kept energy", "SNR dB", "clipped", "underflow",
        "scales", "histogram", "doubt",
    ]  # fmt: skip
    assert list(rows)[1:3] == ["flat.weight", "outlier.weight"]
    shown = rows["odd.<b>&|\\x1b[1m.weight"]
    assert shown[1:3] == ["F32", "64×32"]
    assert re.fullmatch(r"8\d\.\d\d %", shown[4])
    assert "\x1b" not in text
    assert rows["norm.weight"][3] == "1-D"
    for column in rows["layer"][3:10]:
        assert f"<dt>{column}</dt>" in text
    assert text == as_html(summarize(quantized(source, workers=3)))


def test_a_page_of_pruning_has_its_own_columns(source: Path) -> None:
    page = Page(as_html(summarize(prune_file(source, None))))
    rows = {row[0]: row for row in page.cells}
    assert rows["layer"] == ["layer", "dtype", "shape", "change", "kept energy", "doubt"]
    assert rows["flat.weight"][3:5] == ["70.7 %", "50.00 %"]


def test_markdown_has_the_same_table(source: Path) -> None:
    text = as_markdown(summarize(quantized(source)))
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) == 11
    assert lines[0].startswith("| `flat.weight` | 64×64 | 70.7 % | 50.00 % |")
    (odd,) = (line for line in lines if "odd" in line)
    cells = re.split(r"(?<!\\)\|", odd)
    assert len(cells) == len(re.split(r"(?<!\\)\|", lines[0]))
    assert "\x1b" not in text


def test_a_sparkline_shows_what_counts_anything() -> None:
    assert sparkline([0, 1, 500, 1000]) == "·▁▄█"
    assert sparkline([0, 0]) == "··"


@pytest.mark.parametrize("command", ["prune", "quantize"])
@pytest.mark.parametrize("kind", ["html", "md", "json"])
def test_commands_write_it(
    source: Path, tmp_path: Path, command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report, output = tmp_path / f"report.{kind.upper()}", tmp_path / "out"
    options = ["--scale", "vector", "--prune"] if command == "quantize" else []
    arguments = [command, str(source), *options, "--report", str(report)]
    assert run([*arguments, "--dry-run"]) == 0
    dry = report.read_text(encoding="utf-8")
    assert run([*arguments, "-o", str(output)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert not output.exists()
    assert run([*arguments, "-o", str(output), "--force"]) == 0
    wet = report.read_text(encoding="utf-8")
    assert "flat.weight" in wet
    if kind == "json":
        document = json.loads(wet)
        assert document["output"] == str(output)
        assert document["worst"][0]["name"] == "flat.weight"
        assert document["verdict"].startswith(
            "2 of 10 layers" if command == "quantize" else "1 of 10 layers"
        )
        assert {t["name"] for t in document["tensors"]} == {t["name"] for t in document["worst"]}
    elif kind == "html":
        assert dry.replace("dry run, nothing written", str(output)) == wet
    else:
        assert dry == wet


def test_a_report_replaces_neither_input_nor_output(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = source.read_bytes()
    model = source.rename(tmp_path / "model.json")
    output = tmp_path / "out.md"
    for report, code in ((model, 1), (output, 1), (tmp_path / "report.txt", 2)):
        arguments = ["prune", str(model), "-o", str(output), "--force", "--report", str(report)]
        assert run(arguments) == code
        assert capsys.readouterr().err.count("\n") == 1
        assert not output.exists()
    assert model.read_bytes() == before
    norms = save(tmp_path / "norms.json", {})
    options = ["--method", "wanda", "--activation-norms", str(norms), "--report", str(norms)]
    assert run(["prune", str(model), "-o", str(output), "--force", *options]) == 1
    assert "norms.json: is the input" in capsys.readouterr().err


def test_a_report_that_may_not_be_written_stops_before_the_work(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the system would answer; root may write to any folder."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    arguments = ["prune", str(source), "-o", str(tmp_path / "out")]
    assert run([*arguments, "--report", str(tmp_path / "report.md")]) == 1
    assert "report.md: the folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_of_a_checkpoint_is_replaced_by_no_side_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "model")
    before = contents(model)
    config = str(model / "config.json")
    out = ["-o", str(tmp_path / "out"), "--force"]
    for source in (model, model / INDEX):
        for command in (
            ["prune", "--report", config],
            ["quantize", "--prune", "--scale", "tensor", "--report", config],
            ["convert", "--format", "compressed-tensors-fp8", "--config", config],
        ):
            assert run([*command, str(source), *out]) == 1
            assert "config.json: is a file of the input" in capsys.readouterr().err
    assert contents(model) == before
    assert run(["prune", str(model), *out, "--report", str(model / "report.json")]) == 0


@pytest.mark.parametrize("name", ["config.json", INDEX, "report.json", "1_Pooling/report.json"])
@pytest.mark.parametrize("linked", [False, True])
def test_no_side_file_lies_in_the_output_folder(
    tmp_path: Path, name: str, linked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written last, it would take the place of what the run has written."""
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    output.mkdir()
    (output / "1_Pooling").mkdir()
    side = output / name
    if linked:
        side = tmp_path / "link.json"
        side.symlink_to(output / name)
    before = contents(tmp_path)
    for command in (
        ["prune", "--report"],
        ["quantize", "--prune", "--scale", "tensor", "--report"],
        ["convert", "--format", "compressed-tensors-fp8", "--config"],
    ):
        for options in ([], ["--force"], ["--resume"]):
            arguments = [*command, str(side), str(model), "-o", str(output), *options]
            assert run(arguments) == 2
            assert "lies in the output folder; choose another file" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_side_file_replaces_no_link_in_the_output_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    output.mkdir()
    (output / "report.md").symlink_to(tmp_path / "elsewhere.md")
    arguments = ["prune", str(model), "-o", str(output), "--report", str(output / "report.md")]
    assert run([*arguments, "--force"]) == 2
    assert "lies in the output folder" in capsys.readouterr().err
