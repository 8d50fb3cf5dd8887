"""The registers that a kernel is launched with, in a cubin.

ptxas counts a kernel's registers by its launch bounds, and takes no wgmma whose operands alone are
more (C7602), though a warpgroup may have taken others' registers by then (``setmaxnreg``). So such
kernels (SP24_TALL in ``kernels.def``) are compiled without bounds, for a consumer's registers, and
what an SM can give all of their threads at once is written over that. ``check.py`` proves on the
machine code that no instruction needs more than its thread has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

#: Registers of an SM of sm_90, and by how many a thread gets them. Source: CUDA C++ Programming
#: Guide, "Compute Capability 9.0", and PTX ISA, "setmaxnreg".
SM_REGISTERS, STEP = 1 << 16, 8

#: An attribute of ``.nv.info`` whose form says that a length and so many bytes follow, and the one
#: whose bytes are a symbol and its registers: what nvdisasm calls EIFMT_SVAL and EIATTR_REGCOUNT.
_SIZED, _REGISTERS = 4, 0x2F


def launch_registers(registers: int, threads: int) -> int:
    """Registers a thread that a kernel compiled for so many can be launched with."""
    return min(registers, SM_REGISTERS // threads // STEP * STEP)


def registers(cubin: bytes) -> dict[str, int]:
    """Registers a thread that each kernel is launched with."""
    return {name: struct.unpack_from("<I", cubin, at)[0] for name, at in _counts(cubin)}


def with_registers(cubin: bytes, counts: Mapping[str, int]) -> bytes:
    """``cubin`` with those of the kernels of these names; `KeyError` if it lacks one."""
    at = dict(_counts(cubin))
    data = bytearray(cubin)
    for name, count in counts.items():
        struct.pack_into("<I", data, at[name], count)
    return bytes(data)


def _counts(cubin: bytes) -> Iterator[tuple[str, int]]:
    """The name of each kernel, and where its registers stand."""
    sections = _sections(cubin)
    symbols, names = sections[".symtab"][0], sections[".strtab"][0]
    at, size = sections[".nv.info"]
    end = at + size
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if (form, attribute) == (_SIZED, _REGISTERS):
            (symbol,) = struct.unpack_from("<I", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols + 24 * symbol)
            yield _text(cubin, names + name), at + 8
        at += 4 + (length if form == _SIZED else 0)


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Offset and size of each section by name. Source: ELF-64 Object File Format."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    found = [struct.unpack_from("<I20xQQ", elf, headers + i * size) for i in range(count)]
    return {_text(elf, found[names][1] + name): (at, length) for name, at, length in found}


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()
