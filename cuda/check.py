"""Checks the committed fatbins against their sources and against the rules of ``cuda/README.md``.

    python cuda/check.py [--no-sass]

1. The manifest's source hash is that of ``cuda/`` and each fatbin has its recorded hash.
2. Manifest entries equal the fatbins' symbols, and their registers those of the fatbins.
3. In the machine code: no local memory, no ``MEMBAR`` in the loop over K (but that of a fence
   before wgmmas of what this thread has written to shared memory), no register that
   holds the metadata (or the A fragment) of a ``wgmma`` in flight is written before the wait that
   covers it, and no thread uses a register that it has not, by the launch or by ``setmaxnreg``.

The second and third need ``cuobjdump`` and ``nvdisasm`` (PyPI: nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm, both among the development tools).

Why the third: the tensor core reads the metadata register of a sparse wgmma when it executes, not
when it is issued, and ptxas does not know. A loop that loads the next step's metadata into the same
register gives wrong products (seen on an H200 with CUDA 13.0; the same sources unrolled differently
were right by luck).
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
import sysconfig
import tempfile
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent
#: Of fatbins that were found clean, by a digest of their bytes and of this file, their kernels.
CLEAN = ROOT.parent / "build" / "checked"
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from cubin import STEP, registers  # noqa: E402

from sp24cli.kernels import manifest  # noqa: E402


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    operands: str


class Function(NamedTuple):
    registers: int  # a thread that it is launched with
    code: list[Instruction]


def tool(name: str) -> str:
    """The path of a CUDA binary utility, from the PATH or its wheel."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / name
    found = shutil.which(name) or (str(wheel) if wheel.exists() else None)
    return found or sys.exit(f"check-kernels needs {name} (pip install nvidia-cuda-{name})")


#: A line of nvdisasm's: a label, or an instruction.
_LINE = re.compile(
    r"^(?:(\.L_x_\d+|\$\S+):"
    r"|\s+/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);)",
    re.M,
)


def disassemble(fatbin: Path) -> dict[str, Function]:
    """Every function of a fatbin, instruction by instruction."""
    with tempfile.TemporaryDirectory() as folder:
        # cuobjdump's own listing takes longer, and four times the text.
        run("cuobjdump", "-xelf", "all", fatbin.resolve(), cwd=folder)
        cubins = sorted(Path(folder).glob("*.cubin"))
        text = "".join(run("nvdisasm", "-c", p, cwd=folder) for p in cubins)
        launched = {n: count for p in cubins for n, count in registers(p.read_bytes()).items()}
    functions: dict[str, Function] = {}
    for part in re.split(r"^\.text\.", text, flags=re.M)[1:]:
        name, _, body = part.partition(":")
        code, labels, waiting = [], {name: "0x0"}, []
        for label, address, predicate, opcode, operands in _LINE.findall(body):
            if label:
                waiting.append(label)
                continue
            for found in waiting:
                labels[found] = f"0x{int(address, 16):x}"
            waiting.clear()
            code.append(Instruction(int(address, 16), predicate, opcode, operands.strip()))
        functions[name] = Function(launched[name], [resolved(ins, labels) for ins in code])
    return functions


def resolved(ins: Instruction, labels: dict[str, str]) -> Instruction:
    """The instruction with the address of a label for its name."""
    if "`" not in ins.operands:
        return ins
    operands = re.sub(r"`\((.*?)\)", lambda m: labels.get(m[1], m[0]), ins.operands)
    return ins._replace(operands=operands)


