"""Write a small safetensors model, the same bytes for the same seed on every machine.

    python samples/make_model.py OUT [SEED]

It has what real checkpoints have: bf16 and f32 linear weights (one with a K that fills neither
a block of the kernels nor a byte of metadata), an embedding, a norm, biases, a convolution,
and a name beyond ASCII.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint.writer import StreamingWriter

TENSORS: list[tuple[str, str, tuple[int, ...]]] = [
    ("embed_tokens.weight", "BF16", (64, 256)),
    ("layers.0.attn.qkv.weight", "BF16", (384, 256)),
    ("layers.0.attn.qkv.bias", "BF16", (384,)),
    ("layers.0.attn.out.weight", "BF16", (256, 128)),
    ("layers.0.mlp.up.weight", "F32", (512, 256)),
    ("layers.0.mlp.down.weight", "F32", (256, 512)),
    ("layers.0.norm.weight", "F32", (256,)),
    ("adapter.été.weight", "F16", (100, 92)),
    ("stem.conv.weight", "F32", (16, 3, 3, 3)),
]
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def bell(state: np.random.RandomState, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """About normal, deviation 1/48: a sum of twelve uniform integers, so no libm is in it."""
    total: npt.NDArray[np.int64] = state.randint(0, 4096, size=(12, *shape)).sum(axis=0)
    return (total - 6 * 4095) / (4096.0 * 48)


def make_model(path: Path, seed: int = 24) -> None:
    """Write the model to ``path``. The legacy generator's stream is frozen by numpy."""
    state = np.random.RandomState(seed)
    with StreamingWriter(path, TENSORS, {"format": "pt", "made.by": "sp24 sample"}) as writer:
        for name, dtype, shape in TENSORS:
            writer.write(name, bell(state, shape).astype(DTYPES[dtype]))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: make_model.py OUT [SEED]")
    make_model(Path(sys.argv[1]), *(int(seed) for seed in sys.argv[2:]))
