"""Write a checkpoint of four shards as large models have them, the same bytes on every machine.

    python samples/make_checkpoint.py FOLDER [WIDTH]

WIDTH is that of the hidden layer, a multiple of 64; 4096 (the default) makes 3 GB, 512 makes 62 MB.
It has bf16 linear weights, stacked experts, norms, an odd K, embeddings that are tied in
config.json and stored twice, and an FP8 weight whose scale lies in another shard.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint.header import TensorSpec, tensor_bytes
from sp24cli.checkpoint.writer import StreamingWriter

SHARDS = 4
#: Values that are drawn; longer tensors repeat them, each from a place of its own.
DRAWN = 1 << 22


def layer(number: int, width: int) -> list[TensorSpec]:
    name = f"model.layers.{number}"
    wide = 11 * width // 4
    return [
        (f"{name}.attn.q.weight", "BF16", (width, width)),
        (f"{name}.mlp.up.weight", "BF16", (wide, width)),
        (f"{name}.mlp.down.weight", "BF16", (width, wide)),
        (f"{name}.mlp.experts.down_proj", "BF16", (8, width // 2, width)),
        (f"{name}.norm.weight", "BF16", (width,)),
        (f"{name}.odd.weight", "BF16", (1000, 1022)),
    ]


def shards(width: int) -> list[list[TensorSpec]]:
    fp8 = "model.layers.7.mlp.up.weight"
    vocabulary = 8 * width
    return [
        [
            ("model.embed_tokens.weight", "BF16", (vocabulary, width)),
            *layer(0, width),
            *layer(1, width),
        ],
        [*layer(2, width), *layer(3, width), (fp8, "F8_E4M3", (width, width))],
        [*layer(4, width), *layer(5, width), (f"{fp8}_scale", "F32", (width, 1))],
        [("lm_head.weight", "BF16", (vocabulary, width)), *layer(6, width)],
    ]


def values() -> dict[str, npt.NDArray[np.uint8]]:
    """The bytes of the drawn values by dtype; the legacy generator's stream is frozen."""
    state = np.random.RandomState(24)
    total = state.randint(0, 4096, size=(4, DRAWN)).sum(axis=0)
    bell = (total - 2 * 4095).astype(np.float32) / np.float32(4096 * 32)
    return {
        "BF16": bell.astype(ml_dtypes.bfloat16).view(np.uint8),
        "F8_E4M3": (bell * 4096).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        "F32": (np.abs(bell) + np.float32(2**-12)).view(np.uint8),
    }


def write_shard(
    path: Path, specs: Sequence[TensorSpec], drawn: dict[str, npt.NDArray[np.uint8]]
) -> None:
    with StreamingWriter(path, specs, {"format": "pt"}) as writer:
        for number, (name, dtype, shape) in enumerate(specs):
            left = tensor_bytes(dtype, shape, name)
            # Whole values, and no two tensors of a shard alike; but the tied ones, the first.
            source = np.roll(drawn[dtype], 8 * number)
            while left:
                part = source[:left]
                writer.write(name, part.data)
                left -= part.nbytes


def make_checkpoint(folder: Path, width: int = 4096) -> None:
    """Write shards, index and config to ``folder``, which must be new."""
    folder.mkdir()
    drawn = values()
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards(width), start=1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        write_shard(folder / name, specs, drawn)
        weight_map |= {tensor: name for tensor, _, _ in specs}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {"architectures": ["Sample"], "hidden_size": width, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("width", type=int, nargs="?", default=4096)
    options = parser.parse_args()
    make_checkpoint(options.folder, options.width)
