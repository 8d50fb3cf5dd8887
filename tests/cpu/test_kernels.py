"""The committed fatbins are those that the sources make, and their machine code keeps the rules."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from sp24cli import fragments
from sp24cli.errors import Sp24Error
from sp24cli.gpu.select import (
    FEW_TOKENS,
    MANY_ROWS,
    block_summation,
    candidates,
    check_block_scales,
    choose,
    needs_widening,
    outputs,
)
from sp24cli.kernels import manifest
from sp24cli.kernels.choices import Problem
from sp24cli.optypes import OPERANDS
from sp24cli.scaling import ScaleSpec
from tests.cpu.console import ROOT
from tests.cpu.scripts import script_module

LOADED = manifest.load()


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script_module("cuda/check.py")


def test_fatbins_match_their_sources_and_keep_the_rules() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "cuda" / "check.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(LOADED.everything)} kernels" in done.stdout


def test_a_changed_source_changes_the_hash(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("one")
    first = manifest.source_hash(manifest.source_files(tmp_path))
    (tmp_path / "a.cu").write_text("two")
    second = manifest.source_hash(manifest.source_files(tmp_path))
    (tmp_path / "b.cuh").write_text("")
    (tmp_path / "notes.md").write_text("not a source")
    third = manifest.source_hash(manifest.source_files(tmp_path))
    assert len({first, second, third}) == 3


#: The outputs of the operands that do not have all three floats alone.
OUTPUTS = {
    "s8": {"s32", "bf16", "f16", "f32"},
    "tf32": {"f32", "bf16"},
    "f16_sum16": {"f16"},
    "e4m3_bf16": {"bf16", "f32"},
    "e4m3_f16": {"f16", "f32"},
}


def test_every_type_output_and_order_has_kernels_of_every_width() -> None:
    assert {e.type for e in LOADED.entries} == set(OPERANDS)
    for name, types in OPERANDS.items():
        assert set(outputs(name)) == OUTPUTS.get(name, {"bf16", "f16", "f32"})
        if types.widened:
            continue
        for out in outputs(name):
            for order in ("nm", "mn"):
                found = candidates(name, out, order)
                assert {e.tile_n for e in found} >= {16, 64, 128, 256}
                for e in found:
                    assert (e.a_type, e.b_type) == (types.a.name, types.b.name)
                    assert e.accumulate == types.accumulate
                    assert e.tile_k == types.a.block_k
                    assert e.block_bytes == types.a.block_bytes
                    assert e.k_multiple == types.a.group
                    assert e.scales == (() if out == "s32" else ("tensor", "vector"))
                    assert e.local_bytes == 0
    with pytest.raises(Sp24Error, match="no kernel multiplies e4m3 into s8 nm"):
        candidates("e4m3", "s8", "nm")


@pytest.mark.parametrize("name", ["e4m3_bf16", "e4m3_f16"])
@pytest.mark.parametrize("scales", get_args(fragments.WeightScales))
def test_weights_are_widened_with_every_kind_of_scales(name: str, scales: str) -> None:
    summation = manifest.WIDENED_SUMMATIONS[scales]
    for out in OUTPUTS[name]:
        for order in ("nm", "mn"):
            found = candidates(name, out, order, summation)
            assert candidates(name, out, order, summation, able=True) == found
            assert {e.tile_n for e in found} == {8, 16, 64, 256}
            for e in found:
                assert (e.layout, e.weight_scales, e.summation) == ("widened", scales, summation)
                assert e.tile_k == fragments.BLOCK_K
                assert e.block_bytes == fragments.BLOCK_BYTES[e.weight_scales]
                assert e.local_bytes == 0
    assert LOADED.conversion("pack_widened", scales, "e4m3") is not None


@pytest.mark.parametrize(("n", "tile_n"), [(1, 8), (16, 16), (64, 64), (4096, 256)])
def test_widened_weights_take_the_tile_of_their_tokens(n: int, tile_n: int) -> None:
    for scales, summation in manifest.WIDENED_SUMMATIONS.items():
        problem = Problem("e4m3_bf16", "bf16", "nm", 28672, n, 8192, summation)
        entry = choose(problem, 132, ()).kernel
        assert (entry.tile_n, entry.weight_scales) == (tile_n, scales)


def test_scales_decide_whether_a_weight_is_widened() -> None:
    def widened_to(type_name: str, kind: str, block: str | None = None) -> tuple[str, ...]:
        return needs_widening(type_name, ScaleSpec.parse(kind, block))

    assert widened_to("e4m3", "mx") == widened_to("e4m3", "block", "16x32") == ("bf16", "f16")
    assert widened_to("e4m3", "vector") == widened_to("e4m3", "block", "16x64") == ()
    for type_name, block in (("e4m3", "1x32"), ("e4m3", "16x24"), ("e5m2", "16x16")):
        with pytest.raises(Sp24Error, match="need a kernel that is not in this version"):
            widened_to(type_name, "block", block)


@pytest.mark.parametrize(
    ("summation", "promote_k", "widths"),
    [
        ("precise", {256}, {16, 64, 128, 192}),
        ("tile128", {128}, {16, 64, 128, 160}),
        ("block128", {128}, {16, 64, 128}),
        ("row128", {128}, {16, 128}),
        ("row64", {64}, {16, 128}),
    ],
)
def test_e4m3_is_summed_in_every_way(summation: str, promote_k: set[int], widths: set[int]) -> None:
    for out in ("bf16", "f16", "f32"):
        for order in ("nm", "mn"):
            found = candidates("e4m3", out, order, summation)
            assert {e.tile_n for e in found} == widths
            assert {e.promote_k for e in found} <= promote_k
            assert all(e.local_bytes == 0 for e in found)
            able = candidates("e4m3", out, order, summation, able=True)
            assert set(found) <= set(able)
    with pytest.raises(
        Sp24Error, match=f"no kernel multiplies f16 into f32 mn, summing {summation}"
    ):
        candidates("f16", "f32", "mn", summation)


def test_scales_along_k_decide_the_summation() -> None:
    assert block_summation(128, 128) == block_summation(384, 256) == "tile128"
    assert block_summation(0, 128) == "tile128"  # one scale of A in all
    assert block_summation(64, 128) == block_summation(192, 384) == "block128"
    assert block_summation(1, 128) == block_summation(48, 384) == "row128"
    assert block_summation(128, 64) == block_summation(1, 192) == "row64"
    with pytest.raises(Sp24Error, match="scales that change every 32 of K need a kernel"):
        block_summation(128, 32)


def test_blocks_without_a_kernel_are_refused() -> None:
    check_block_scales("e4m3", (128, 128))
    check_block_scales("e4m3", (1, 64))
    with pytest.raises(Sp24Error, match="scales that change every 32 of K need a kernel"):
        check_block_scales("e4m3", (1, 32))
    with pytest.raises(Sp24Error, match="block scales of bf16 need a kernel"):
        check_block_scales("bf16", (128, 128))


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        # The widest tile multiplies most for what it reads. By clusters of 4 it has 120 SMs, and a
        # round more than by clusters of 2.
        (4096, 8192, 8192, {"tile_n": 256, "cluster": 2, "split": 1}),
        # 112 tiles are one round either way, and larger clusters copy less of B.
        (14336, 256, 4096, {"tile_n": 256, "cluster": 4, "split": 1}),
        # Half a round of whole tiles: two CTAs share K.
        (8192, 128, 8192, {"tile_n": 128, "split": 2}),
        (8192, 64, 8192, {"tile_n": 64, "split": 2}),
        (8192, 16, 8192, {"tile_n": 16, "split": 2}),
        # The parts of so short a K take longer to put together than half of its stages.
        (8192, 16, 512, {"split": 1}),
        # Eight tiles: the more CTAs share one, the better.
        (1024, 16, 8192, {"split": 4}),
        # One round of 112 tiles: for 256 rows B is read half as often as for 128, and clusters of 4
        # share it.
        (28672, 64, 8192, {"tile_m": 256, "tile_n": 64, "cluster": 4, "split": 1}),
        # The narrowest of these tiles: nearly all of its bytes are A.
        (28672, 1, 8192, {"tile_m": 256, "tile_n": 16, "split": 1}),
    ],
)
def test_the_model_alone_chooses(m: int, n: int, k: int, want: dict[str, int]) -> None:
    entry = choose(Problem("e4m3", "bf16", "nm", m, n, k), 132, ()).kernel
    assert {field: getattr(entry, field) for field in want} == want, entry.name


def fast(tile_n: int, cluster: int, split: int = 1) -> manifest.Entry:
    """The kernel of this tile, of 128 rows."""
    (entry,) = (
        e
        for e in candidates("e4m3", "bf16", "nm")
        if (e.tile_m, e.tile_n, e.cluster, e.split) == (128, tile_n, cluster, split)
    )
    return entry


def test_a_cluster_has_the_ctas_of_every_part_of_k() -> None:
    entry = fast(256, 2)
    assert (entry.cluster_ctas, replace(entry, split=2).cluster_ctas) == (2, 4)


def listing(check: ModuleType, *lines: str, launched: int = 256) -> list[str]:
    """The faults of a made-up kernel of these instructions, sixteen bytes each."""
    code = []
    for i, line in enumerate(lines):
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        opcode, _, operands = rest.partition(" ")
        code.append(check.Instruction(16 * i, predicate, opcode, operands))
    faults: list[str] = check.check_machine_code("k", code, launched)
    return faults


GMMA = "QGMMA.SP.64x256x64.F32.E4M3.E4M3 R24, gdesc[UR20], R24, {}, gsb0"


def test_a_fatbin_that_was_found_clean_is_not_disassembled_again(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatbin = tmp_path / "gemm_x.fatbin"
    fatbin.write_bytes(b"code")
    asked: list[bytes] = []
    faults: list[str] = ["k: local memory"]

    kernels = {"k": 168, "l": 40}

    def look(path: Path) -> tuple[dict[str, int], list[str]]:
        asked.append(path.read_bytes())
        return kernels, list(faults)

    monkeypatch.setattr(check, "CLEAN", tmp_path / "checked")
    monkeypatch.setattr(check, "check_fatbin", look)
    for _ in range(2):  # a fault is found each time
        assert check.checked(fatbin) == (kernels, ["k: local memory"])
    faults.clear()
    for _ in range(2):
        assert check.checked(fatbin) == (kernels, [])
    assert asked == [b"code"] * 3
    fatbin.write_bytes(b"other code")
    assert check.checked(fatbin) == (kernels, [])
    assert asked[3:] == [b"other code"]


def test_metadata_written_while_its_wgmma_runs_is_found(check: ModuleType) -> None:
    wait = "WARPGROUP.DEPBAR.LE gsb0, {}"
    rolled = [
        "LDS.64 R156, [R5]",
        GMMA.format("R157"),
        wait.format("0x1"),
        "@!P0 BRA 0x0",
        "EXIT",
    ]
    assert len(listing(check, *rolled)) == 1  # the group before is waited for, not this one
    assert "R157" in listing(check, *rolled)[0]
    drained = [line.replace("0x1", "0x0") for line in rolled]
    assert not listing(check, *drained)
    alternating = [
        "LDS R156, [R5]",
        GMMA.format("R156"),
        wait.format("0x1"),
        "LDS R157, [R5]",
        GMMA.format("R157"),
        wait.format("0x1"),
        "@!P0 BRA 0x0",
        "EXIT",
    ]
    assert not listing(check, *alternating)


def test_fragments_of_a_written_while_their_wgmma_runs_are_found(check: ModuleType) -> None:
    gmma = GMMA.replace("gdesc", "R152, gdesc").format("R160")
    tail = ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT"]
    for address, fault in (("R149", 1), ("R148", 0), ("R156", 0), ("R155", 1)):
        load = f"LDSM.16.M88.4 {address}, [R5]"
        assert len(listing(check, gmma, load, *tail)) == fault, address
        assert not listing(check, load, gmma, *tail)
    for clear, fault in (("CS2R R150", 0), ("CS2R.32 R151", 0), ("CS2R R151", 1)):
        assert len(listing(check, gmma, f"{clear}, SRZ", *tail)) == fault, clear


def test_a_dense_wgmma_reads_its_fragments_alone(check: ModuleType) -> None:
    gmma = "HGMMA.64x64x16.F32.BF16 R56, R120, gdesc[UR24], RZ, !UPT, gsb0"
    tail = ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT"]
    for register, fault in ((119, 0), (120, 1), (123, 1), (124, 0), (56, 0)):
        move = f"MOV R{register}, R5"
        assert len(listing(check, gmma, move, *tail)) == fault, register
    by_descriptors = gmma.replace("R120, gdesc[UR24]", "gdesc[UR24]")
    assert not listing(check, by_descriptors, "MOV R120, R5", *tail)


def test_local_memory_and_fences_in_the_loop_over_k_are_found(check: ModuleType) -> None:
    loop = ["MEMBAR.ALL.GPU", "@!P0 BRA 0x0", "EXIT"]
    assert listing(check, *loop) == ["k: MEMBAR.ALL.GPU in the loop over K at 0x0"]
    assert not listing(check, "MEMBAR.ALL.GPU", "EXIT")
    tiles = ["MEMBAR.ALL.GPU", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@!P0 BRA 0x0", "EXIT"]
    assert not listing(check, *tiles)
    of_stores = ["MEMBAR.ALL.CTA", "FENCE.VIEW.ASYNC.S", "@!P0 BRA 0x0", "EXIT"]
    assert not listing(check, *of_stores)
    assert listing(check, *of_stores[:1], *of_stores[2:]) and listing(check, *of_stores[1:3], *loop)
    assert listing(check, "STL [R1], R2", "EXIT") == ["k: local memory at 0x0 (STL)"]


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("FADD R5, R6, R7", 7),
        ("LDG.E.128 R4, desc[UR4][R8.64]", 9),  # the address has two, the result four
        ("LDS.128 R8, [R20]", 20),
        ("IMAD.WIDE R8, R9, R12, R10", 13),  # as wide as the widest, to be sure
        ("STG.E.64 desc[UR4][R2.64], R8", 9),
        ("STSM.16.MT88.4 [R3], R8", 11),
        ("CS2R R10, SRZ", 11),
        ("QGMMA.SP.64x256x64.F32.E4M3.E4M3 R24, gdesc[UR20], R24, R5, gsb0", 151),
        ("HGMMA.SP.64x64x32.F16 R24, gdesc[UR20], R24, R60, gsb0", 60),
        ("HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR24], RZ, !UPT, gsb0", 123),
        ("DADD R4, R6, -R8", 9),
        ("F2F.F64.F32 R4, R2", 5),
        ("LDSM.16.M88.2 R4, [R9]", 9),
        ("RET.REL.NODEC R20 0x0", 21),
        ("BAR.SYNC 0x1, 0x80", -1),
    ],
)
def test_the_highest_register_that_an_instruction_names(
    check: ModuleType, line: str, most: int
) -> None:
    opcode, _, operands = line.partition(" ")
    assert check.most_register(check.Instruction(0, "", opcode, operands)) == most


def test_a_register_that_a_thread_has_not_is_found(check: ModuleType) -> None:
    kernel = [
        "MOV R15, RZ",
        "@P0 BRA 0x50",
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0",
        "MOV R159, RZ",
        "EXIT",
        "USETMAXREG.DEALLOC.CTAPOOL 0x20",
        "MOV R31, RZ",
        "EXIT",
    ]
    assert not listing(check, *kernel, launched=16)
    assert not listing(check, *kernel, launched=9)  # they are given by eight
    (fault,) = listing(check, *kernel, launched=8)
    assert "R15 at 0x0" in fault and "8 registers" in fault
    assert "not followed" in listing(check, "BRX R2 -0x10", "EXIT")[0]
    for at, register, have in ((3, 160, 160), (6, 32, 32)):
        wrong = list(kernel)
        wrong[at] = f"MOV R{register}, RZ"
        (fault,) = listing(check, *wrong, launched=128)
        assert f"R{register} at {16 * at:#x}" in fault and f"{have} registers" in fault


def test_every_launch_fits_the_registers_of_an_sm() -> None:
    for entry in LOADED.everything:
        assert entry.registers * entry.threads <= 1 << 16, entry.name


def test_registers_are_written_into_a_cubin_where_they_stand(check: ModuleType) -> None:
    cubin = sys.modules["cubin"]
    assert cubin.launch_registers(160, 512) == 128
    assert cubin.launch_registers(104, 512) == 104
    assert cubin.launch_registers(168, 384) == 168
    before = made_up_elf({"one": 160, "two": 90})
    assert cubin.registers(before) == {"one": 160, "two": 90}
    after = cubin.with_registers(before, {"one": 128})
    assert cubin.registers(after) == {"one": 128, "two": 90}
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert [before[i] for i in changed] == [160]
    with pytest.raises(KeyError, match="three"):
        cubin.with_registers(before, {"three": 128})


def made_up_elf(counts: dict[str, int]) -> bytes:
    """ELF64 with what says in a cubin how many registers a kernel has, and other attributes."""
    names, symbols, info = b"\0", bytes(24), b""
    for symbol, (name, count) in enumerate(counts.items(), 1):
        symbols += struct.pack("<IBBHQQ", len(names), 0x12, 0, 0, 0, 0)
        names += name.encode() + b"\0"
        info += struct.pack("<BBHII", 4, 0x2F, 8, symbol, count)
        info += struct.pack("<BBH", 3, 0x1B, 0x2F04)  # a value in place of a length
        info += struct.pack("<BBHII", 4, 0x11, 8, symbol, 160)  # another attribute
    parts = {".shstrtab": b"", ".symtab": symbols, ".strtab": names, ".nv.info": info}
    parts[".shstrtab"] = b"\0" + b"\0".join(name.encode() for name in parts) + b"\0"
    at, body, headers = 64, b"", bytes(64)
    for name, content in parts.items():
        where = parts[".shstrtab"].index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack(
            "<IIQQQQIIQQ", where, 1, 0, 0, at + len(body), len(content), 0, 0, 1, 0
        )
        body += content
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, at + len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(parts) + 1, 1)
    return bytes(head) + body + headers


def test_where_sums_begin_elsewhere_is_known_to_both_sides() -> None:
    body = (ROOT / "cuda" / "include" / "sp24" / "body.cuh").read_text()
    assert f"kFewTokens = {FEW_TOKENS}, kManyRows = {MANY_ROWS};" in body