def run(name: str, *arguments: str | Path, cwd: str) -> str:
    """What a CUDA binary utility prints."""
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        sys.exit(f"{name} {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


State = TypeVar("State", bound=Hashable)


def reached(starts: Iterable[State], following: Callable[[State], Iterable[State]]) -> set[State]:
    """Every state that some can be followed by, and these."""
    seen: set[State] = set()
    work = list(starts)
    while work:
        state = work.pop()
        if state not in seen:
            seen.add(state)
            work.extend(following(state))
    return seen


class Flow:
    """The control flow of a function: which instructions can follow each.

    A BSYNC joins at the instruction after it, which is where its BSSY points.
    """

    def __init__(self, code: list[Instruction]) -> None:
        self.code = code
        at = {ins.address: i for i, ins in enumerate(code)}
        self.next: list[set[int]] = []
        for i, ins in enumerate(code):
            follow = set()
            jump = ins.opcode.startswith(("BRA", "CALL", "JMP", "WARPSYNC"))
            target = re.search(r"0x([0-9a-f]+)$", ins.operands) if jump else None
            if target and int(target[1], 16) in at:
                follow.add(at[int(target[1], 16)])
            ends = ins.opcode in ("EXIT", "RET") or (
                ins.opcode == "BRA" and not ins.predicate and ins.operands.startswith("0x")
            )
            falls_through = not ends or (ins.opcode == "EXIT" and ins.predicate)
            if falls_through and i + 1 < len(code):
                follow.add(i + 1)
            self.next.append(follow)

    def in_loop(self, start: int) -> bool:
        """Whether an instruction can be reached again from itself within the sum of one tile.

        A path from tile to tile goes through the wait for all wgmmas, which ends a sum.
        """

        def following(i: int) -> Iterable[int]:
            ins = self.code[i]
            drains = ins.opcode.startswith("WARPGROUP.DEPBAR") and ins.operands.endswith("0x0")
            return () if drains else self.next[i]

        return start in reached(self.next[start], following)


#: Opcodes whose first operand is not a register that they write.
_NO_RESULT = re.compile(
    r"(?:ST|STS|STG|STL|RED|BRA|BAR|EXIT|MEMBAR|SYNCS|UBLKCP|UTMA|WARP|NOP|BSSY|BSYNC|DEPBAR|FENCE|"
    r"CCTL|ERRBAR|CGAERRBAR|UCGABAR|ELECT|UISETP|ISETP|PLOP3|UPLOP3|FSETP|R2UR|VOTEU|YIELD|KILL)\b"
)


_GMMA = ("HGMMA", "QGMMA", "IGMMA")


def width(opcode: str) -> int:
    """Registers of an instruction's widest operand, but for addresses and a wgmma's."""
    if re.search(r"\.128\b|\.MT?88\.4\b", opcode):
        return 4
    two = r"^D(ADD|MUL|FMA|SETP)\b|^RET\b|\.F?64\b|\.WIDE\b|\.MT?88\.2\b|^CS2R$"
    return 2 if re.search(two, opcode) else 1


@cache  # many walks pass the same instructions
def written(ins: Instruction) -> set[int]:
    """The general registers that an instruction other than a wgmma writes."""
    if _NO_RESULT.match(ins.opcode.split(".")[0]):
        return set()
    # SHFL and the wide adds name predicates before or after the result.
    first = re.match(r"(?:P[T\d], )?R(\d+)", ins.operands)
    if not first:
        return set()
    return {int(first[1]) + i for i in range(width(ins.opcode))}


def read_late(gmma: Instruction) -> set[int]:
    """The registers that a wgmma reads while it runs: metadata if it is sparse, and A's if it has
    any."""
    late = set()
    if ".SP" in gmma.opcode:
        late.add(int(re.findall(r"\bR(\d+)\b", gmma.operands)[-1]))
    fragment = re.match(r"R\d+, R(\d+), gdesc", gmma.operands)
    if fragment:
        late |= {int(fragment[1]) + i for i in range(4)}
    return late


def overwritten_metadata(flow: Flow) -> list[str]:
    """For each wgmma a write to a register in `read_late` before the wait that covers it, if there
    is one."""
    faults = []
    for start, gmma in enumerate(flow.code):
        if gmma.opcode.startswith(_GMMA) and (writes := writes_before_wait(flow, start)):
            ins = writes[0]
            faults.append(
                f"R{min(read_late(gmma) & written(ins))} of the wgmma at {gmma.address:#x} is "
                f"written at {ins.address:#x} ({ins.opcode} {ins.operands})"
            )
    return faults


def writes_before_wait(flow: Flow, start: int) -> list[Instruction]:
    """What follows the wgmma at ``start`` and writes to one of its registers in `read_late`."""
    late = read_late(flow.code[start])
    writes = []

    # A group is committed by its last wgmma, the one that names gsb0. The walk carries how many
    # groups have been committed since this wgmma, its own included.
    def following(state: tuple[int, int]) -> Iterable[tuple[int, int]]:
        i, groups = state
        ins = flow.code[i]
        if ins.opcode.startswith(_GMMA):
            if "gsb0" in ins.operands:
                groups = min(groups + 1, 8)
        elif ins.opcode.startswith("WARPGROUP.DEPBAR"):
            pending = int(ins.operands.rpartition("0x")[2], 16)
            if groups > pending:
                return ()
        elif late & written(ins):
            writes.append(ins)
            return ()
        return [(n, groups) for n in flow.next[i]]

    first = 1 if "gsb0" in flow.code[start].operands else 0
    reached([(n, first) for n in flow.next[start]], following)
    return writes


@cache
def most_register(ins: Instruction) -> int:
    """The highest general register that an instruction names, or one of those that follow it in a
    wider operand, all of them taken to be as wide as the widest; -1 for none."""
    most, widest = -1, width(ins.opcode)
    for inside, register, wide in re.findall(r"(\[?)\bR(\d+)\b(\.64)?", ins.operands):
        most = max(most, int(register) + (2 if wide else 1 if inside else widest) - 1)
    sums = re.match(r"[HQI]GMMA\.(?:SP\.)?64x(\d+)x\d+\.(F16)?", ins.opcode)
    if sums:
        first = re.match(r"R(\d+)", ins.operands)
        assert first is not None, ins
        most = max(most, int(first[1]) + int(sums[1]) // (4 if sums[2] else 2) - 1)
    return max([most, *read_late(ins)]) if ins.opcode.startswith(_GMMA) else most


def missing_registers(flow: Flow, launched: int) -> list[str]:
    """The first use of a register that its thread has not, if there is one: the launch gives it so
    many, and ``setmaxnreg`` others."""
    faults: list[str] = []

    def following(state: tuple[int, int]) -> Iterable[tuple[int, int]]:
        i, count = state
        ins = flow.code[i]
        if ins.opcode.startswith(("BRX", "JMX")):
            faults.append(f"{ins.opcode} at {ins.address:#x}: where it leads is not followed")
            return ()
        if ins.opcode.startswith("USETMAXREG"):
            # An attempt that fails is made again at once.
            count = int(ins.operands.rpartition("0x")[2], 16)
        elif most_register(ins) >= count:
            faults.append(
                f"R{most_register(ins)} at {ins.address:#x} ({ins.opcode} {ins.operands}), where a "
                f"thread has {count} registers"
            )
            return ()
        return [(n, count) for n in flow.next[i]]

    reached([(0, -(-launched // STEP) * STEP)], following)
    return faults[:1]


def check_machine_code(name: str, code: list[Instruction], launched: int) -> list[str]:
    flow = Flow(code)
    faults = [
        f"local memory at {ins.address:#x} ({ins.opcode})"
        for ins in code
        if ins.opcode.split(".")[0] in ("LDL", "STL")
    ]
    faults += [
        f"{ins.opcode} in the loop over K at {ins.address:#x}"
        for i, ins in enumerate(code)
        if ins.opcode.split(".")[0] in ("MEMBAR", "ERRBAR")
        and not (
            ins.opcode == "MEMBAR.ALL.CTA" and code[i + 1].opcode.startswith("FENCE.VIEW.ASYNC")
        )
        and flow.in_loop(i)
    ]
    faults += overwritten_metadata(flow) + missing_registers(flow, launched)
    return [f"{name}: {fault}" for fault in faults]


def check_fatbin(path: Path) -> tuple[dict[str, int], list[str]]:
    """The kernels of a fatbin with their registers, and the faults of their machine code."""
    functions = disassemble(path)
    faults = []
    for name, function in functions.items():
        faults += check_machine_code(name, function.code, function.registers)
    return {name: function.registers for name, function in functions.items()}, faults


def checked(path: Path) -> tuple[dict[str, int], list[str]]:
    """`check_fatbin`, or what it said before of the same bytes by the same rules, where it found no
    fault: a disassembler takes half a minute for all of them."""
    rules = Path(__file__).read_bytes() + (ROOT / "cubin.py").read_bytes()
    key = hashlib.sha256(rules + path.read_bytes()).hexdigest()
    clean = CLEAN / key
    if clean.exists():
        return json.loads(clean.read_text(encoding="utf-8")), []
    kernels, faults = check_fatbin(path)
    if not faults:
        CLEAN.mkdir(parents=True, exist_ok=True)
        part = clean.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(kernels), encoding="utf-8")
        part.replace(clean)
    return kernels, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-sass", action="store_true", help="only hashes")
    parser.add_argument("--fatbin", type=Path, help="the machine code of this fatbin alone")
    options = parser.parse_args()
    if options.fatbin:
        _, faults = check_fatbin(options.fatbin)
        sys.exit("\n".join(faults) if faults else 0)
    loaded = manifest.load()
    faults = []
    if loaded.sources != manifest.source_hash(manifest.source_files(ROOT)):
        faults.append("the fatbins were built from other sources: run `make kernels`")
    faults += [
        f"{name}.fatbin is not the one that the manifest describes"
        for name, digest in loaded.fatbins.items()
        if hashlib.sha256(loaded.fatbin(name)).hexdigest() != digest
    ]
    count = 0
    if not options.no_sass:
        # The largest first, so that none is left alone at the end.
        fatbins = sorted(loaded.fatbins, key=lambda name: -len(loaded.fatbin(name)))
        with ProcessPoolExecutor() as pool:
            done = pool.map(checked, [manifest.FOLDER / f"{f}.fatbin" for f in fatbins])
            for fatbin, (kernels, found) in zip(fatbins, done, strict=True):
                described = {e.name: e.registers for e in loaded.everything if e.fatbin == fatbin}
                for name in sorted(described.keys() ^ kernels.keys()):
                    faults.append(f"{name} is in only one of manifest and {fatbin}.fatbin")
                faults += [
                    f"{name} has {kernels[name]} registers, in the manifest {described[name]}"
                    for name in sorted(described.keys() & kernels.keys())
                    if kernels[name] != described[name]
                ]
                faults += found
                count += len(kernels)
    if faults:
        sys.exit("\n".join(faults))
    print(f"fatbins match their sources; {count} kernels' machine code checked")


if __name__ == "__main__":
    main()
