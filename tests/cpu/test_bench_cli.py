"""``sp24 bench`` where there is no GPU: listing, usage errors, exit codes, where output goes."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace

import pytest

from sp24cli.bench import baseline, report
from sp24cli.bench.rates import Shape
from sp24cli.bench.result import BenchResult, Environment, Failure
from sp24cli.bench.statistics import Settings
from sp24cli.cli import bench as command
from sp24cli.cli.main import run
from sp24cli.errors import NoGpuError
from sp24cli.gpu.device import Device
from sp24cli.kernels import manifest
from tests.cpu.benchresult import faster, two_cases

RESULT = BenchResult(
    Environment("2026-01-01", "H200", 132, 1, 1980.0, "CUDA 13.0", "ab", "0", None, {}),
    Settings(),
    (),
    (),
    (),
)


@pytest.fixture
def no_gpu(monkeypatch):
    def refuse(ordinal=0):
        raise NoGpuError("no usable GPU: the NVIDIA driver is not installed")

    monkeypatch.setattr(Device, "open", refuse)


def test_list_names_every_kernel_without_a_gpu(no_gpu, capsys):
    assert run(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = manifest.load().entries
    assert [line.split()[0] for line in lines[1:-1]] == [entry.name for entry in entries]
    assert manifest.load().sha256 in lines[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--suite", "llm"],
        ["--shape", "256x16x512", "--type", "f16", "--out", "f32", "--order", "mn"],
        ["missing.safetensors", "--n", "16,32"],
    ],
)
def test_without_a_gpu_it_is_one_line_and_exit_5(no_gpu, capsys, arguments):
    assert run(["bench", *arguments]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "sp24: error: no usable GPU: the NVIDIA driver is not installed\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "12x12"], "MxNxK"),
        (["--shape", "16x16x18"], "multiple of 4"),
        (["x.safetensors", "--shape", "16x16x16"], "not both"),
        (["x.safetensors", "--suite", "llm"], "not both"),
        (["x.safetensors", "--type", "f16"], "PACKED has its own"),
        (["x.safetensors", "--n", "16,,32"], "token counts"),
        (["x.safetensors", "--n", "0"], "token counts"),
        (["x.safetensors", "--n", "16," + 5000 * "9"], "token counts must be below 2^31"),
        (["x.safetensors", "--n", "2147483648"], "token counts must be below 2^31"),
        (["--shape", f"16x{5000 * '9'}x16"], "every side must be below 2^31"),
        (["--shape", f"16x{5000 * '0'}x16"], "every side must be positive"),
        (["--noise-limit", "nan"], "nan is not a finite number"),
        (["--noise-limit", "1e999"], "inf is not a finite number"),
        (["--n", "16"], "--n is for PACKED"),
        (["--kernel", "fastest"], "--list"),
        (["--suite", "vision"], "vision"),
        (["--type", "e2m1"], "e2m1"),
        (["--type", "f16", "--b-type", "e5m2"], "f16 is not multiplied by e5m2"),
        (["--type", "s8", "--accumulate", "f16"], "(it is by s8 summed in s32)"),
        (["--type", "f16", "--out", "s32"], "--out s32: f16 is multiplied into"),
        (["--scale", "mx", "--b-type", "e4m3"], "by activations of bf16 or f16, not of e4m3"),
        (["--scale", "block", "--block", "1x32"], "scales of 1x32 need a kernel"),
        (["--scale", "block", "--block", "32"], "'32' is not ROWSxCOLUMNS"),
        (["--block", "32x32"], "--block is for --scale block"),
        (["--type", "f16", "--b-type", "bf16"], "f16 is not multiplied by bf16"),
        (["--rounds", "0"], "rounds"),
        (["--json", "-", "--csv", "-"], "only one"),
        (["--plot", "x.pdf"], "svg, png, html"),
        (["--plot", "-"], "svg, png, html"),
        (["--type", "e5m2", "--accumulate", "precise"], "e5m2 into bf16 nm, summing precise"),
        (["--type", "f16", "--accumulate", "precise"], "f16 into f16 nm, summing precise"),
        (["--b-type", "e5m2", "--scale", "block"], "e4m3_e5m2 into bf16 nm, summing tile128"),
        (["--b-type", "bf16", "--accumulate", "precise"], "that widens weights has precise sums"),
        (["--kernel", "gemm_f16_f16_nm_n256_w2_c2_s5"], "does not multiply e4m3 into bf16 nm"),
        (["--type", "f16", "--scale", "vector"], "--type f16 has no scale; leave out --scale"),
        (["--seed", "-1"], "--seed"),
        (["--list", "--json", "x.json", "--shape", "4x4x4"], "with --shape, --json"),
        (["--tune", "--rounds", "2", "--no-peers"], "--tune does not go with --peers, --rounds"),
        (["--json", ""], "--json '': is a folder"),
        (["--csv", "."], "--csv '.': is a folder"),
        (["--plot", ".."], "--plot '..': is a folder"),
        (["--from", "x.json", "--shape", "4x4x4", "--seed", "1"], "with --shape, --seed"),
        (["x.safetensors", "--from", "x.json"], "--from does not go with PACKED"),
        (["--from", "x.json", "--tune", "--ceiling"], "with --ceiling, --tune"),
        (["--tune", "--baseline", "x.json"], "--tune does not go with --baseline"),
        (["--tune", "--plot", "x.svg"], "--tune does not go with --plot"),
    ],
)
def test_usage_errors_come_before_the_gpu(no_gpu, capsys, arguments, message):
    assert run(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--accumulate", "precise", "--out", "f32", "--order", "mn"],
        ["--scale", "block", "--block", "1x192", "--out", "f16"],
        ["--scale", "mx", "--b-type", "f16", "--out", "f32"],
        ["--type", "f16", "--accumulate", "f16"],
        ["--type", "s8", "--out", "bf16", "--scale", "vector"],
        # One that applies scales of blocks where there are none: it can, though none would ask.
        ["--kernel", next(e.name for e in manifest.load().entries if e.loop_scales == "row")],
    ],
)
def test_what_kernels_do_comes_as_far_as_the_gpu(no_gpu, capsys, arguments):
    assert run(["bench", *arguments]) == 5
    assert capsys.readouterr().err.startswith("sp24: error: no usable GPU")


@pytest.mark.parametrize(("codes", "code"), [((1,), 1), ((1, 3), 3), ((), 0)])
def test_a_failed_case_is_the_exit_code_after_the_table(monkeypatch, capsys, codes, code):
    failures = tuple(Failure(Shape(4, 4, 4), f"fault {c}", c) for c in codes)
    monkeypatch.setattr(Device, "open", lambda: object())
    monkeypatch.setattr("sp24cli.gpu.telemetry.Telemetry", lambda device: None)
    monkeypatch.setattr("sp24cli.bench.run.run", lambda *a, **k: replace(RESULT, failures=failures))
    assert run(["bench", "--shape", "4x4x4"]) == code
    captured = capsys.readouterr()
    assert "dense-equivalent" in captured.out
    assert captured.err == (f"sp24: error: fault {code}\n" if code else "")


class TestOutput:
    def test_a_file_leaves_the_table_on_stdout(self, tmp_path, capsys):
        path = tmp_path / "new" / "result.json"
        command._write(RESULT, [("json", str(path))])
        assert json.loads(path.read_text())["sp24.bench"] == 1
        assert "dense-equivalent" in capsys.readouterr().out
        assert [p.name for p in path.parent.iterdir()] == ["result.json"]

    def test_a_dash_takes_the_tables_place(self, capsys):
        command._write(RESULT, [("json", "-")])
        assert json.loads(capsys.readouterr().out)["environment"]["gpu"] == "H200"

    def test_csv_and_markdown(self, tmp_path):
        command._write(RESULT, [("csv", str(tmp_path / "r.csv")), ("md", str(tmp_path / "r.md"))])
        assert (tmp_path / "r.csv").read_text().startswith("date,gpu,m,n,k,")
        assert (tmp_path / "r.md").read_text().startswith("# sp24 bench")

    def test_a_failed_write_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "r.json"
        path.write_text("old")
        monkeypatch.setattr(command.os, "replace", _fail)
        with pytest.raises(OSError, match="full"):
            command._write(RESULT, [("json", str(path))])
        assert path.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_new_file_has_ordinary_permissions(self, tmp_path):
        plain, written = tmp_path / "plain", tmp_path / "r.json"
        plain.write_text("")
        command._write(RESULT, [("json", str(written))])
        assert written.stat().st_mode == plain.stat().st_mode

    def test_a_file_that_cannot_be_written_keeps_none_from_the_others(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        bad, good = tmp_path / "file" / "r.json", tmp_path / "r.csv"
        with pytest.raises(FileExistsError):
            command._write(RESULT, [("json", str(bad)), ("csv", str(good)), ("md", "-")])
        assert good.read_text().startswith("date,gpu,m,n,k,")
        assert capsys.readouterr().out.startswith("# sp24 bench")

    def test_a_reader_of_stdout_that_has_left_costs_no_file(self, tmp_path, monkeypatch):
        def closed(message=""):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        monkeypatch.setattr(command.console, "out", closed)
        path = tmp_path / "r.json"
        with pytest.raises(BrokenPipeError):
            command._write(RESULT, [("json", str(path))])
        assert json.loads(path.read_text())["sp24.bench"] == 1
        # A disk that is full is what there is to say of both.
        monkeypatch.setattr(command.os, "replace", _fail)
        with pytest.raises(OSError, match="full"):
            command._write(RESULT, [("json", str(path))])


def _fail(*_):
    raise OSError("disk full")


class TestEarlierResults:
    @pytest.fixture
    def earlier(self, tmp_path):
        path = tmp_path / "old.json"
        path.write_text(json.dumps(two_cases().to_json()))
        return path

    def test_from_shows_a_result_without_a_gpu(self, no_gpu, capsys, earlier):
        assert run(["bench", "--from", str(earlier)]) == 0
        captured = capsys.readouterr()
        assert captured.out == report.table(two_cases()) + "\n"
        assert captured.err == ""

    def test_from_writes_every_format(self, no_gpu, capsys, earlier, tmp_path):
        files = {kind: tmp_path / f"new.{kind}" for kind in ("json", "csv", "md")}
        plots = [tmp_path / f"new.{kind}" for kind in ("svg", "PNG", "html")]
        options = [text for kind, file in files.items() for text in (f"--{kind}", str(file))]
        for plot in plots:
            assert run(["bench", "--from", str(earlier), *options, "--plot", str(plot)]) == 0
            options = [*options, "--force"] if "--force" not in options else options
        assert files["json"].read_text() == json.dumps(two_cases().to_json(), indent=2) + "\n"
        assert files["md"].read_text() == report.markdown(two_cases())
        assert files["csv"].read_text() == report.comma_separated(two_cases())
        heads = [plot.read_bytes()[:15] for plot in plots]
        assert heads[0].startswith(b"<?xml")
        assert heads[1].startswith(b"\x89PNG")
        assert heads[2] == b"<!DOCTYPE html>"

    def test_no_result_replaces_an_input_or_another(self, no_gpu, capsys, earlier, tmp_path):
        other = tmp_path / "other.json"
        other.write_text(earlier.read_text())
        link = tmp_path / "link.md"
        link.symlink_to(earlier)
        before = earlier.read_text()
        shown = ["bench", "--from", str(earlier), "--baseline", str(other)]
        for option, file in (("--csv", earlier), ("--md", other), ("--md", link)):
            assert run([*shown, option, str(file), "--force"]) == 1
            assert "is the input" in capsys.readouterr().err
        assert run([*shown, "--md", str(tmp_path / "x"), "--csv", str(tmp_path / "x")]) == 2
        assert "two results cannot go to one file" in capsys.readouterr().err
        (tmp_path / "kept.md").write_text("kept")
        assert run([*shown, "--md", str(tmp_path / "kept.md")]) == 1
        assert "exists already" in capsys.readouterr().err
        assert (tmp_path / "kept.md").read_text() == "kept"
        assert earlier.read_text() == other.read_text() == before
        assert run([*shown, "--md", str(tmp_path / "kept.md"), "--force"]) == 0
        assert run([*shown, "--md", str(tmp_path / "new" / "folder.md")]) == 0

    def test_a_baseline_follows_the_tables(self, no_gpu, capsys, earlier, tmp_path):
        newer = tmp_path / "new.json"
        moved = replace(two_cases(), cases=(faster(two_cases().cases[0], 1.25),))
        newer.write_text(json.dumps(moved.to_json()))
        arguments = ["bench", "--from", str(newer), "--baseline", str(earlier)]
        assert run([*arguments, "--md", str(tmp_path / "r.md")]) == 0
        out = capsys.readouterr().out
        expected = "\n".join(baseline.lines(baseline.compare(two_cases(), moved)))
        assert out.endswith(f"\n\n{expected}\n")
        assert "+25.0%" in expected
        assert f"```text\n{expected}\n```\n" in (tmp_path / "r.md").read_text()

    def test_a_baseline_that_cannot_be_read_is_said_before_the_gpu(self, no_gpu, capsys, tmp_path):
        (tmp_path / "x.json").write_text("{}")
        for option in ("--baseline", "--from"):
            assert run(["bench", option, str(tmp_path / "x.json")]) == 4
            assert "not a result of sp24 bench --json" in capsys.readouterr().err

    def test_a_plot_without_matplotlib_is_said_before_the_gpu(self, no_gpu, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert run(["bench", "--plot", "x.svg"]) == 1
        assert "pip install 'sp24[plot]'" in capsys.readouterr().err

    def test_a_run_without_figures_has_no_plot_but_its_own_error(
        self, monkeypatch, capsys, tmp_path
    ):
        failed = replace(RESULT, failures=(Failure(Shape(4, 4, 4), "fault 3", 3),))
        monkeypatch.setattr(Device, "open", lambda: object())
        monkeypatch.setattr("sp24cli.gpu.telemetry.Telemetry", lambda device: None)
        monkeypatch.setattr("sp24cli.bench.run.run", lambda *a, **k: failed)
        plot = tmp_path / "x.svg"
        assert run(["bench", "--shape", "4x4x4", "--plot", str(plot)]) == 3
        assert capsys.readouterr().err == "sp24: error: fault 3\n"
        assert not plot.exists()
