"""Pruning and packing a file on the CPU beside copying it, in one run on the same file.

    python samples/compare_copy.py [--layers N] [--workers N] [--folder DIR]

N layers (6: 1.3 GB) of bf16 weights of samples/make_checkpoint.py in one file, which lies in the
page cache. Each task reads it, writes a new file and flushes that to the disk; best of three, turn
and turn about. GB/s of the file that is read, the share of the copy's, and the processor time of
all threads, which says whether a task waits for the disk or computes.

Then the steps of it, one thread alone, on a band of a weight: ns of processor time a value.
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

from make_checkpoint import layer, values, write_shard

from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.ops.prune import prune_file
from sp24cli.ops.quantize import quantize_file
from sp24cli.ops.stream import default_workers
from sp24cli.optypes import operand_type
from sp24cli.packed import pack, pack_rows
from sp24cli.scaling import ScaleSpec, amax
from sp24cli.sparsity import patch_energies, prune_24

E4M3, BY_ROW = operand_type("e4m3"), ScaleSpec("vector")
ROUNDS = 3
_PART = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--folder", help="where the files are written (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "model.safetensors"
        specs = [spec for n in range(options.layers) for spec in layer(n, 4096)[:3]]
        write_shard(source, specs, values())
        whole_files(source, options.workers)
        steps(source)


def whole_files(source: Path, workers: int) -> None:
    pruned, out = source.with_name("pruned"), source.with_name("out")

    def copy() -> None:
        with source.open("rb") as read, out.open("wb") as written:
            while part := read.read(_PART):
                written.write(part)
            written.flush()
            os.fsync(written.fileno())

    def prune() -> None:
        prune_file(source, pruned, workers=workers)

    def quantize(of: Path, prune: bool) -> None:
        quantize_file(of, out, optype=E4M3, spec=BY_ROW, prune=prune, workers=workers)

    work: dict[str, tuple[Path, Callable[[], None]]] = {
        "copy": (out, copy),
        "prune": (pruned, prune),
        "quantize by row": (out, lambda: quantize(pruned, False)),
        "prune and quantize by row": (out, lambda: quantize(source, True)),
    }
    best = dict.fromkeys(work, (float("inf"), 0.0))
    for _ in range(ROUNDS):
        for name, (written, task) in work.items():
            written.unlink(missing_ok=True)
            start, processor = time.perf_counter(), time.process_time()
            task()
            took = time.perf_counter() - start, time.process_time() - processor
            best[name] = min(best[name], took)
    size = source.stat().st_size
    print(f"{size / 1e9:.1f} GB of bf16, {workers} workers, {os.cpu_count()} CPUs")
    for name, (seconds, processor) in best.items():
        share = best["copy"][0] / seconds
        print(
            f"  {name:26} {seconds:6.2f} s  {size / seconds / 1e9:5.2f} GB/s  {share:6.1%} of the "
            f"copy  {processor:6.2f} s of processor time"
        )


def steps(source: Path) -> None:
    with SafetensorsFile(source) as file:
        dense = file.array(file.names[0], slice(0, 1024)).copy()
    pruned = prune_24(dense)
    into, _ = pack(pruned, E4M3, BY_ROW)
    work: dict[str, Callable[[], object]] = {
        "choose and prune": lambda: prune_24(dense, out=pruned),
        "energy, for the report": lambda: patch_energies(dense),
        "scales": lambda: amax(dense, BY_ROW),
        "pack, with error statistics": lambda: pack_rows(pruned, into),
    }
    print("one thread, ns a value")
    for name, task in work.items():
        times = []
        for _ in range(7):
            start = time.thread_time()
            task()
            times.append(time.thread_time() - start)
        print(f"  {name:28} {min(times) / dense.size * 1e9:5.2f}")


if __name__ == "__main__":
    main()
