"""Speed of pruning and packing on the CPU and on the GPU, in one run on the same files.

    python samples/compare_device.py [--shape MxK ...] [--workers N] [--folder DIR]

Whole commands on a file of one bf16 weight (4096x8192 and 28672x8192 unless told otherwise), which
lies in the page cache: read, converted, written, flushed to the disk. Best of five, turn and turn
about; the files of both are compared byte for byte. Beside each stands the time in which the
output's bytes alone are written and flushed in that folder, which no device makes shorter.
`--folder` in memory (/dev/shm) leaves the disk out.

Then the kernels alone, on the whole weight in the GPU's memory, with the bytes that they move: the
dense weight once (and, pruned, back), or values and metadata.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from sp24cli.bench.problem import random_normal
from sp24cli.gpu.convert import Batch, Converter
from sp24cli.gpu.device import Device, Event, elapsed_ms
from sp24cli.gpu.rows import Lane
from sp24cli.ops.prune import prune_file
from sp24cli.ops.quantize import quantize_file
from sp24cli.ops.stream import default_workers
from sp24cli.optypes import operand_type
from sp24cli.scaling import ScaleSpec, amax, scales_from_amax
from sp24cli.sparsity import PATCH_ROWS

E4M3 = operand_type("e4m3")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", metavar="MxK")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--folder", help="where the files are written (default: a temporary one)")
    options = parser.parse_args()
    engine = Converter(Device.open())
    print(f"{engine.name}, {options.workers} CPU threads; M elements/s")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for text in options.shape or ["4096x8192", "28672x8192"]:
            m, k = (int(side) for side in text.split("x"))
            whole_files(Path(folder), m, k, engine, options.workers)
            kernels(engine, m, k)


def whole_files(folder: Path, m: int, k: int, engine: Converter, workers: int) -> None:
    source, out = folder / "model.safetensors", folder / "out.safetensors"
    dense = random_normal(m, k, 24, ml_dtypes.bfloat16, workers)
    save_file({"a.weight": dense}, source)
    packing = {"optype": E4M3, "spec": ScaleSpec("vector"), "prune": True}

    def prune(device: Converter | None) -> Callable[[], object]:
        return lambda: prune_file(source, out, engine=device, workers=workers, overwrite=True)

    def quantize(device: Converter | None) -> Callable[[], object]:
        return lambda: quantize_file(
            source,
            out,
            engine=device,
            workers=workers,
            overwrite=True,
            **packing,  # type: ignore[arg-type]
        )

    def write_again(name: str) -> Callable[[], object]:
        def write() -> None:
            data, to = memoryview(files[name]), folder / "again.safetensors"
            with to.open("wb", buffering=0) as written:
                for at in range(0, len(data), 1 << 23):
                    written.write(data[at : at + (1 << 23)])
                os.fsync(written.fileno())
            os.replace(to, out)

        return write

    files: dict[str, bytes] = {}
    work = {
        "prune, CPU": prune(None),
        "prune, GPU": prune(engine),
        "its bytes alone, written": write_again("prune, GPU"),
        "prune and quantize by row, CPU": quantize(None),
        "prune and quantize by row, GPU": quantize(engine),
        "their bytes alone, written": write_again("prune and quantize by row, GPU"),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, task in work.items():
            start = time.perf_counter()
            task()
            best[name] = min(best[name], time.perf_counter() - start)
            files[name] = out.read_bytes()
    for name in ("prune", "prune and quantize by row"):
        assert files[f"{name}, CPU"] == files[f"{name}, GPU"], f"{name}: the files differ"
    print(f"\n{m}x{k}, whole commands; the files are the same")
    for name, seconds in best.items():
        print(f"  {name:32} {m * k / seconds / 1e6:8.0f}   {seconds * 1e3:8.1f} ms")


def kernels(engine: Converter, m: int, k: int) -> None:
    """Each kernel by itself, ten times over between two events."""
    device = engine.device
    lane = Lane(device)
    batch = Batch(m, k, band_rows=-(-m // PATCH_ROWS) * PATCH_ROWS)
    dense = random_normal(m, k, 24, ml_dtypes.bfloat16, default_workers())
    spec = ScaleSpec("vector")
    with (
        device.upload(dense) as source,
        device.upload(scales(dense)) as scale,
        device.upload(np.ones(k)) as norms,
    ):
        pruned, found = lane.memory("pruned", dense.nbytes), lane.memory("amax", 4 * m)
        packed = {
            "values": lane.memory("values", m * k // 2),
            "meta": lane.memory("meta", m * k // 8),
        }
        # Every kernel takes what it needs of these.
        to = {"source": source.ptr, "dense": pruned, "norms": norms.ptr, "kept": 4, "group": 8}
        given = {"source": source.ptr, "scale": scale.ptr, "prune": 1, "saturate": 1, **packed}

        def launch(kind: str, a_type: str = "", **given: int) -> Callable[[], None]:
            return lambda: engine.launch(lane, kind, batch, "BF16", a_type, spec=spec, **given)

        work = {
            "prune": (4.0, launch("prune_magnitude_24", "", **to)),
            "prune by wanda": (4.0, launch("prune_wanda_24", "", **to)),
            "prune to 4:8": (4.0, launch("prune_magnitude_nm", "", **to)),
            "amax by row": (2.0, launch("amax", source=source.ptr, amax=found)),
            "prune and quantize by row": (2.625, launch("quantize", "e4m3", **given)),
        }
        print(f"{m}x{k}, kernels alone")
        for name, (element_bytes, enqueue) in work.items():
            enqueue()
            best = float("inf")
            for _ in range(ROUNDS):
                begin, end = Event(lane.stream), Event(lane.stream)
                begin.record()
                for _ in range(10):
                    enqueue()
                end.record()
                end.synchronize()
                best = min(best, elapsed_ms(begin, end) / 10)
            rate = m * k * element_bytes / best / 1e6
            print(f"  {name:32} {m * k / best / 1e3:8.0f}   {best * 1e3:8.1f} us  {rate:6.0f} GB/s")


def scales(dense: np.ndarray) -> np.ndarray:
    return scales_from_amax(amax(dense, ScaleSpec("vector")), E4M3.max_finite)


if __name__ == "__main__":
    main()
