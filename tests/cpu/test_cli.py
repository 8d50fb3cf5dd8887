"""The commands as a user meets them: exit codes, streams, tables, JSON."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sp24cli
import sp24cli.gpu.device
from sp24cli.cli import console
from sp24cli.cli import main as cli_main
from sp24cli.cli.main import COMMANDS, cli, run
from sp24cli.errors import NoGpuError
from sp24cli.kernels import manifest
from tests.cpu.checkpoints import INDEX, write_checkpoint
from tests.cpu.convertdevice import ConvertDevice, made_manifest
from tests.cpu.modelfile import load, naive_prune, normal, save

ROOT = Path(sp24cli.__file__).parent.parent
SP24 = [sys.executable, "-m", "sp24cli.cli"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(
        tmp_path / "model.safetensors",
        {
            "a.weight": normal(1, (64, 64), "BF16"),
            "b.weight": normal(2, (20, 36)),
            "norm.weight": normal(3, (64,)),
        },
    )


@pytest.fixture
def packed(model: Path) -> Path:
    output = model.with_name("packed.safetensors")
    assert run(["quantize", str(model), "-o", str(output), "--scale", "vector", "--prune"]) == 0
    return output


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests say the same on a machine that has one."""

    def fail(ordinal: int = 0) -> None:
        raise NoGpuError("no usable GPU: this is a test")

    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(fail))


