"""Pruning, quantizing, verifying and unpacking whole checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sp24cli
from sp24cli.checkpoint.folder import JOURNAL_NAME
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.writer import StreamingWriter, identity
from sp24cli.cli.main import run
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.formats.foreign import SP24
from sp24cli.ops import (
    inspect_file,
    prune_checkpoint,
    prune_file,
    quantize_checkpoint,
    quantize_file,
    unpack_checkpoint,
)
from sp24cli.ops import shards as writing
from sp24cli.ops.checkpoint import convert_checkpoint
from sp24cli.ops.journal import Journal, fingerprint, rebuild
from sp24cli.ops.prune import PruneReport
from sp24cli.ops.quantize import QuantizeReport
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import verify_file
from tests.cpu.checkpoints import (
    INDEX,
    as_snapshot,
    contents,
    shard,
    small_model,
    tensors_of,
    write_checkpoint,
)
from tests.cpu.modelfile import naive_prune, normal, save

ROOT = Path(sp24cli.__file__).parent.parent
E4M3: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")}
TAKEN = (
    "model.layers.0.attn.q.weight",
    "model.layers.0.mlp.up.weight",
    "model.layers.1.mlp.up.weight",
    "model.layers.1.attn.q.weight",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", metadata={"total_size": 1, "note": "kept"})


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed `quantize --prune` writes."""
    quantize_checkpoint(model, tmp_path / "whole", prune=True, **E4M3)
    return contents(tmp_path / "whole")


# --- what is written -------------------------------------------------------------------------


def test_pruning_a_checkpoint_is_pruning_its_shards(model: Path, tmp_path: Path) -> None:
    before = contents(model)
    done = prune_checkpoint(model, tmp_path / "out")
    assert contents(model) == before
    for number in (1, 2, 3, 4):
        prune_file(model / shard(number), tmp_path / "one", overwrite=True)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "out" / shard(number)).read_bytes()
    dense = {name: array for tensors in small_model() for name, array in tensors.items()}
    found = tensors_of(tmp_path / "out")
    assert set(found) == set(dense)
    kept = total = 0.0
    for name, array in dense.items():
        want = naive_prune(array) if name in TAKEN else array
        assert found[name].tobytes() == want.tobytes(), name
        if name in TAKEN:
            kept += float(np.square(want.astype(np.float64)).sum())
            total += float(np.square(array.astype(np.float64)).sum())
    assert [t.name for t in done.report.tensors] == list(TAKEN)
    assert done.report.kept_energy == pytest.approx(kept / total, rel=1e-12)
    assert len(done.report.skipped) == 7
    # Everything else is carried over as it is, and nothing of the run is left behind.
    others = {n: raw for n, raw in before.items() if not n.endswith((".safetensors", INDEX))}
    assert {n: raw for n, raw in contents(tmp_path / "out").items() if n in others} == others
    assert set(contents(tmp_path / "out")) == set(before)
    assert done.folder is not None
    assert done.folder.carried == tuple(sorted(others))
    sizes = [(tmp_path / "out" / shard(n)).stat().st_size for n in (1, 2, 3, 4)]
    assert [s.output_bytes for s in done.folder.shards] == sizes
    assert done.report.output_bytes == sum(sizes)
    assert done.folder.disk_bytes == sum(len(raw) for raw in contents(tmp_path / "out").values())


def test_the_new_index_counts_the_new_tensors(whole: dict[str, bytes], tmp_path: Path) -> None:
    table = json.loads(whole[INDEX])
    tensors = tensors_of(tmp_path / "whole")
    assert table["metadata"] == {
        "total_size": sum(array.nbytes for array in tensors.values()),
        "note": "kept",
    }
    assert list(table["weight_map"]) == sorted(tensors)
    for part in ("values", "meta", "scale"):
        assert table["weight_map"][f"{TAKEN[0]}_{part}"] == shard(1)
    assert TAKEN[0] not in table["weight_map"]


