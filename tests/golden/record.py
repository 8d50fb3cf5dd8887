"""Records what a Hopper GPU makes of seeded matrices, for the tests without one.

    python tests/golden/record.py [FILE]

By operand type: a weight in row order, its block image as the pack kernel wrote it, activations,
and the products of small integers and of random values in float32 as the GEMM kernel gave them.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ml_dtypes  # noqa: E402, F401
import numpy as np  # noqa: E402

from sp24cli.checkpoint.header import DTYPE_NAMES  # noqa: E402
from sp24cli.checkpoint.writer import StreamingWriter  # noqa: E402
from sp24cli.gpu.device import Device  # noqa: E402
from sp24cli.gpu.matmul import SparseWeight  # noqa: E402
from sp24cli.optypes import OPERAND_TYPES  # noqa: E402
from sp24cli.verify.gpu import multiply  # noqa: E402
from tests.gpu import problems  # noqa: E402

SHAPE = (72, 24, 268)
FILE = Path(__file__).with_name("h200.safetensors")


def main() -> None:
    device = Device.open()
    tensors = {}
    for type_name in OPERAND_TYPES:
        for kind in ("integers", "normal"):
            problem = getattr(problems, kind)(type_name, *SHAPE)
            row = problem.packed.to_layout("row")
            weight = SparseWeight.upload(device, row)
            image = problem.packed.blocks
            prefix = f"{type_name}.{kind}"
            tensors |= {
                f"{prefix}.values": row.values,
                f"{prefix}.meta": row.meta,
                f"{prefix}.image": device.download(weight.image, np.uint8, image.shape),
                f"{prefix}.x": problem.x,
                f"{prefix}.product": multiply(device, weight, problem.x, "f32", "mn"),
            }
            if row.scale is not None:
                tensors[f"{prefix}.scale"] = row.scale
    driver = device.driver_version
    said = {
        "gpu": device.name,
        "cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "date": datetime.date.today().isoformat(),
    }
    entries = [(name, DTYPE_NAMES[t.dtype], t.shape) for name, t in tensors.items()]
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    with StreamingWriter(path, entries, said, overwrite=True) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    print(f"{path}: {len(tensors)} tensors from {device.name}")


if __name__ == "__main__":
    main()
