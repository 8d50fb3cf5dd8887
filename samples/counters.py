"""What the hardware counts for a launch of sp24's kernel and of its peers', of a bench's problems.

    python samples/counters.py BENCH.json [--json FILE] [--md FILE]

Needs a Hopper GPU, the libraries that were benched, and Nsight Compute (ncu). BENCH.json is what
`sp24 bench --json` wrote for random data: of each of its problems the kernel that sp24 chooses,
cuSPARSELt's fastest algorithm there and cuBLASLt are launched once under ncu, which empties L2
before. The clock is left alone; cycles are the SMs' own.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sp24cli.bench.candidates import Candidate, Operands, Ours, Peers
from sp24cli.bench.check import dense_codes
from sp24cli.bench.problem import random_tokens, random_weight
from sp24cli.bench.reading import read_result
from sp24cli.bench.result import CaseResult
from sp24cli.bench.run import Libraries, environment, open_libraries
from sp24cli.errors import Sp24Error
from sp24cli.gpu.device import Device
from sp24cli.gpu.driver import api, check
from sp24cli.optypes import OPERANDS
from sp24cli.scaling import ScaleSpec

BUSY = "sm__pipe_tensor_cycles_active"
#: Heading, counter, and what a unit of the column is.
COLUMNS = (
    ("cycles", "sm__cycles_elapsed.avg", 1.0),
    ("tensor cores busy, %", f"{BUSY}.avg.pct_of_peak_sustained_elapsed", 1.0),
    ("DRAM read, MB", "dram__bytes_read.sum", 1e6),
    ("DRAM written, MB", "dram__bytes_write.sum", 1e6),
    ("L2 to SMs, MB", "l1tex__m_xbar2l1tex_read_bytes.sum", 1e6),
    ("us", "gpu__time_duration.sum", 1e3),
)
#: Begins the line that says what is launched next.
MARK = "launched"
SEED, WORKERS = 24, os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", help="a result of sp24 bench, JSON")
    parser.add_argument("--json", type=Path, help="write the counts here")
    parser.add_argument("--md", type=Path, help="write the table here")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        cases = read_result(options.bench).cases
        if options.launch:
            launch(cases)
            return
    except Sp24Error as error:
        sys.exit(f"counters: {error}")
    if shutil.which("ncu") is None:
        sys.exit("counters: ncu (Nsight Compute) is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counts.csv"
        counters = ",".join(counter for _, counter, _ in COLUMNS)
        ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
        ncu += ["--target-processes", "all", "--metrics", counters]
        ncu += ["--csv", "--page", "raw", "--log-file", str(log)]
        again = [sys.executable, __file__, options.bench, "--launch"]
        done = subprocess.run([*ncu, *again], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        rows = counted(log.read_text(), done.stdout)
    where = environment(Device.open(), {}, None, ())
    document = {"sp24.counters": 1, "environment": asdict(where), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    text = table(document)
    if options.md:
        options.md.write_text(text)
    print(text, end="")


def launch(cases: tuple[CaseResult, ...]) -> None:
    """One launch of each candidate, between the marks that ncu heeds."""
    device = Device.open()
    with ExitStack() as libraries_open:
        libraries = open_libraries(device, libraries_open, wanted=True)
        for case in cases:
            types, shape = OPERANDS[case.type], case.shape
            if types.widened:
                raise Sp24Error(f"{shape} {case.type}: no peer multiplies widened weights")
            scale = ScaleSpec("tensor" if types.a.scaled else "none")
            packed = random_weight(shape.m, shape.k, types.a, scale, SEED, WORKERS)
            tokens = random_tokens(shape.n, shape.k, types.b, SEED, WORKERS)
            with ExitStack() as stack:
                operands = Operands(device, shape, packed, tokens, types, case.out, 1)
                stack.callback(operands.free)
                ours = Ours(operands, case.order, None)
                peers = Peers(operands, dense_codes(packed, WORKERS), 1.0, case.order)
                for candidate in (ours, *beside(case, peers, libraries)):
                    stack.callback(candidate.free)
                    candidate.enqueue(0)
                    device.synchronize()
                    check(api().cuProfilerStart())
                    candidate.enqueue(0)
                    device.synchronize()
                    check(api().cuProfilerStop())
                    role = candidate.role
                    print(MARK, f"{shape}|{role.label}|{role.detail}", flush=True)


def beside(case: CaseResult, peers: Peers, libraries: Libraries) -> list[Candidate]:
    """The fastest sparse peer of a case, and the dense one."""
    found: list[Candidate | None] = []
    fastest = case.best("cusparselt", "sustained", default=False)
    if fastest is not None and libraries.cusparselt is not None:
        number = int(fastest.role.detail.split()[1])  # "id 21 of 24"
        found.append(peers.sparse(libraries.cusparselt, fastest.role.order, number))
    if libraries.cublaslt is not None:
        found.append(peers.dense(libraries.cublaslt))
    return [candidate for candidate in found if candidate is not None]


def counted(text: str, said: str) -> list[dict[str, Any]]:
    """Rows of ncu's CSV beside what was said to be launched, in the same order."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]  # the first has the units
    marks = [line.removeprefix(MARK).strip() for line in said.splitlines() if line.startswith(MARK)]
    if len(launches) != len(marks):
        sys.exit(f"ncu saw {len(launches)} kernels of {len(marks)} products")
    rows = []
    for mark, counts in zip(marks, launches, strict=True):
        shape, label, detail = mark.split("|")
        row: dict[str, Any] = {"shape": shape, "label": label, "detail": detail}
        row["kernel"] = counts["Kernel Name"]
        for heading, counter, unit in COLUMNS:
            row[heading] = float(counts[counter].replace(",", "")) / unit
        rows.append(row)
    return rows


def table(document: dict[str, Any]) -> str:
    where = document["environment"]
    headings = [heading for heading, _, _ in COLUMNS]
    lines = [
        f"# Counters of one launch: {where['gpu']}, driver {where['driver']}, {where['date']}",
        "",
        f"sp24 {where['sp24']}, commit {where['commit']}, kernels {where['fatbin_sha256'][:12]}; "
        "`python samples/counters.py`, L2 emptied before each, clocks left alone",
        "",
        "| M×N×K | | " + " | ".join(headings) + " |",
        "| --- | --- |" + " ---: |" * len(headings),
    ]
    for row in document["rows"]:
        name = row["detail"] if row["label"] == "sp24" else row["label"]
        values = (f"{row[h]:.1f}" if row[h] < 100 else f"{row[h]:.0f}" for h in headings)
        lines.append(f"| {row['shape'].replace('x', '×')} | {name} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
