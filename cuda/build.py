"""Builds the fatbins and their manifest from ``cuda/`` into the package. Needs nvcc 13.

    python cuda/build.py [--jobs N] [--output FOLDER] [--racecheck]

Everything a kernel's manifest entry says comes from the sources: the configuration from a host
program made of ``kernels.def`` (``manifest.cu``), registers and local memory from ptxas.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT.parent / "sp24cli" / "kernels"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    f"-I{ROOT / 'include'}",
    f"-I{ROOT}",
]
#: A ninth of the bytes; drivers from R550 on read it.
FATBINARY = ["-64", "--compress-mode=size"]
sys.path.insert(0, str(ROOT.parent))

from cubin import launch_registers, with_registers  # noqa: E402

from sp24cli.kernels.manifest import source_files, source_hash  # noqa: E402


def run(*command: str | os.PathLike[str]) -> str:
    done = subprocess.run([os.fspath(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def resources(ptxas_log: str) -> dict[str, dict[str, int]]:
    """Registers and local bytes of each entry, from ``ptxas -v``."""
    found: dict[str, dict[str, int]] = {}
    for part in ptxas_log.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        stack, spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill", part).groups()  # type: ignore[union-attr]
        registers = re.search(r"Used (\d+) registers", part).group(1)  # type: ignore[union-attr]
        found[name] = {"registers": int(registers), "local_bytes": int(stack) + int(spilled)}
    return found


def compile_family(source: Path, flags: list[str], entries: list[dict], output: Path) -> str:  # type: ignore[type-arg]
    """Compiles a file into a fatbin; what ptxas said. ``entries`` are those of its kernels in the
    manifest and get what ptxas says of them."""
    cubin = output.with_suffix(".cubin")
    log = run("nvcc", *flags, "-Xptxas", "-v,--warn-on-spills", "-cubin", source, "-o", cubin)
    used = resources(log)
    fewer = {}
    for entry in entries:
        entry.update(used[entry["name"]])
        launched = launch_registers(entry["registers"], entry["threads"])
        if launched != entry["registers"]:
            entry["registers"] = fewer[entry["name"]] = launched
    cubin.write_bytes(with_registers(cubin.read_bytes(), fewer))
    run("fatbinary", *FATBINARY, f"--create={output}", f"--image3=kind=elf,sm=90a,file={cubin}")
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=PACKAGE, help="folder of the results")
    parser.add_argument("--racecheck", action="store_true", help="see kArrivingLanes in config.cuh")
    options = parser.parse_args()
    jobs, output = options.jobs, options.output
    flags = [*FLAGS, "-DSP24_RACECHECK"] if options.racecheck else FLAGS
    output.mkdir(parents=True, exist_ok=True)
    if not (shutil.which("nvcc") and shutil.which("fatbinary")):
        sys.exit("make kernels needs nvcc and fatbinary (CUDA 13) on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(s for s in ROOT.glob("*.cu") if s.name != "manifest.cu")
        fatbins = [Path(scratch) / f"{s.stem}.fatbin" for s in sources]
        program = Path(scratch) / "manifest"
        run("nvcc", *FLAGS, ROOT / "manifest.cu", "-o", program)
        manifest = json.loads(run(program))
        families = [[k for k in manifest["kernels"] if k["fatbin"] == s.stem] for s in sources]
        with ThreadPoolExecutor(jobs) as pool:
            logs = list(
                pool.map(compile_family, sources, [flags] * len(sources), families, fatbins)
            )
        # ptxas then waits after every wgmma: right, and a fraction of the speed.
        serialized = re.findall(r"wgmma\S* instructions are serialized.*", "".join(logs))
        if serialized:
            sys.exit("\n".join(serialized))
        release = re.search(r"release [\d.]+, V([\d.]+)", run("nvcc", "--version"))
        manifest["nvcc"] = release.group(1) if release else "unknown"
        manifest["sources"] = source_hash(source_files(ROOT))
        manifest["fatbins"] = {f.stem: hashlib.sha256(f.read_bytes()).hexdigest() for f in fatbins}
        for old in output.glob("*.fatbin"):
            old.unlink()
        for f in fatbins:
            shutil.copyfile(f, output / f.name)
        text = json.dumps(manifest, indent=1)
        # A kernel a line keeps the file's diffs readable.
        text = re.sub(
            r"\{\n   ([^{}]*?)\n  \}", lambda m: "{" + re.sub(r"\n\s*", " ", m[1]) + "}", text
        )
        (output / "kernels.json").write_text(text + "\n")
    spilled = [k["name"] for k in manifest["kernels"] if k["local_bytes"]]
    if spilled:
        sys.exit("local memory is used by " + ", ".join(spilled))
    print(f"{len(manifest['kernels'])} kernels in {len(fatbins)} fatbins")


if __name__ == "__main__":
    main()