def test_a_checkpoint_goes_round(
    model: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "whole"
    for original in (model, model / INDEX):
        report = verify_file(packed, original, device="cpu")
        assert report.failure is None
        assert len(report.tensors) == 4
        assert report.passed_through == 7
    prune_checkpoint(model, tmp_path / "pruned")
    assert verify_file(packed, tmp_path / "pruned", device="cpu").passed
    unpack_checkpoint(packed, tmp_path / "dense")
    pruned, dense = tensors_of(tmp_path / "pruned"), tensors_of(tmp_path / "dense")
    assert set(dense) == set(pruned)
    for name, array in dense.items():
        assert array.dtype == pruned[name].dtype
        if name in TAKEN:
            assert np.array_equal(array == 0, pruned[name] == 0)
            assert np.allclose(array.astype(float), pruned[name].astype(float), rtol=0.07)
        else:
            assert array.tobytes() == pruned[name].tobytes()
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "sp24"
    original = json.loads((model / "config.json").read_text())
    assert json.loads((tmp_path / "dense" / "config.json").read_text()) == original

    shown = inspect_file(packed)
    assert {item.name for item in shown.packed} == set(TAKEN)
    assert len(shown.tensors) == 7
    assert shown.metadata == {"format": "pt"}
    assert run(["verify", str(packed), "--against", str(model), "--device", "cpu"]) == 0
    assert run(["inspect", str(packed)]) == 0
    assert "4 of 4 packed tensors are right" in capsys.readouterr().out


def test_a_wrong_byte_in_a_shard_is_found(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for number in (1, 3, 4):
        path = tmp_path / "whole" / shard(number)
        raw = bytearray(whole[shard(number)])
        raw[-1] ^= 1
        path.write_bytes(raw)
        report = verify_file(tmp_path / "whole", model, device="cpu")
        assert report.failure is not None
        path.write_bytes(whole[shard(number)])
    assert verify_file(tmp_path / "whole", model, device="cpu").passed


def test_a_dense_shard_among_packed_ones_is_named(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    packed = tmp_path / "whole"
    shutil.copy(model / shard(4), packed / shard(4))
    table = json.loads(whole[INDEX])
    names = {n: s for n, s in table["weight_map"].items() if s != shard(4)}
    names |= dict.fromkeys(small_model()[3], shard(4))
    (packed / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BadInputError, match=re.escape(f"{shard(4)}: is not a packed file")):
        verify_file(packed)


def test_the_quantization_of_before_comes_back(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = {"quantization_config": {"quant_method": "fp8"}, "text": "é\ud800"}
    (model / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(model, tmp_path / "packed", prune=True, **E4M3)
    packed = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert packed["quantization_config"]["original"] == {"quant_method": "fp8"}
    unpack_checkpoint(tmp_path / "packed", tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "config.json").read_text()) == config


def test_numbers_of_config_and_index_stay_as_they_are_written(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    numbers = (
        "123456789012345678901234567890",
        "-" + "9" * 5000,
        "0.10000000000000000000000001",
        "1e400",
        "1.0E-5",
        "-0",
        "12",
    )
    listed = ", ".join(numbers)
    (model / "config.json").write_text(f'{{"a": [{listed}, [], {{}}, null], "e": "\\u00e9"}}')
    weights = json.loads((model / INDEX).read_text())["weight_map"]
    metadata = f'{{"total_size": 1e3, "of": [{listed}]}}'
    (model / INDEX).write_text(f'{{"metadata": {metadata}, "weight_map": {json.dumps(weights)}}}')
    quantize_checkpoint(model, tmp_path / "packed", prune=True, **E4M3)
    unpack_checkpoint(tmp_path / "packed", tmp_path / "dense")
    lines = "".join(f"    {number},\n" for number in numbers)
    assert (tmp_path / "dense" / "config.json").read_text() == (
        f'{{\n  "a": [\n{lines}    [],\n    {{}},\n    null\n  ],\n  "e": "\\u00e9"\n}}\n'
    )
    index = (tmp_path / "dense" / INDEX).read_text()
    assert all(f"      {number}" in index for number in numbers)


def test_another_layout_keeps_what_the_config_says(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", [{"a.weight": normal(1, (64, 64), "BF16")}])
    before = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (model / "config.json").write_text(json.dumps(before))
    quantize_checkpoint(model, tmp_path / "row", prune=True, overflow="nan", **E4M3)
    convert_checkpoint(tmp_path / "row", tmp_path / "sm90", format=SP24, layout="sm90")
    row, sm90 = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("row", "sm90"))
    assert row["quantization_config"] | {"layout": "sm90"} == sm90["quantization_config"]
    convert_checkpoint(tmp_path / "sm90", tmp_path / "again", format=SP24, layout="row")
    same = [(tmp_path / f / "config.json").read_bytes() for f in ("row", "again")]
    assert same[0] == same[1]
    unpack_checkpoint(tmp_path / "sm90", tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "config.json").read_text()) == before


def test_the_config_goes_on_to_speak_of_fp8_without_a_scale(tmp_path: Path) -> None:
    codes = normal(11, (32, 64), "F8_E4M3", deviation=30)
    tensors = {"a.weight": codes, "a.weight_scale": np.ones(1, np.float32)}
    config = {"quantization_config": {"quant_method": "fp8"}}
    for name, more in (("whole", {}), ("half", {"b.weight": codes})):
        model = write_checkpoint(tmp_path / name, [tensors | more], others=False)
        (model / "config.json").write_text(json.dumps(config))
        done = unpack_checkpoint(model, tmp_path / f"{name}-dense")
        assert done.report.without_scale == tuple(more)
        after = json.loads((tmp_path / f"{name}-dense" / "config.json").read_text())
        assert after == (config if more else {})


def test_a_config_that_is_no_json_stops_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(BadInputError, match=r"config\.json: config is not JSON"):
        quantize_checkpoint(model, tmp_path / "out", prune=True, **E4M3)
    assert not (tmp_path / "out").exists()


def test_one_file_in_a_folder_needs_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder / "model.safetensors", {"a.weight": normal(1, (8, 8))})
    (folder / "pytorch_model.bin").write_bytes(b"the old weights")
    done = prune_checkpoint(folder, tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"model.safetensors"}
    assert done.folder is not None
    assert done.folder.index is None
    assert [item.name for item in done.folder.left_out] == ["pytorch_model.bin"]


def test_modes_follow_the_umask(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        if path.is_file():
            path.chmod(0o400)
    before = os.umask(0o027)
    try:
        prune_checkpoint(model, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert modes == {0o640}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_the_bytes_do_not_depend_on_workers(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for workers in (1, 3):
        quantize_checkpoint(model, tmp_path / f"w{workers}", prune=True, workers=workers, **E4M3)
        assert contents(tmp_path / f"w{workers}") == whole


def test_a_scale_in_another_shard_is_found(tmp_path: Path) -> None:
    shards = small_model()
    codes = normal(11, (32, 64), "F8_E4M3", deviation=30)
    scale = np.full((32, 1), 2.0**-10, np.float32)
    name = "model.layers.2.mlp.up.weight"
    shards[1][name] = codes
    shards[3][f"{name}_scale"] = scale
    model = write_checkpoint(tmp_path / "model", shards)
    dense = (codes.astype(np.float32) * scale).astype(shards[0][TAKEN[0]].dtype)

    prune_checkpoint(model, tmp_path / "pruned", dequantize_fp8="BF16")
    found = tensors_of(tmp_path / "pruned")
    assert found[name].tobytes() == naive_prune(dense).tobytes()
    assert f"{name}_scale" not in found
    quantize_checkpoint(model, tmp_path / "direct", prune=True, dequantize_fp8="BF16", **E4M3)
    quantize_checkpoint(tmp_path / "pruned", tmp_path / "packed", prune=True, **E4M3)
    direct, packed = tensors_of(tmp_path / "direct"), tensors_of(tmp_path / "packed")
    assert direct.keys() == packed.keys()
    for key, array in direct.items():
        assert array.tobytes() == packed[key].tobytes(), key
    # Left alone, both pass through as they are.
    prune_checkpoint(model, tmp_path / "plain")
    assert tensors_of(tmp_path / "plain")[name].tobytes() == codes.tobytes()
    assert tensors_of(tmp_path / "plain")[f"{name}_scale"].tobytes() == scale.tobytes()


def test_headers_are_not_read_anew_for_each_of_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where scales may lie in any shard, each looks at all others."""
    opened: list[str] = []
    plain = SafetensorsFile.__init__

    def init(file: SafetensorsFile, path: Path) -> None:
        opened.append(os.fspath(path))
        plain(file, path)

    monkeypatch.setattr(SafetensorsFile, "__init__", init)
    most = []
    for count in (3, 12):
        shards = []
        for i in range(count):
            codes = normal(i, (8, 16), "F8_E4M3", deviation=30)
            scale = np.full((8, 1), 2.0**-10, np.float32)
            shards.append({f"l.{i}.weight": codes, f"l.{(i + 1) % count}.weight_scale": scale})
        model = write_checkpoint(tmp_path / f"model{count}", shards)
        opened.clear()
        unpack_checkpoint(model, tmp_path / f"dense{count}")
        mine = [path for path in opened if f"model{count}" in path]
        most.append(max(mine.count(path) for path in mine))
    assert most[0] == most[1]


# --- snapshots -------------------------------------------------------------------------------


def test_a_snapshot_gives_the_same_and_is_never_written_through(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    hub = tmp_path / "models--me--tiny"
    snapshot = as_snapshot(model, hub)
    before = contents(hub)
    quantize_checkpoint(snapshot, tmp_path / "out", prune=True, **E4M3)
    assert contents(tmp_path / "out") == whole
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert verify_file(tmp_path / "out", snapshot, device="cpu").passed

    for output in (snapshot, hub / "blobs", hub / "blobs" / "new", snapshot / "new", hub, tmp_path):
        with pytest.raises(Sp24Error, match="input"):
            prune_checkpoint(snapshot, output, overwrite=True)
    (tmp_path / "link").symlink_to(snapshot)
    with pytest.raises(Sp24Error, match="is the input folder"):
        prune_checkpoint(snapshot, tmp_path / "link", overwrite=True)
    assert contents(hub) == before


@pytest.mark.parametrize("resume", [False, True])
def test_links_in_an_output_are_replaced_not_followed(
    model: Path, tmp_path: Path, resume: bool
) -> None:
    """A copy of a snapshot by links, given as the output, leads to the blobs."""
    snapshot = as_snapshot(model, tmp_path / "hub")
    output = tmp_path / "out"
    shutil.copytree(snapshot, output, symlinks=True)
    for path in [*output.rglob("*")]:
        if path.is_symlink():
            target = (snapshot / path.relative_to(output)).resolve()
            path.unlink()
            path.symlink_to(target)
    before = contents(tmp_path / "hub")
    if resume:
        (output / JOURNAL_NAME).write_text("{}")
    prune_checkpoint(snapshot, output, overwrite=not resume, resume=resume)
    assert contents(tmp_path / "hub") == before
    assert not any(path.is_symlink() for path in output.rglob("*"))


# --- refusals --------------------------------------------------------------------------------


def test_all_shards_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    shards = small_model()
    shards[3]["model.layers.1.attn.q.weight"][5, 7] = np.nan
    model = write_checkpoint(tmp_path / "model", shards)
    calls: list[Callable[[], object]] = [
        lambda: prune_checkpoint(model, tmp_path / "out"),
        lambda: quantize_checkpoint(model, tmp_path / "out", prune=True, **E4M3),
    ]
    for call in calls:
        with pytest.raises(BadInputError, match="nan at row 5, column 7") as raised:
            call()
        assert str(raised.value).startswith(f"{model / shard(4)}: tensor ")
        assert not (tmp_path / "out").exists()


def test_a_weight_of_the_last_shard_that_is_not_24_stops_before_the_first(
    model: Path, tmp_path: Path
) -> None:
    prune_checkpoint(model, tmp_path / "pruned")
    shutil.copy(model / shard(4), tmp_path / "pruned" / shard(4))
    with pytest.raises(
        BadInputError, match=r"row 0, group 0 \(columns 0 to 3\): not 2:4"
    ) as raised:
        quantize_checkpoint(tmp_path / "pruned", tmp_path / "out", **E4M3)
    assert str(tmp_path / "pruned" / shard(4)) in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_two_shards_that_would_write_one_name_are_refused(tmp_path: Path) -> None:
    shards = small_model()
    shards[2][f"{TAKEN[0]}_values"] = normal(1, (4, 4))
    model = write_checkpoint(tmp_path / "model", shards)
    with pytest.raises(BadInputError, match="would have a tensor"):
        quantize_checkpoint(model, tmp_path / "out", prune=True, **E4M3)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_refused(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    prune_checkpoint(model, output)
    first = contents(output)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(Sp24Error, match="exists already and is not empty"):
        prune_checkpoint(model, output)
    with pytest.raises(Sp24Error, match="has no journal to resume by"):
        quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert contents(output) == first | {"notes.txt": b"mine"}
    # Finished, perhaps, and killed before it could say so.
    done = prune_checkpoint(model, output, resume=True)
    assert done.folder is not None
    assert done.folder.resumed == 0
    assert contents(output) == first | {"notes.txt": b"mine"}
    (output / shard(2)).write_bytes(b"old")
    prune_checkpoint(model, output, overwrite=True)
    assert contents(output) == first | {"notes.txt": b"mine"}
    (output / "other.safetensors").write_bytes(b"old weights")
    with pytest.raises(Sp24Error, match=r"has other\.safetensors, which would stay"):
        prune_checkpoint(model, output, overwrite=True)


def states(folder: Path) -> dict[str, tuple[bytes, list[int]]]:
    """The files below ``folder``, hidden ones too, each with what changes when it is written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(f.relative_to(folder)): (f.read_bytes(), identity(f)) for f in files}


def refused_as_another_output(call: Callable[[], object], output: Path, name: str) -> None:
    before = states(output)
    message = f"{output / name}: is not the output of this run; --force replaces what is there"
    with pytest.raises(Sp24Error) as raised:
        call()
    assert str(raised.value) == message
    assert raised.value.exit_code == 1
    assert states(output) == before


def test_another_model_of_the_same_architecture_is_not_replaced(tmp_path: Path) -> None:
    shards = small_model()
    model = write_checkpoint(tmp_path / "model", shards)
    prune_checkpoint(model, tmp_path / "out")
    # As a fine-tune may be: only the last weight is another.
    shards[3]["model.layers.1.attn.q.weight"] *= 2
    other = tmp_path / "other"
    prune_checkpoint(write_checkpoint(tmp_path / "tuned", shards), other)

    def resume() -> Any:
        return prune_checkpoint(model, other, resume=True)

    refused_as_another_output(resume, other, shard(4))
    shutil.copy(tmp_path / "out" / shard(4), other / shard(4))
    (other / "config.json").write_text('{"model_type": "mine"}')
    refused_as_another_output(resume, other, "config.json")
    (other / "config.json").unlink()
    with pytest.raises(Sp24Error, match=r"config\.json: is missing; --force replaces"):
        resume()
    shutil.copy(model / "config.json", other / "config.json")
    before = states(other)
    assert resume().report.output == str(other)
    assert states(other) == before
    (other / "config.json").write_text("{}")
    prune_checkpoint(model, other, resume=True, overwrite=True)
    assert contents(other) == contents(tmp_path / "out")


def test_the_original_is_not_replaced_by_what_comes_back_from_it(
    model: Path, tmp_path: Path
) -> None:
    # Dense, and its headers and index as sp24 and the usual tools write them.
    original, packed = tmp_path / "original", tmp_path / "packed"
    prune_checkpoint(model, original)
    quantize_checkpoint(original, packed, **E4M3)
    refused_as_another_output(
        lambda: unpack_checkpoint(packed, original, resume=True), original, shard(1)
    )


def test_one_file_without_an_index_is_not_replaced(tmp_path: Path) -> None:
    for seed, name in ((1, "first"), (2, "second")):
        (tmp_path / f"{name}-dense").mkdir()
        save(tmp_path / f"{name}-dense" / "model.safetensors", {"a.weight": normal(seed, (8, 16))})
        prune_checkpoint(tmp_path / f"{name}-dense", tmp_path / name)
    first, second = tmp_path / "first", tmp_path / "second"
    refused_as_another_output(
        lambda: prune_checkpoint(first, second, resume=True), second, "model.safetensors"
    )


def test_an_output_by_other_options_is_not_replaced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    prune_checkpoint(model, output)
    before = states(output)
    command = ["prune", str(model), "-o", str(output), "--resume"]
    assert run([*command, "--pattern", "4:8"]) == 1
    assert (
        "is not the output of this run; --force replaces what is there" in capsys.readouterr().err
    )
    assert states(output) == before
    assert run(command) == 0
    assert states(output) == before


def test_a_finished_output_is_compared_with_the_config_that_it_got(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "whole"
    before = states(output)
    quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert states(output) == before
    shutil.copy(model / "config.json", output / "config.json")
    refused_as_another_output(
        lambda: quantize_checkpoint(model, output, prune=True, resume=True, **E4M3),
        output,
        "config.json",
    )


def test_interrupted_while_it_compares_it_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    prune_checkpoint(model, output)
    before = states(output)
    for name in ("same_content", "_check_same"):

        def stop(*_: object) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writing, name, stop)
            with pytest.raises(KeyboardInterrupt):
                prune_checkpoint(model, output, resume=True)
        assert states(output) == before


def test_resumed_with_another_input_nothing_of_the_first_stays(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ("quantize", model, "--prune", "--scale", "vector", "-o", output)
    count = killed(tmp_path / "all", 0, *command[:-1], tmp_path / "all")
    assert killed(output, count - 3, *command) == -9
    assert JOURNAL_NAME in os.listdir(output)
    before = contents(output)
    other = tmp_path / "other"
    other.mkdir()
    save(other / "model.safetensors", {"a.weight": normal(1, (64, 32))})
    with pytest.raises(
        Sp24Error, match=r"has model-0000\d-of-00004\.safetensors, which would stay"
    ):
        prune_checkpoint(other, output, resume=True)
    assert contents(output) == before


@pytest.mark.parametrize(
    ("output", "words"),
    [("file", "is not a folder"), ("gone/out", "does not exist"), ("model", "is the input folder")],
)
def test_places_that_no_output_can_have(
    model: Path, tmp_path: Path, output: str, words: str
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Sp24Error, match=words):
        prune_checkpoint(model, tmp_path / output, overwrite=True)


def test_room_is_checked_for_all_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = prune_checkpoint(model, None).folder
    assert needed is not None
    usage = shutil.disk_usage(tmp_path)._replace(free=needed.disk_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Sp24Error, match=f"needs {needed.disk_bytes} bytes, but .* has"):
        prune_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    usage = usage._replace(free=needed.disk_bytes)
    prune_checkpoint(model, tmp_path / "out")


def test_a_dry_run_says_what_would_be_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(model), "--prune", "--scale", "vector", "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    output = str(tmp_path / "out")
    command = ["quantize", str(model), "--prune", "--scale", "vector", "-o", output, "--json"]
    assert run(command) == 0
    wet = json.loads(capsys.readouterr().out)
    assert dry.pop("output") is None
    assert wet.pop("output") == output
    assert dry == wet
    assert [s["name"] for s in dry["checkpoint"]["shards"]] == [shard(n) for n in (1, 2, 3, 4)]
    assert run(["prune", str(model), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^{re.escape(shard(2))} +16\.\d kB +16\.\d kB$", shown, re.MULTILINE)
    assert "room needed on the disk: 48.0 kB" in shown


def test_progress_counts_all_shards_and_ends_at_the_whole(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    prune_checkpoint(model, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(Sp24Error, match="cannot be made: Permission denied"):
        prune_checkpoint(model, tmp_path / "closed" / "out")


def test_a_read_only_disk_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and Path(path).parent == output:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert run(["prune", str(model), "-o", str(output)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"sp24: error: {output}: cannot be written: Read-only file system\n"
    assert contents(output) == {}


# --- going on --------------------------------------------------------------------------------

#: Runs a command and kills its own process, as `kill -9` does, at the n-th thing that it does to
#: files of the output. Without n it says how many there were.
KILLED = """
import os, signal, sys
from sp24cli.cli.main import run
output, moment = sys.argv[1], int(sys.argv[2])
seen = 0
def count(event, arguments):
    global seen
    if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
        return
    if not any(isinstance(a, str) and a.startswith(output) for a in map(text, arguments)):
        return
    seen += 1
    if seen == moment:
        os.kill(os.getpid(), signal.SIGKILL)
def text(value):
    return os.fspath(value) if isinstance(value, os.PathLike) else value
sys.addaudithook(count)
code = run(sys.argv[3:])
print(seen)
sys.exit(code)
"""


def killed(output: Path, moment: int, *arguments: object) -> int:
    """How many moments the run had; -9 when it was killed at one."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(output), str(moment), *map(str, arguments), "-q"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        assert (done.returncode, done.stderr) == (-9, "")
        return -9
    return int(done.stdout.splitlines()[-1])


def test_killed_at_any_moment_and_resumed_gives_the_same(
    model: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("quantize", model, "--prune", "--scale", "vector", "-o")
    before = contents(model)
    count = killed(tmp_path / "all", 0, *command, tmp_path / "all")
    assert contents(tmp_path / "all") == whole
    assert count > 30
    resumed = []
    for moment in np.random.default_rng(24).choice(np.arange(2, count), 8, replace=False):
        output = tmp_path / f"out{moment}"
        assert killed(output, int(moment), *command, output) == -9
        # What is there so far is whole, or not there at all.
        there = contents(output)
        for name in {*there} & {*whole}:
            assert there[name] == whole[name], (moment, name)
        if there and JOURNAL_NAME in there:
            with pytest.raises(BadInputError, match="unfinished"):
                inspect_file(output)
            with pytest.raises(Sp24Error, match="--resume finishes it"):
                quantize_checkpoint(model, output, prune=True, **E4M3)
        kept = {n: (output / n).stat().st_ino for n in there if n.startswith("model-")}
        capsys.readouterr()
        assert run([*map(str, command), str(output), "--resume", "--json"]) == 0
        assert contents(output) == whole, moment
        shards = json.loads(capsys.readouterr().out)["checkpoint"]["shards"]
        finished = [item["name"] for item in shards if item["resumed"]]
        for name in finished:
            assert (output / name).stat().st_ino == kept[name]
        resumed.append(len(finished))
    assert max(resumed) >= 2
    assert contents(model) == before


def test_killed_again_and_again_it_still_gets_there(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    command = ("quantize", model, "--prune", "--scale", "vector", "--resume", "-o", output)
    kills = 0
    # Late enough to finish a shard or two, and more each time that nothing new was finished.
    for moment in range(14, 60, 4):
        if killed(output, moment, *command) != -9:
            break
        kills += 1
    assert kills >= 4
    assert contents(output) == whole


def test_the_reports_of_finished_shards_are_those_of_one_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = prune_checkpoint(model, tmp_path / "whole")
    stop_at(monkeypatch, shard(3))
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(model, tmp_path / "out")
    monkeypatch.undo()
    done = prune_checkpoint(model, tmp_path / "out", resume=True)
    assert done.folder is not None
    assert done.folder.resumed == 2
    assert replace(done.report, output=undisturbed.report.output) == undisturbed.report
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def stop_at(monkeypatch: pytest.MonkeyPatch, name: str, fault: BaseException | None = None) -> None:
    """Interrupt the next run when it puts this file in its place."""
    real = os.replace

    def stop(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == name:
            raise fault or KeyboardInterrupt
        real(source, target, **more)

    monkeypatch.setattr(os, "replace", stop)


def interrupted(model: Path, output: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(model, output, prune=True, **E4M3)


def journal_of(output: Path) -> dict[str, Any]:
    table = json.loads((output / JOURNAL_NAME).read_text())
    assert isinstance(table, dict)
    return table


def tamper_size(table: dict[str, Any]) -> None:
    table["shards"][shard(1)]["output"][2] += 1


def tamper_report(table: dict[str, Any]) -> None:
    table["shards"][shard(1)]["report"]["tensors"][0]["kept"] = "many"


def tamper_name(table: dict[str, Any]) -> None:
    # Claims a shard that is not there, by the identity of one that is.
    table["shards"][shard(4)] = table["shards"].pop(shard(1))


def tamper_plan(table: dict[str, Any]) -> None:
    table["plan"] = "0" * 64


def tamper_version(table: dict[str, Any]) -> None:
    table["version"] = 2


def tamper_kind(table: dict[str, Any]) -> None:
    table["shards"] = [1, 2]


@pytest.mark.parametrize(
    ("tamper", "left"),
    [
        (tamper_size, 1),
        (tamper_report, 1),
        (tamper_name, 1),
        (tamper_plan, 0),
        (tamper_version, 0),
        (tamper_kind, 0),
    ],
)
def test_a_journal_that_was_tampered_with_is_not_believed(
    tamper: Callable[[dict[str, Any]], None],
    left: int,
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    interrupted(model, output, monkeypatch, shard(3))
    table = journal_of(output)
    assert set(table["shards"]) == {shard(1), shard(2)}
    tamper(table)
    (output / JOURNAL_NAME).write_text(json.dumps(table))
    done = quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert done.folder is not None
    assert done.folder.resumed == left
    assert contents(output) == whole


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_journal_that_cannot_be_read_counts_as_empty(
    raw: bytes,
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    interrupted(model, output, monkeypatch, shard(2))
    (output / JOURNAL_NAME).write_bytes(raw)
    quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert contents(output) == whole


@pytest.mark.parametrize("change", ["flipped", "cut", "copied", "gone", "folder"])
def test_a_finished_shard_that_changed_is_done_again(
    change: str,
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    interrupted(model, output, monkeypatch, shard(3))
    path = output / shard(1)
    raw, times = path.read_bytes(), path.stat()
    if change == "flipped":  # same size, same modification time
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "cut":
        path.write_bytes(raw[:-1])
    elif change == "copied":
        shutil.copy2(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
    else:
        path.unlink()
    if change == "folder":
        path.mkdir()
        with pytest.raises(Sp24Error, match="is a directory"):
            quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
        path.rmdir()
    done = quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert done.folder is not None
    assert done.folder.resumed == 1
    assert contents(output) == whole


def test_other_options_or_inputs_start_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    interrupted(model, output, monkeypatch, shard(4))
    other: dict[str, Any] = {**E4M3, "spec": ScaleSpec("tensor")}
    done = quantize_checkpoint(model, output, prune=True, resume=True, **other)
    assert done.folder is not None
    assert done.folder.resumed == 0
    quantize_checkpoint(model, tmp_path / "want", prune=True, **other)
    assert contents(output) == contents(tmp_path / "want")

    output = tmp_path / "again"
    interrupted(model, output, monkeypatch, shard(4))
    raw = (model / shard(1)).read_bytes()
    (model / shard(1)).write_bytes(raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]))
    done = quantize_checkpoint(model, output, prune=True, resume=True, **E4M3)
    assert done.folder is not None
    assert done.folder.resumed == 0
    quantize_checkpoint(model, tmp_path / "want2", prune=True, **E4M3)
    assert contents(output) == contents(tmp_path / "want2")


def test_a_full_disk_keeps_what_is_finished(
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    command = ["quantize", str(model), "--prune", "--scale", "vector", "-o", str(output)]
    with monkeypatch.context() as patch:
        stop_at(patch, shard(3), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert run(command) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "No space left on device" in captured.err
    assert set(contents(output)) == {JOURNAL_NAME, shard(1), shard(2)}
    assert run([*command, "--resume"]) == 0
    assert "2 of 4 shards were finished by an earlier run" in capsys.readouterr().err
    assert contents(output) == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_fault_at_any_step_is_one_line_and_the_next_run_finishes(
    number: int,
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(model)
    steps = {
        (os, "replace"): os.replace,
        (os, "fsync"): os.fsync,
        (os, "mkdir"): os.mkdir,
        (StreamingWriter, "_put"): StreamingWriter._put,
    }
    moment = seen = 0

    def faulty(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **more: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == moment:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **more)

        return step

    faults = 0
    while True:
        moment, seen = moment + 1, 0
        output = tmp_path / f"out{moment}"
        command = ["quantize", str(model), "--prune", "--scale", "vector", "-o", str(output)]
        with monkeypatch.context() as patch:
            for (owner, name), real in steps.items():
                patch.setattr(owner, name, faulty(real))
            code = run(command)
        captured = capsys.readouterr()
        if seen < moment:
            break
        if code:
            faults += 1
            assert code == 1
            assert captured.err.startswith("sp24: error: ")
            assert captured.err.count("\n") == 1
            assert os.strerror(number) in captured.err
            there = contents(output)
            for name in {*there} & {*whole}:
                assert there[name] == whole[name], (moment, name)
            assert run([*command, "--resume", "--quiet"]) == 0
        assert contents(output) == whole, moment
    assert contents(model) == before
    assert faults > 30


def test_a_run_that_finished_nothing_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, tmp_path / "out", monkeypatch, shard(1))
    assert not (tmp_path / "out").exists()


def test_two_runs_do_not_write_one_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    real = os.replace
    refused = []

    def meddle(source: Any, target: Any, **more: Any) -> None:
        real(source, target, **more)
        if Path(target).name == shard(2):
            with pytest.raises(Sp24Error, match="another run is writing here"):
                prune_checkpoint(model, output, resume=True)
            refused.append(target)

    monkeypatch.setattr(os, "replace", meddle)
    prune_checkpoint(model, output)
    assert len(refused) == 1


@pytest.mark.parametrize("other_runs", [True, False])
def test_a_folder_that_appears_while_a_run_begins_is_another_ones(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_runs: bool
) -> None:
    output = tmp_path / "out"
    real = Path.mkdir
    held = contextlib.ExitStack()

    def meddle(self: Path, *rest: Any, **more: Any) -> None:
        if self == output:
            real(self)
            if other_runs:
                held.enter_context(writing._lock(output))
        real(self, *rest, **more)

    monkeypatch.setattr(Path, "mkdir", meddle)
    message = "another run is writing here" if other_runs else "appeared while this run began"
    with held, pytest.raises(Sp24Error, match=f"out: {message}$"):
        prune_checkpoint(model, output)
    assert not list(output.iterdir())


# --- the journal -----------------------------------------------------------------------------


def test_a_report_comes_back_from_the_journal_as_it_was(model: Path, tmp_path: Path) -> None:
    file = model / shard(1)
    (tmp_path / "file").write_bytes(b"x")
    exact = np.zeros((4, 8), np.float32)
    exact[:, 0] = 448
    save(tmp_path / "exact", {"a.weight": exact})
    reports = (
        (PruneReport, prune_file(file, None)),
        (QuantizeReport, quantize_file(file, None, prune=True, **E4M3)),
        # An infinite SNR, no kept energy.
        (QuantizeReport, quantize_file(tmp_path / "exact", None, **E4M3)),
    )
    for kind, report in reports:
        journal = Journal(tmp_path, "plan", kind)
        journal.add("file", report)
        again = Journal(tmp_path, "plan", kind)
        again.load()
        assert again.finished("file") == report
        assert again.finished("ghost") is None
    with pytest.raises(TypeError):
        rebuild(tuple[int, ...], "text")


def test_the_plan_knows_every_option_and_the_content_of_files(tmp_path: Path) -> None:
    side = tmp_path / "norms"
    side.write_bytes(b"a")
    base: dict[str, Any] = {"n": 1, "spec": ScaleSpec("tensor"), "file": side, "a": np.arange(3)}
    plans = [fingerprint("prune", base, [])]
    plans.append(fingerprint("quantize", base, []))
    plans.append(fingerprint("prune", base, [side]))
    for key, value in (("n", 2), ("spec", ScaleSpec("vector")), ("a", np.arange(4)), ("b", None)):
        plans.append(fingerprint("prune", {**base, key: value}, []))
    assert fingerprint("prune", dict(reversed(base.items())), []) == plans[0]
    side.write_bytes(b"b")
    plans.append(fingerprint("prune", base, []))
    assert len(set(plans)) == len(plans)
