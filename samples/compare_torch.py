"""CPU speed of pruning and quantizing beside PyTorch's, in one run on the same data.

    python samples/compare_torch.py [--threads N]      # needs torch

One 4096x8192 bf16 weight. PyTorch prunes by `topk` over groups of four and quantizes by row: amax,
divide, clamp and cast to float8_e4m3fn. sp24 prunes with deterministic ties, and packs:
checks 2:4, takes the kept values, scales, rounds and writes metadata. M elements/s of the dense
weight, best of seven, turn and turn about.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--threads", type=int, default=2)
THREADS = parser.parse_args().threads
os.environ["OMP_NUM_THREADS"] = str(THREADS)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from sp24cli.optypes import operand_type  # noqa: E402
from sp24cli.packed import pack  # noqa: E402
from sp24cli.scaling import ScaleSpec  # noqa: E402
from sp24cli.sparsity import prune_24  # noqa: E402

SHAPE = (4096, 8192)


def torch_prune(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.view(-1, 4)
    kept = groups.abs().topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, kept, groups.gather(1, kept)).view_as(weight)


def torch_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True).float() / 448
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def main() -> None:
    torch.set_num_threads(THREADS)
    dense = torch.randn(SHAPE, generator=torch.Generator().manual_seed(24)).to(torch.bfloat16)
    ours = dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    pruned = prune_24(ours, workers=THREADS)
    theirs = torch.from_numpy(pruned.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(torch_prune(dense).float().abs().sum(), theirs.float().abs().sum())
    e4m3 = operand_type("e4m3")
    work: dict[str, Callable[[], object]] = {
        "prune, PyTorch": lambda: torch_prune(dense),
        "prune, sp24": lambda: prune_24(ours, workers=THREADS),
        "quantize by row, PyTorch": lambda: torch_quantize(theirs),
        "quantize by row, sp24": lambda: pack(pruned, e4m3, ScaleSpec("vector"), workers=THREADS),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(7):
        for name, task in work.items():
            start = time.perf_counter()
            task()
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"torch {torch.__version__}, numpy {np.__version__}, {THREADS} threads")
    for name, seconds in best.items():
        print(f"{name:26} {dense.numel() / seconds / 1e6:7.0f} M elements/s")


if __name__ == "__main__":
    main()
