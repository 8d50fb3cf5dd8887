"""Whole checkpoints for tests: folders of shards with an index, as they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.modelfile import Array, load, normal, save

INDEX = "model.safetensors.index.json"


def shard(number: int, count: int = 4) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def small_model(scale: int = 1) -> list[dict[str, Array]]:
    """Four shards: tied embeddings, norms, stacked experts, a convolution, an odd K, a tensor
    without rows; in three dtypes. ``scale`` makes the weights that much longer."""
    embedding = normal(1, (40, 32), "BF16")
    return [
        {
            "model.embed_tokens.weight": embedding,
            "model.layers.0.attn.q.weight": normal(2, (64 * scale, 64), "BF16"),
            "model.layers.0.norm.weight": normal(3, (64,), "BF16"),
        },
        {
            "model.layers.0.mlp.up.weight": normal(4, (96 * scale, 64), "BF16"),
            "model.layers.0.mlp.experts.gate_up_proj": normal(5, (3, 16, 32), "BF16"),
            "model.layers.0.mlp.odd.weight": normal(6, (10, 30), "BF16"),
        },
        {
            "model.layers.1.mlp.up.weight": normal(7, (70 * scale, 44)),
            "model.layers.1.conv.weight": normal(8, (4, 3, 3), "F16"),
            "model.empty.weight": np.zeros((0, 8), np.float16),
        },
        # As some models are published: the tied weight twice, in two shards.
        {"lm_head.weight": embedding, "model.layers.1.attn.q.weight": normal(9, (64, 32), "F16")},
    ]


def write_checkpoint(
    folder: Path,
    shards: list[dict[str, Array]] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    others: bool = True,
) -> Path:
    """A folder with these shards (by default `small_model`), their index and other files."""
    shards = small_model() if shards is None else shards
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = shard(number, len(shards))
        save(folder / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    write_index(folder, weight_map, metadata)
    if others:
        config = {"architectures": ["Tiny"], "hidden_size": 64, "tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "tokenizer.json").write_bytes(b'{"model": "\xc3\xa9"}')
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def write_index(
    folder: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any] | None = None
) -> Path:
    table = {"metadata": {} if metadata is None else metadata, "weight_map": weight_map}
    path = folder / INDEX
    path.write_text(json.dumps(table))
    return path


def as_snapshot(folder: Path, hub: Path) -> Path:
    """``folder`` as a hub's cache has it: blobs, and a snapshot of relative links to them."""
    blobs, snapshot = hub / "blobs", hub / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        blob = blobs / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * len(link.relative_to(hub).parts[:-1])
        link.symlink_to(f"{up}blobs/{blob.name}")
    return snapshot


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensors_of(folder: Path) -> dict[str, Array]:
    """All tensors of a checkpoint by its index, read without the package."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, Array] = {}
    for name in sorted(set(weight_map.values())):
        found |= load(folder / name)[0]
    assert set(found) == set(weight_map)
    return found
