"""``sp24 convert``, ``--dequantize-fp8`` and what ``unpack`` makes of other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp24cli.cli.main import run
from tests.cpu.modelfile import DTYPES, load, normal, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(
        tmp_path / "model.safetensors",
        {"a.weight": normal(1, (64, 64), "BF16"), "norm.weight": normal(3, (64,))},
    )


@pytest.fixture
def packed(model: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    output = model.with_name("packed.safetensors")
    assert run(["quantize", str(model), "-o", str(output), "--scale", "vector", "--prune"]) == 0
    capsys.readouterr()
    return output


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    scale = np.full((1,), 0.01, np.float32)
    codes = normal(5, (64, 64), deviation=100).astype(DTYPES["F8_E4M3"])
    tensors = {"a.weight": codes, "a.weight_scale": scale, "norm.weight": normal(6, (64,))}
    return save(tmp_path / "fp8.safetensors", tensors)


def error(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.startswith("sp24: error: ")
    assert text.count("\n") == 1
    return text


def test_convert_prints_the_config(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = packed.with_name("out")
    assert run(["convert", str(packed), "-o", str(output), "--format", "sparse-24-bitmask"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "converted 1 tensors from sp24 to sparse-24-bitmask, copied 1 as they are" in (
        captured.out
    )
    begin, end = captured.out.index("{"), captured.out.rindex("}")
    config = json.loads(captured.out[begin : end + 1])["quantization_config"]
    assert config["sparsity_config"]["format"] == "sparse-24-bitmask"
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert set(load(output)[0]) == {
        "a.shape", "a.compressed", "a.bitmask", "a.weight_scale", "norm.weight",
    }  # fmt: skip


def test_convert_writes_the_config(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, config = packed.with_name("out"), packed.with_name("quantization.json")
    base = ["convert", str(packed), "--format", "compressed-tensors-fp8", "--config", str(config)]
    assert run([*base, "--dry-run"]) == 0
    assert not config.exists()
    assert "config.json needs this:" in capsys.readouterr().out
    assert run([*base, "-o", str(output)]) == 0
    assert "{" not in capsys.readouterr().out
    described = json.loads(config.read_text())
    assert run([*base, "-o", str(output), "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert described == {"quantization_config": report["quantization_config"]}
    output.unlink()
    assert run([*base, "-o", str(output)]) == 1
    assert "exists already" in error(capsys)
    assert not output.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--format", "gguf"],
        ["--format", "sp24", "--config", "x.json"],
        ["--format", "sparse-24-bitmask", "--layout", "sm90"],
    ],
)
def test_convert_usage(
    packed: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(packed), "-o", str(packed.with_name("out")), *arguments]) == 2
    assert error(capsys)


def test_layouts_turn_into_each_other(packed: Path, tmp_path: Path) -> None:
    sm90, again = tmp_path / "sm90", tmp_path / "again"
    base = ["convert", "--format", "sp24"]
    assert run([*base, str(packed), "-o", str(sm90), "--layout", "sm90"]) == 0
    assert "a.weight_blocks" in load(sm90)[0]
    assert run([*base, str(sm90), "-o", str(again)]) == 0
    assert again.read_bytes() == packed.read_bytes()


def test_a_checkpoint_is_converted_with_its_config(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, metadata = load(packed)
    folder = tmp_path / "model"
    folder.mkdir()
    table = {}
    for n in (1, 2):
        name = f"model-0000{n}-of-00002.safetensors"
        renamed = {f"l{n}.{key}": value for key, value in tensors.items()}
        described = metadata["sp24.tensors"].replace('"a.weight"', f'"l{n}.a.weight"')
        save(folder / name, renamed, metadata | {"sp24.tensors": described})
        table |= dict.fromkeys(renamed, name)
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = {"hidden_size": 64, "quantization_config": {"quant_method": "sp24"}}
    (folder / "config.json").write_text(json.dumps(before))

    def config(out: Path) -> Any:
        return json.loads((out / "config.json").read_text())

    mask, again = tmp_path / "mask", tmp_path / "again"
    assert run(["convert", str(folder), "-o", str(mask), "--format", "sparse-24-bitmask"]) == 0
    assert "{" not in capsys.readouterr().out
    assert config(mask)["hidden_size"] == 64
    assert config(mask)["quantization_config"]["sparsity_config"]["ignore"] == ["lm_head"]
    assert run(["convert", str(mask), "-o", str(again), "--format", "sp24"]) == 0
    assert config(again)["quantization_config"]["quant_method"] == "sp24"
    for shard in set(table.values()):
        got, want = load(again / shard), load(folder / shard)
        assert got[1] == want[1]
        assert {n: t.tobytes() for n, t in got[0].items()} == {
            n: t.tobytes() for n, t in want[0].items()
        }


def test_a_config_that_is_written_nowhere_is_printed(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    packed.rename(model / packed.name)
    base = ["convert", str(model), "--format", "compressed-tensors-fp8"]
    out, config = ["-o", str(tmp_path / "out"), "--force"], tmp_path / "quantization.json"

    def printed(*options: str) -> bool:
        assert run([*base, *options]) == 0
        return "quantization_config" in capsys.readouterr().out

    assert printed(*out)
    assert printed("--dry-run")
    assert printed("--dry-run", "--config", str(config))
    assert not printed(*out, "--config", str(config))
    (model / "config.json").write_text("{}")
    assert not printed(*out)
    assert printed("--dry-run")


@pytest.mark.parametrize("command", ["prune", "quantize"])
def test_fp8_is_left_alone_with_a_note_and_taken_on_request(
    fp8: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    base = [command, str(fp8), "-o", str(output), "--force"]
    base += ["--scale", "vector", "--prune"] if command == "quantize" else []
    assert run(base) == 0
    assert "1 FP8 tensors were left as they are; --dequantize-fp8" in capsys.readouterr().err
    assert load(output)[0]["a.weight"].tobytes() == load(fp8)[0]["a.weight"].tobytes()
    assert run([*base, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert run([*base, "--dequantize-fp8", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[1].split()[:2] == ["a.weight", "BF16"]
    name = "a.weight" if command == "prune" else "a.weight_values"
    assert name in load(output)[0]


def test_a_note_speaks_of_weights_that_would_be_taken_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = np.ones((8, 64), np.uint8)
    tensors = {
        "a.weight": codes.view(DTYPES["F8_E4M3FNUZ"]),
        "b.weight": codes.view(DTYPES["F8_E5M2"]),
        "b.weight_scale": codes[:, :2].copy().view(DTYPES["F8_E8M0"]),
    }
    source = save(tmp_path / "in", tensors)
    assert run(["prune", str(source), "--dry-run"]) == 0
    assert "note: 1 FP8 tensors were left as they are" in capsys.readouterr().err


def test_unpack_takes_fp8(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert run(["unpack", str(fp8), "-o", str(output)]) == 0
    assert "unpacked 1 tensors, copied 1 as they are" in capsys.readouterr().out
    assert load(output)[0]["a.weight"].dtype == DTYPES["BF16"]
    assert run(["unpack", str(fp8), "-o", str(output), "--force", "--codes"]) == 4
    assert "is not a packed file" in error(capsys)


@pytest.mark.parametrize("fault", ["beyond float16", "NaN", "none"])
def test_unpack_tells_of_what_is_not_finite(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of FP8 of another tool and of our own packing alike, and only where there is any."""
    codes = normal(5, (64, 64), deviation=100).astype(DTYPES["F8_E4M3"])
    codes[40, 8] = np.nan if fault == "NaN" else 448
    scale = np.full((1,), 256 if fault == "beyond float16" else 0.01, np.float32)
    source = save(tmp_path / "fp8", {"a.weight": codes, "a.weight_scale": scale})
    output = tmp_path / "out"
    assert run(["unpack", str(source), "-o", str(output), "--dtype", "f16"]) == 0
    told = (
        "warning: 1 weights have infinite values or NaN now, as a.weight" in capsys.readouterr().err
    )
    assert told == (fault != "none")
    assert told != np.isfinite(load(output)[0]["a.weight"]).all()

    dense = normal(5, (64, 64), "F32")
    dense[40] *= 1e9 if fault == "beyond float16" else 1
    source, packed = save(tmp_path / "dense", {"a.weight": dense}), tmp_path / "packed"
    how = ["--scale", "vector", "--prune", "--overflow", "nan"]
    assert run(["quantize", str(source), "-o", str(packed), *how]) == 0
    assert run(["unpack", str(packed), "-o", str(output), "--force", "--dtype", "f16"]) == 0
    told = (
        "warning: 1 weights have infinite values or NaN now, as a.weight" in capsys.readouterr().err
    )
    assert told == (fault == "beyond float16")
    assert told != np.isfinite(load(output)[0]["a.weight"]).all()


