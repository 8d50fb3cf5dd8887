"""Peak memory of the operations does not grow with the tensor."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sp24cli
from tests.cpu.modelfile import save

ROWS, COLUMNS = 4096, 16384
TENSOR_BYTES = 2 * ROWS * COLUMNS
ROOT = Path(sp24cli.__file__).parent.parent

#: Runs a command and reports the most memory that its process ever held: VmHWM, which, unlike
#: getrusage, does not count what the parent held.
CHILD = """
import json, re, sys
from sp24cli.cli.main import run
code = run(sys.argv[1:])
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
print(json.dumps({"code": code, "peak": 1024 * int(peak)}), file=sys.stderr)
"""


def peak(*arguments: object) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stderr)
    assert result["code"] == 0
    return int(result["peak"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """134 MB of bf16 that take no room on disk: a hole, all zeros."""
    path = tmp_path_factory.mktemp("memory") / "model.safetensors"
    info = {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, TENSOR_BYTES]}
    text = json.dumps({"a.weight": info}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + TENSOR_BYTES)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peaks_stay_below_a_tensor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("out")
    small = save(folder / "small", {})
    norms = save(folder / "norms", {"a.weight": np.ones(COLUMNS, np.float32)})
    base = peak("inspect", small)
    packed = folder / "packed"
    peaks = {
        "inspect": peak("inspect", model),
        "prune": peak("prune", model, "--dry-run", "--workers", 2),
        "pattern": peak("prune", model, "--dry-run", "--pattern", "4:8", "--workers", 2),
        "wanda": peak(
            *("prune", model, "--dry-run", "--method", "wanda", "--workers", 2),
            *("--activation-norms", norms),
        ),
        "copy": peak("prune", model, "-o", folder / "copy", "--exclude", "*", "-q"),
        "tensor": peak("quantize", model, "--dry-run", "--scale", "tensor", "--workers", 2),
        "block": peak(
            "quantize", model, "--dry-run", "--scale", "block", "--prune", "--workers", 2
        ),
        "sm90": peak(
            "quantize", model, "-o", packed, "--type", "f16", "--layout", "sm90", "--workers", 2
        ),
        "verify": peak("verify", packed, "--against", model, "--device", "cpu", "--workers", 2),
        "unpack": peak("unpack", packed, "-o", folder / "dense", "--dtype", "bf16", "--workers", 2),
    }
    for name, most in peaks.items():
        # Verifying keeps the packed tensor's pages; the others keep row bands alone.
        limit = TENSOR_BYTES * (1.75 if name == "verify" else 0.75)
        assert most - base < limit, f"{name}: {most / 1e6:.0f} MB, base {base / 1e6:.0f}"
