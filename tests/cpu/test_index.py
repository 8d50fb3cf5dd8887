"""The index of a checkpoint, and folders that are or are not one."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp24cli.checkpoint import index
from sp24cli.checkpoint.folder import open_checkpoint
from sp24cli.checkpoint.jsontext import dump
from sp24cli.checkpoint.sharded import ShardedFile, open_tensors
from sp24cli.cli.main import run
from sp24cli.errors import BadInputError
from tests.cpu.checkpoints import (
    INDEX,
    as_snapshot,
    contents,
    shard,
    small_model,
    write_checkpoint,
    write_index,
)
from tests.cpu.modelfile import normal, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def table_of(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / INDEX).read_text())
    assert isinstance(table, dict)
    return table


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = table_of(folder)
    change(table)
    (folder / INDEX).write_text(json.dumps(table))


Q = "model.layers.0.attn.q.weight"

#: What is done to the index, and the words that the one line must have.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no weight_map": (lambda t: t.pop("weight_map"), f"{INDEX}: has no weight_map"),
    "map is a list": (
        lambda t: t.update(weight_map=[]),
        f"{INDEX}: weight_map is not a JSON object",
    ),
    "empty map": (lambda t: t.update(weight_map={}), f"{INDEX}: weight_map is empty"),
    "metadata is a list": (lambda t: t.update(metadata=[1]), "metadata is not a JSON object"),
    "size is text": (lambda t: t.update(metadata={"total_size": "9"}), "total_size '9' is no"),
    "size is negative": (lambda t: t.update(metadata={"total_size": -1}), "total_size '-1' is no"),
    "size is true": (lambda t: t.update(metadata={"total_size": True}), "total_size 'True' is no"),
    "size is nan": (
        lambda t: t.update(metadata={"total_size": float("nan")}),
        "total_size 'nan' is no",
    ),
    "shard is a number": (
        lambda t: t["weight_map"].update({Q: 1}),
        f"tensor '{Q}': its shard is not a string",
    ),
    "shard is a path": (
        lambda t: t["weight_map"].update({Q: "../model-00001-of-00004.safetensors"}),
        f"tensor '{Q}': its shard '../model-00001-of-00004.safetensors' is not a plain file name",
    ),
    "shard is absolute": (
        lambda t: t["weight_map"].update({Q: "/etc/x.safetensors"}),
        "is not a plain file name",
    ),
    "shard is no safetensors": (
        lambda t: t["weight_map"].update({Q: "config.json"}),
        f"tensor '{Q}': its shard 'config.json' is not a safetensors file",
    ),
    "half a surrogate": (
        lambda t: t["weight_map"].update({"\ud800": shard(1)}),
        "is not valid Unicode",
    ),
    "shard does not exist": (
        lambda t: t["weight_map"].update({Q: shard(5)}),
        f"tensor '{Q}': its shard {shard(5)} does not exist",
    ),
    "tensor in no shard": (
        lambda t: t["weight_map"].update(ghost=shard(2)),
        f"{INDEX}: tensor 'ghost': is not in {shard(2)}, lies in no shard",
    ),
    "tensor in another shard": (
        lambda t: t["weight_map"].update({Q: shard(2)}),
        f"{INDEX}: tensor '{Q}': is not in {shard(2)}, lies in {shard(1)}",
    ),
    "tensor not in the index": (
        lambda t: t["weight_map"].pop(Q),
        f"{shard(1)}: tensor '{Q}': is not in the index",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_an_index_is_one_line_and_nothing_is_written(
    fault: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = FAULTS[fault]
    edit(model, change)
    for arguments in (
        ["prune", str(model), "-o", str(tmp_path / "out")],
        ["inspect", str(model / INDEX)],
    ):
        assert run(arguments) == 4
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert words in captured.err
        assert str(model) in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": "\xff"}', "is not UTF-8 at byte 7"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "appears twice"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_what_is_no_index(raw: bytes, words: str, model: Path) -> None:
    (model / INDEX).write_bytes(raw)
    with pytest.raises(BadInputError, match=words):
        index.parse(model / INDEX)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=64)
    | st.builds(
        lambda m, w: json.dumps({"metadata": m, "weight_map": w}).encode(),
        JSON,
        JSON | st.dictionaries(st.text(), st.sampled_from([shard(1), "../x", ""]) | JSON),
    )
)
def test_whatever_an_index_holds_it_is_read_or_refused_in_one_line(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / INDEX
        path.write_bytes(raw)
        fault = None
        try:
            found = index.parse(path)
        except BadInputError as error:
            fault = str(error)
    if fault is None:
        assert found.weight_map
        assert all("/" not in name for name in found.shards)
    else:
        assert fault.isprintable()
        assert fault.startswith(str(path))


def test_an_index_too_long_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 10)
    with pytest.raises(BadInputError, match="limit of 10 bytes"):
        index.parse(model / INDEX)


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path: Path) -> None:
    shards = small_model()
    shards[2][Q] = normal(1, (4, 4))
    model = write_checkpoint(tmp_path / "model", shards)
    with pytest.raises(BadInputError, match=re.escape(f"{shard(3)}: tensor '{Q}': lies in")):
        open_checkpoint(model)


def test_a_shard_that_is_cut_is_named(model: Path) -> None:
    raw = (model / shard(3)).read_bytes()
    (model / shard(3)).write_bytes(raw[:-1])
    with pytest.raises(BadInputError, match=re.escape(shard(3))):
        open_checkpoint(model)


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": 12.0, "who": ["me"]}])
def test_the_metadata_may_hold_anything_or_nothing(tmp_path: Path, metadata: Any) -> None:
    model = write_checkpoint(tmp_path / "model", metadata=metadata)
    if metadata is None:
        edit(model, lambda t: t.pop("metadata"))
    found = open_checkpoint(model)
    assert found.index is not None
    assert json.loads(dump(found.index.metadata)) == (metadata or {})
    assert found.index.shards == tuple(shard(n) for n in (1, 2, 3, 4))
    text = index.build({"b": "y", "a": "x"}, 7, found.index.metadata).decode()
    want = {"metadata": {**(metadata or {}), "total_size": 7}, "weight_map": {"a": "x", "b": "y"}}
    assert json.loads(text) == want
    assert text.index('"a"') < text.index('"b"')


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match="holds no safetensors file"):
        open_checkpoint(empty)
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        save(two / name, {"x": normal(1, (2,))})
    with pytest.raises(BadInputError, match="holds 2 safetensors files and no index"):
        open_checkpoint(two)


def test_of_two_indexes_one_must_be_named(model: Path) -> None:
    other = model / "model.fp32.safetensors.index.json"
    other.write_bytes((model / INDEX).read_bytes())
    with pytest.raises(BadInputError, match="has 2 indexes"):
        open_checkpoint(model)
    found = open_checkpoint(model / INDEX)
    assert found.index_name == INDEX
    assert [item.name for item in found.left_out] == [other.name]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder / "model.safetensors", {"x": normal(1, (2,))})
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / ".gitattributes").write_bytes(b"*")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_bytes(b"")
    found = open_checkpoint(folder)
    assert found.index is None
    assert [s.name for s in found.shards] == ["model.safetensors"]
    assert found.others == (Path(".gitattributes"),)
    assert [(i.name, i.reason) for i in found.left_out] == [("pytorch_model.bin", "other weights")]


def test_a_link_that_leads_nowhere_is_named(model: Path) -> None:
    (model / "vocab.txt").symlink_to("../gone")
    with pytest.raises(BadInputError, match=r"vocab\.txt: cannot be read: No such file"):
        open_checkpoint(model)


def test_what_is_no_file_is_left_out(model: Path) -> None:
    os.mkfifo(model / "pipe")
    (model / "linked").symlink_to(model)
    found = open_checkpoint(model)
    reasons = {item.name: item.reason for item in found.left_out}
    assert reasons == {"pipe": "not a regular file", "linked": "a link to a folder"}


def test_a_snapshot_is_read_through_its_links(model: Path, tmp_path: Path) -> None:
    snapshot = as_snapshot(model, tmp_path / "models--me--tiny")
    assert contents(snapshot) == contents(model)
    plain, linked = open_checkpoint(model), open_checkpoint(snapshot)
    assert linked.others == plain.others
    assert [s.header for s in linked.shards] == [s.header for s in plain.shards]


def test_a_checkpoint_reads_as_one_file(model: Path) -> None:
    wanted = {name: array for tensors in small_model() for name, array in tensors.items()}
    with open_tensors(model) as file:
        assert isinstance(file, ShardedFile)
        assert set(file.names) == set(wanted)
        for name, array in wanted.items():
            assert file.array(name).tobytes() == array.tobytes()
            assert bytes(file.raw(name)) == array.tobytes()
            file.drop_cache(name)
        assert np.array_equal(file.array(Q, slice(3, 9)), wanted[Q][3:9])
        assert file.metadata == {"format": "pt"}
        with pytest.raises(BadInputError, match=r"model: has no tensor 'ghost'"):
            file.array("ghost")


def test_the_index_may_be_given_alone(model: Path) -> None:
    with open_tensors(model / INDEX) as file:
        assert len(file.names) == 11


def test_write_index_helper_is_what_the_reader_reads(tmp_path: Path) -> None:
    path = write_index(tmp_path, {"x": "a.safetensors"})
    assert index.parse(path).weight_map == {"x": "a.safetensors"}