def test_unpack_tells_of_what_it_clamped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of our own packing and of a bitmask alike, and only where there is any."""
    dense = normal(5, (64, 64), "F32")
    dense[40] *= 1e7
    source, packed = save(tmp_path / "dense", {"a.weight": dense}), tmp_path / "packed"
    assert run(["quantize", str(source), "-o", str(packed), "--scale", "vector", "--prune"]) == 0
    mask, output = tmp_path / "mask", tmp_path / "out"
    assert run(["convert", str(packed), "-o", str(mask), "--format", "sparse-24-bitmask"]) == 0
    for each in (packed, mask):
        command = ["unpack", str(each), "-o", str(output), "--force"]
        capsys.readouterr()
        assert run([*command, "--dtype", "f16"]) == 0
        count = int((np.abs(load(output)[0]["a.weight"]) == 65504).sum())
        assert count > 20
        assert capsys.readouterr().err == (
            "sp24: warning: 1 weights have values beyond their dtype, as a.weight: "
            f"{count} are its largest now\n"
        )
        assert run([*command, "--dtype", "f16", "--json"]) == 0
        (tensor,) = json.loads(capsys.readouterr().out)["tensors"]
        assert tensor["saturated"] == count
        assert run([*command, "--dtype", "f16", "--quiet"]) == 0
        assert run([*command, "--dtype", "f32"]) == 0
        assert capsys.readouterr().err == ""


def test_what_is_no_fp8_weight_with_a_scale_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache in FP8, FP8 without a scale: whoever wrote it knows what it means."""
    codes = normal(5, (8, 8)).astype(DTYPES["F8_E4M3"])
    tensors = {
        "a.weight": codes,
        "a.weight_scale": np.ones(1, np.float32),
        "b.weight": codes,
        "c": codes[0],
        "a.input_scale": np.ones(1, np.float32),
    }
    source = save(tmp_path / "in", tensors)
    assert run(["unpack", str(source), "-o", str(tmp_path / "out")]) == 0
    note = "sp24: note: 1 FP8 weights without a scale were left as they are, as b.weight\n"
    assert capsys.readouterr().err == note
    after = load(tmp_path / "out")[0]
    assert set(after) == set(tensors) - {"a.weight_scale"}
    for name in ("b.weight", "c", "a.input_scale"):
        assert after[name].tobytes() == tensors[name].tobytes()