def one_line(text: str) -> str:
    """The text of stderr, which must be one line of error."""
    assert text.startswith("sp24: error: ")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    return text


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """Stdout as the one JSON document that it must be; stderr empty."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


# --- the group -------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"sp24 {sp24cli.__version__}\n"


def test_it_is_a_module_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "sp24cli", "--version"], env=ENVIRONMENT, capture_output=True
    )
    assert shown.stdout.decode() == f"sp24 {sp24cli.__version__}\n"


def test_interrupted_while_it_is_imported() -> None:
    code = (
        "import sys; from importlib.abc import MetaPathFinder; from sp24cli.__main__ import main\n"
        "class Slow(MetaPathFinder):\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Slow()); main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        130,
        b"",
        b"sp24: error: interrupted\n",
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in text
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.help, parameter


def test_version_loads_no_numpy() -> None:
    code = (
        "import sys; from sp24cli.cli.main import run; "
        "run(['--version']); sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["prune"],
        ["prune", "in"],
        ["prune", "in", "-o"],
        ["prune", "in", "-o", "out", "--workers", "0"],
        ["prune", "in", "-o", "out", "--frobnicate"],
        ["prune", "", "-o", "out"],
        ["prune", "in", "-o", ""],
        ["quantize", "in", "-o", "out"],
        ["quantize", "in", "-o", "out", "--scale", "row"],
        ["quantize", "in", "-o", "out", "--scale", "tensor", "--block", "8x8"],
        ["quantize", "in", "-o", "out", "--scale", "block", "--block", "8x6"],
        ["quantize", "in", "-o", "out", "--scale", "block", "--block", "8"],
        ["quantize", "in", "-o", "out", "--type", "f16", "--scale", "tensor"],
        ["quantize", "in", "-o", "out", "--type", "bf16", "--block", "8x8"],
        ["quantize", "in", "-o", "out", "--type", "int4", "--scale", "tensor"],
        ["quantize", "in", "-o", "out", "--scale", "tensor", "--overflow", "wrap"],
        ["quantize", "in", "-o", "out", "--type", "s8", "--scale", "tensor", "--overflow", "nan"],
        ["quantize", "in", "-o", "out", "--type", "s8"],
        ["quantize", "in", "-o", "out", "--type", "tf32", "--scale", "tensor"],
        ["quantize", "in", "-o", "out", "--type", "tf32", "--prune", "--permute"],
        ["quantize", "in", "-o", "out", "--scale", "tensor", "--layout", "sm80"],
        ["verify"],
        ["verify", "in", "--device", "tpu"],
        ["verify", "in", "--seed", "-1"],
        ["unpack", "in"],
        ["unpack", "in", "-o", "out", "--codes", "--dtype", "f32"],
        ["inspect"],
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--help'" in one_line(captured.err)


def test_the_choices_of_a_missing_option_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "in", "-o", "out"]) == 2
    message = one_line(capsys.readouterr().err)
    assert "Choose from: sp24, compressed-tensors-fp8, sparse-24-bitmask" in message
    assert "\\" not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "FILE", "-o", "OUT"],
        ["quantize", "FILE", "-o", "OUT", "--scale", "tensor", "--prune"],
        ["verify", "FILE"],
        ["inspect", "FILE"],
        ["unpack", "FILE", "-o", "OUT"],
        ["convert", "FILE", "-o", "OUT", "--format", "sp24"],
    ],
)
@pytest.mark.parametrize("kind", ["missing", "long", "folder", "empty", "text", "cut"])
def test_files_that_cannot_be_read_exit_4(
    arguments: list[str],
    kind: str,
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 255 bytes are the most that a name may have.
    file = tmp_path / ("x" * 300 if kind == "long" else "file")
    if kind == "folder":
        file.mkdir()
    elif kind not in ("missing", "long"):
        content = {"empty": b"", "text": b"# not a model\n" * 9, "cut": model.read_bytes()[:-1]}
        file.write_bytes(content[kind])
    named = [{"FILE": str(file), "OUT": str(tmp_path / "out")}.get(a, a) for a in arguments]
    assert run(named) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(file) in one_line(captured.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [None, "--activation-norms", "--hessians"])
def test_whether_a_file_may_be_read_is_for_its_reader_to_say(
    option: str | None,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Click's own look at it would make it a usage error; and root may read what others may not."""
    forbidden = save(model.with_name("forbidden"), {})
    plain = open

    def deny(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr("builtins.open", deny)
    source = forbidden if option is None else model
    arguments = ["prune", str(source), "--dry-run"]
    if option is not None:
        method = "wanda" if option == "--activation-norms" else "sparsegpt"
        arguments += ["--method", method, option, str(forbidden)]
    assert run(arguments) == 4
    assert f"{forbidden}: cannot be read: Permission denied" in one_line(capsys.readouterr().err)


def test_an_interrupt_exits_130(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sp24cli.cli.inspect.inspect_file", interrupt)
    assert run(["inspect", str(model)]) == 130
    assert one_line(capsys.readouterr().err) == "sp24: error: interrupted\n"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "/x/y: Permission denied"),
        (OSError("odd"), "odd"),
        (MemoryError(), "out of memory"),
    ],
)
def test_other_failures_of_the_system_exit_1(
    model: Path,
    fault: BaseException,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("sp24cli.cli.inspect.inspect_file", fail)
    assert run(["inspect", str(model)]) == 1
    assert one_line(capsys.readouterr().err) == f"sp24: error: {text}\n"


_INTERRUPTED = """
import os, signal
from sp24cli.checkpoint.writer import StreamingWriter
from sp24cli.cli.main import main

write, parts = StreamingWriter.write, []
def interrupted(self, name, data):
    write(self, name, data)
    parts.append(name)
    if len(parts) == 2:
        os.kill(os.getpid(), signal.NAME)
StreamingWriter.write = interrupted
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    """A signal between two parts of the output: exit 130, no output, no temporary file."""
    weight = np.tile(normal(1, (64, 1024), "BF16"), (64, 1))
    source = save(tmp_path / "in", {"a.weight": weight, "b.weight": weight})
    process = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.replace("NAME", name), "quantize", str(source),
         "-o", str(tmp_path / "out"), "--scale", "vector", "--prune", "-q"],
        env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 130
    assert process.stderr == "sp24: error: interrupted\n"
    assert list(tmp_path.iterdir()) == [source]


_LATE = """
import atexit, os, signal
from sp24cli.cli import main

def send(kill=os.kill, process=os.getpid(), number=signal.NAME):
    kill(process, number)
class Last:
    # Taken down when Python has let go of the signals.
    def __del__(self, send=send):
        send()
"""
_MOMENTS = {
    "at_exit": "atexit.register(send)",
    "modules_end": "last = Last()",
}


@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_after_the_result_is_too_late(name: str, moment: str) -> None:
    code = f"{_LATE}\n{_MOMENTS[moment]}\nmain.main()".replace("NAME", name)
    ended = subprocess.run(
        [sys.executable, "-c", code, "--version"], env=ENVIRONMENT, capture_output=True, text=True
    )
    shown = f"sp24 {sp24cli.__version__}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, shown, "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_the_result_and_the_end_is_one_line(name: str) -> None:
    code = (
        f"{_LATE}\nrun = main.run\ndef late(args): run(args); send()\nmain.run = late; main.main()"
    ).replace("NAME", name)
    ended = subprocess.run(
        [sys.executable, "-c", code, "--version"], env=ENVIRONMENT, capture_output=True, text=True
    )
    shown = f"sp24 {sp24cli.__version__}\n"
    assert (ended.returncode, ended.stdout) == (130, shown)
    assert ended.stderr == "sp24: error: interrupted\n"


def test_a_system_without_hangup_has_the_other_signals() -> None:
    code = f"{_LATE}\ndel signal.SIGHUP\n{_MOMENTS['modules_end']}\nmain.main()"
    ended = subprocess.run(
        [sys.executable, "-c", code.replace("NAME", "SIGTERM"), "--version"],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_reader_that_leaves_is_no_error_message(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": np.zeros((1, 4), np.float32) for i in range(5000)}
    source = save(tmp_path / "in", tensors)
    process = subprocess.Popen(
        [*SP24, "inspect", str(source)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 1
    assert errors == b""


@pytest.mark.parametrize("name", ["out/", "out//", "out/."])
@pytest.mark.parametrize("output_first", [True, False])
def test_a_file_is_not_written_where_a_folder_is_named(
    model: Path, name: str, output_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"{model.parent}/{name}"
    given = ["-o", output, str(model)] if output_first else [str(model), "-o", output]
    for command in (["prune"], ["quantize", "--scale", "vector", "--prune"], ["unpack"]):
        assert run([*command, *given]) == 2
        message = one_line(capsys.readouterr().err)
        assert f"'-o' / '--output': {output!r} names a folder, but the input is a file" in message
        assert list(model.parent.iterdir()) == [model]
    (model.parent / "out").mkdir()
    assert run(["prune", *given]) == 1
    assert "is a directory" in one_line(capsys.readouterr().err)
    # A checkpoint's output is a folder.
    checkpoint = write_checkpoint(model.parent / "checkpoint")
    for source in (checkpoint, checkpoint / INDEX):
        assert run(["prune", str(source), "-o", f"{model.parent}/{source.name}-{name}"]) == 0


def test_without_a_stderr_the_work_is_done(model: Path) -> None:
    output = model.with_name("out")
    shell = 'exec "$@" 2>&-'
    arguments = ["prune", str(model), "-o", str(output)]
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *SP24, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    assert done.returncode == 0
    assert output.exists()


@pytest.mark.parametrize("name", ["été-模型.safetensors", "with space.safetensors", "-dash"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_paths_and_names_beyond_ascii(tmp_path: Path, name: str, encoding: str) -> None:
    tensor = "слой.0.weight"
    save(tmp_path / name, {tensor: normal(1, (8, 8))})
    environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}

    def sp24(*arguments: str) -> str:
        done = subprocess.run(
            [*SP24, *arguments], cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        assert done.stderr == b""
        return done.stdout.decode(encoding)

    text = sp24("prune", "-o", "out-é", "--", name)
    assert (tensor if encoding == "utf-8" else "\\u0441") in text
    assert tensor in load(tmp_path / "out-é")[0]
    assert json.loads(sp24("inspect", "out-é", "--json"))["tensors"][0]["name"] == tensor


def test_a_name_that_would_break_the_line_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a\nb\x1b[31m.weight"
    bad = np.array([[np.nan, 0, 0, 0]], np.float32)
    source = save(tmp_path / "in", {name: bad})
    assert run(["inspect", str(source)]) == 0
    assert r"a\nb\x1b[31m.weight" in capsys.readouterr().out
    assert run(["prune", str(source), "-o", str(tmp_path / "out")]) == 4
    assert r"a\nb\x1b[31m.weight" in one_line(capsys.readouterr().err)


# --- prune -----------------------------------------------------------------------------------


def test_prune_prints_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = model.with_name("out")
    assert run(["prune", str(model), "-o", str(output)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "kept", "energy"]
    assert lines[1].split()[:3] == ["a.weight", "BF16", "64x64"]
    wide = load(model)[0]["a.weight"].astype(np.float64)
    share = np.square(naive_prune(wide)).sum() / np.square(wide).sum()
    assert lines[1].split()[3] == f"{100 * share:.2f}"
    assert any(line.split() == ["norm.weight", "1-D"] for line in lines)
    assert lines[-2].startswith("pruned 2 of 3 tensors, kept energy ")
    assert lines[-1].startswith(f"wrote {output} (")
    assert np.array_equal(load(output)[0]["b.weight"], naive_prune(load(model)[0]["b.weight"]))


@pytest.mark.parametrize(
    ("name", "scale"), [("e5m2", "vector"), ("s8", "tensor"), ("s8", "block"), ("tf32", None)]
)
def test_every_type_goes_through_all_commands(
    name: str, scale: str | None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {n: str(model.with_name(n)) for n in ("pruned", "packed", "dense", "codes")}
    pattern = ["--pattern", "1:2"] if name == "tf32" else []
    assert run(["prune", str(model), "-o", files["pruned"], *pattern]) == 0
    scales = ["--scale", scale] if scale else []
    options = ["--type", name, *scales, "--layout", "sm90"]
    assert run(["quantize", files["pruned"], "-o", files["packed"], *options]) == 0
    assert f"as {name}" in capsys.readouterr().out
    for against in ("pruned", str(model)):
        arguments = ["verify", files["packed"], "--against", files.get(against, against)]
        assert run([*arguments, "--device", "cpu", "--json"]) == 0
        assert document(capsys)["passed"]
    assert run(["inspect", files["packed"], "--json"]) == 0
    assert {t["type"] for t in document(capsys)["packed"]} == {name}
    assert run(["unpack", files["packed"], "-o", files["dense"], "--dtype", "f32"]) == 0
    assert run(["unpack", files["packed"], "-o", files["codes"], "--codes"]) == 0
    dense, pruned = load(Path(files["dense"]))[0], load(Path(files["pruned"]))[0]
    for weight in ("a.weight", "b.weight"):
        want = pruned[weight].astype(np.float64)
        # Half a step of the code at the largest of its scale, of a tensor at most, and the rounding
        # of the quotient to float32.
        step = {"e5m2": 2.0**-3, "s8": 1 / 254, "tf32": 2.0**-11}[name] * (1 + 2.0**-14)
        assert (np.abs(dense[weight] - want) <= step * np.abs(want).max()).all()
        assert np.array_equal(dense[weight] != 0, load(Path(files["codes"]))[0][weight] != 0)


def test_prune_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", str(model), "--dry-run", "--json", "--exclude", "b.*"]) == 0
    report = document(capsys)
    assert report["output"] is None
    assert [t["name"] for t in report["tensors"]] == ["a.weight"]
    assert {s["name"]: s["reason"] for s in report["skipped"]} == {
        "b.weight": "excluded by 'b.*'",
        "norm.weight": "1-D",
    }
    assert 0.8 < report["kept_energy"] < 1


def test_nothing_selected_is_remarked_on_stderr_unless_quiet(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prune", str(model), "--dry-run", "--include", "nothing"]
    assert run(arguments) == 0
    assert "no tensor was selected" in capsys.readouterr().err
    assert run([*arguments, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_nan_exits_4_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = normal(1, (8, 8))
    weight[5, 6] = np.nan
    source = save(tmp_path / "in", {"a.weight": weight})
    for command in (["prune"], ["quantize", "--scale", "tensor", "--prune"]):
        assert run([*command, str(source), "-o", str(tmp_path / "out")]) == 4
        text = one_line(capsys.readouterr().err)
        assert f"{source}: tensor 'a.weight': nan at row 5, column 6" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["prune"], ["quantize", "--scale", "block", "--prune"]])
def test_output_rules(command: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    output = model.with_name("out")
    assert run([*command, str(model), "-o", str(model), "--force"]) == 1
    assert "is the input" in one_line(capsys.readouterr().err)
    assert model.read_bytes() == before
    output.write_text("precious")
    assert run([*command, str(model), "-o", str(output)]) == 1
    assert "exists" in one_line(capsys.readouterr().err)
    assert output.read_text() == "precious"
    assert run([*command, str(model), "-o", str(output), "--force"]) == 0
    capsys.readouterr()
    assert run([*command, str(model), "-o", str(model.with_name("no") / "out")]) == 1
    assert "does not exist" in one_line(capsys.readouterr().err)


def test_a_folder_that_may_not_be_written(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the system would answer; root, who often runs tests, may write to any folder."""
    system_open = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", path)
        return system_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert run(["prune", str(model), "-o", str(model.with_name("out"))]) == 1
    assert "Permission denied" in one_line(capsys.readouterr().err)


def test_the_mode_of_the_output_follows_the_umask(model: Path) -> None:
    old = os.umask(0o027)
    try:
        assert run(["prune", str(model), "-o", str(model.with_name("out"))]) == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE(model.with_name("out").stat().st_mode) == 0o640


# --- quantize --------------------------------------------------------------------------------


def test_quantize_prints_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = model.with_name("out")
    arguments = ["--scale", "block", "--prune", "--layout", "sm90"]
    assert run(["quantize", str(model), "-o", str(output), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].split() == [
        "tensor", "dtype", "shape", "SNR", "dB", "clipped", "underflow", "kept", "energy",
    ]  # fmt: skip
    assert lines[1].split()[0] == "a.weight"
    assert lines[-2] == "packed 2 of 3 tensors as e4m3, scale by block 128x128, layout sm90"
    assert "a.weight_blocks" in load(output)[0]


def test_a_weight_that_is_not_sparse_exits_4(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = model.with_name("out")
    assert run(["quantize", str(model), "-o", str(output), "--scale", "tensor"]) == 4
    text = one_line(capsys.readouterr().err)
    assert f"{model}: tensor 'a.weight'" in text
    assert "row 0, group 0" in text
    assert not output.exists()


def test_quantize_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = model.with_name("out")
    assert (
        run(["quantize", str(model), "-o", str(output), "--type", "f16", "--prune", "--json"]) == 0
    )
    report = document(capsys)
    assert (report["type"], report["scale"], report["layout"]) == ("f16", "none", "row")
    assert report["tensors"][0]["snr_db"] is None  # a bf16 weight in f16: exact
    assert report["output_bytes"] == output.stat().st_size
    assert report["source_bytes"] == model.stat().st_size


# --- verify ----------------------------------------------------------------------------------


def test_verify_says_how_it_was_done(
    model: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["verify", str(packed), "--against", str(model)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "numerics ran on the CPU: no usable GPU: this is a test" in captured.out
    assert "2 of 2 packed tensors are right" in captured.out
    assert "1 tensors passed through, all the same" in captured.out
    assert run(["verify", str(packed), "--device", "cpu"]) == 0
    assert "numerics ran on the CPU\n" in capsys.readouterr().out


def test_verify_exits_3_with_the_first_wrong_place(
    model: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, metadata = load(packed)
    values = tensors["b.weight_values"].copy()
    values.view(np.uint8)[11, 4] ^= 1
    save(packed, tensors | {"b.weight_values": values}, metadata)
    capsys.readouterr()
    assert run(["verify", str(packed), "--against", str(model)]) == 3
    captured = capsys.readouterr()
    assert "1 of 2 packed tensors are right" in captured.out
    assert "WRONG" in captured.out
    assert f"{packed}: b.weight: agreement: code at row 11, column " in one_line(captured.err)

    assert run(["verify", str(packed), "--against", str(model), "--json"]) == 3
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["passed"] is False
    assert [t["passed"] for t in report["tensors"]] == [True, False]
    assert one_line(captured.err).strip().endswith(report["failure"])


@pytest.mark.parametrize("command", [["prune"], ["quantize", "--scale", "vector", "--prune"]])
def test_conversion_on_a_gpu_that_is_not_there(
    model: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    output = model.with_name("out.safetensors")
    asked = [*command, str(model), "-o", str(output), "--device"]
    assert run([*asked, "cuda"]) == 5
    assert one_line(capsys.readouterr().err) == "sp24: error: no usable GPU: this is a test\n"
    assert not output.exists()
    assert run([*asked, "auto", "--json"]) == 0
    assert document(capsys)["device"] == "cpu"


WANDA = [
    "quantize", "--scale", "vector", "--prune", "--method", "wanda", "--activation-norms", "AMAX",
]  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "--method", "sparsegpt", "--hessians", "HESSIANS"],
        ["prune", "--permute"],
        ["quantize", "--scale", "vector", "--prune", "--permute"],
        ["quantize", "--scale", "vector", "--prune", "--calibrate", "mse"],
        ["quantize", "--scale", "tensor", "--prune", "--amax-history", "HISTORY"],
        ["quantize", "--scale", "vector", "--prune", "--smooth", "AMAX"],
        [*WANDA, "--permute"],
        [*WANDA, "--smooth", "AMAX"],
    ],
    ids=[
        "sparsegpt",
        "permute",
        "quantize-permute",
        "calibrate",
        "history",
        "smooth",
        "wanda-permute",
        "wanda-smooth",
    ],
)
def test_what_a_gpu_does_not_do_is_left_to_the_cpu(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    device = ConvertDevice()
    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(lambda: device))
    side = tmp_path / "side.safetensors"
    tensors = {}
    for name, k in (("a.weight", 64), ("b.weight", 36)):
        x = normal(4, (k, 2 * k))
        if "HESSIANS" in command:
            tensors[name] = x @ x.T
        elif "HISTORY" in command:
            tensors[name] = np.float32([2.0, 3.0])
        else:
            tensors[name] = np.abs(x).max(axis=1)
    save(side, tensors)
    words = [str(side) if word.isupper() else word for word in command]
    outputs = []
    for where in ("cuda", "cpu"):
        output = tmp_path / f"{where}.safetensors"
        assert run([*words, str(model), "-o", str(output), "--device", where]) == 0
        outputs.append(output.read_bytes())
        said = capsys.readouterr().out
        assert ("\nran on Simulated H200, but 2 tensors on the CPU\n" in said) == (where == "cuda")
    assert outputs[0] == outputs[1]


def test_the_gpu_that_did_the_work_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    device = ConvertDevice()
    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(lambda: device))
    output = str(model.with_name("out.safetensors"))
    assert run(["prune", str(model), "-o", output, "--device", "auto"]) == 0
    assert "\nran on Simulated H200\n" in capsys.readouterr().out
    assert {"prune_magnitude_24_bf16", "prune_magnitude_24_f32"} <= set(device.launches)
    assert run(["prune", str(model), "-o", output, "--force"]) == 0
    assert "ran on" not in capsys.readouterr().out
    alone = ["--permute", "--device", "auto"]
    assert run(["prune", str(model), "-o", output, "--force", *alone]) == 0
    assert "ran on" not in capsys.readouterr().out


VECTOR = ["--prune", "--scale", "vector"]


@pytest.mark.parametrize(
    ("command", "kernel"),
    [
        (["prune", "--pattern", "1:4"], "prune_magnitude_nm_bf16"),
        (["prune", "--method", "wanda", "--activation-norms", "NORMS"], "prune_wanda_24_bf16"),
        (
            ["quantize", *VECTOR, "--method", "wanda", "--activation-norms", "NORMS"],
            "prune_wanda_24_f32",
        ),
        (["quantize", "--prune", "--scale", "mx"], "quantize_e4m3_bf16"),
    ],
)
def test_what_a_gpu_does_too(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    kernel: str,
) -> None:
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    device = ConvertDevice()
    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(lambda: device))
    tensors = {"a.weight": np.ones(64, np.float32), "b.weight": np.ones(36, np.float32)}
    norms = save(model.with_name("norms"), tensors)
    asked = [str(norms) if word == "NORMS" else word for word in command]
    output = model.with_name("out.safetensors")
    assert run([*asked, str(model), "-o", str(output), "--device", "cuda"]) == 0
    assert "\nran on Simulated H200\n" in capsys.readouterr().out
    assert kernel in device.launches
    there = output.read_bytes()
    assert run([*asked, str(model), "-o", str(output), "--force"]) == 0
    assert output.read_bytes() == there


def test_verify_on_cuda_without_a_gpu_exits_5(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["verify", str(packed), "--device", "cuda"]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert one_line(captured.err) == "sp24: error: no usable GPU: this is a test\n"


def test_verify_json(model: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["verify", str(packed), "--against", str(model), "--json"]) == 0
    report = document(capsys)
    assert report["passed"] is True
    assert report["device"] == "cpu"
    for tensor in report["tensors"]:
        assert tensor["agreement"]["fault"] is None
        for check in tensor["numerics"]["checks"]:
            assert check["passed"]
            assert check["max_error"] <= check["bound"]


# --- bench -----------------------------------------------------------------------------------


def test_bench_without_a_gpu_exits_5(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["bench", str(packed)]) == 5
    assert "no usable GPU" in one_line(capsys.readouterr().err)


# --- unpack and inspect ----------------------------------------------------------------------


def test_unpack(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = packed.with_name("dense")
    capsys.readouterr()
    assert run(["unpack", str(packed), "-o", str(output)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "unpacked 2 tensors, copied 1 as they are" in captured.out
    assert load(output)[0]["a.weight"].dtype == "bfloat16"
    assert run(["unpack", str(packed), "-o", str(output), "--force", "--codes", "--json"]) == 0
    report = document(capsys)
    assert [t["dtype"] for t in report["tensors"]] == ["F8_E4M3", "F8_E4M3"]


def test_inspect(model: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["inspect", str(model)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "3 plain tensors, 0 of them 2:4" in captured.out
    assert run(["inspect", str(packed)]) == 0
    text = capsys.readouterr().out
    assert "2 packed, 1 plain tensors" in text
    assert run(["inspect", str(packed), "--json"]) == 0
    report = document(capsys)
    assert [p["scale_shape"] for p in report["packed"]] == [[64, 1], [20, 1]]


# --- the console -----------------------------------------------------------------------------


def test_bars_appear_on_a_terminal_only(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["prune", str(model), "--dry-run"]) == 0
    assert "prune" in capsys.readouterr().err
    assert run(["prune", str(model), "--dry-run", "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (90_868_376, "90.9 MB"),
        (5 * 10**12, "5000.0 GB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert console.size(count) == text


def test_every_listed_command_exists() -> None:
    assert cli_main.cli.list_commands(None) == list(COMMANDS)  # type: ignore[arg-type]


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no /dev/stdout here")
@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("output", ["/dev/stdout", "/dev/stderr"])
def test_an_output_cannot_be_where_the_report_is_printed(
    model: Path, output: str, force: tuple[str, ...]
) -> None:
    folder = model.with_name("folder")
    folder.mkdir()
    model.rename(folder / model.name)
    printed = folder.with_name("printed")
    for source, what in ((folder / model.name, "regular file"), (folder, "folder")):
        command = [*SP24, "prune", str(source), "-o", output, *force]
        piped = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        assert (piped.returncode, piped.stdout) == (1, "")
        assert one_line(piped.stderr).startswith(f"sp24: error: {output}: is not a {what}")
        with open(printed, "w") as file:
            done = subprocess.run(command, env=ENVIRONMENT, stdout=file, stderr=file)
        assert done.returncode == 1
        assert f"{output}: is " in one_line(printed.read_text())
    with open(printed, "w") as file:
        command = [*SP24, "prune", str(folder / model.name), "-o", str(printed), *force]
        assert subprocess.run(command, env=ENVIRONMENT, stdout=file).returncode == 1
    assert printed.read_text() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_standard_output_that_is_full_is_named(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (8, 16))})
    command = [sys.executable, "-m", "sp24cli", "prune", source, "-o", tmp_path / "out"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()
    assert message[0] == "sp24: error: standard output: No space left on device"
    assert (tmp_path / "out").exists()
