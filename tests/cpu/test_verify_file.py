"""Verification on the CPU: right files pass, every kind of damage is found and placed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sp24cli.gpu.device
from sp24cli.errors import BadInputError, NoGpuError, UsageError
from sp24cli.ops import prune_file, quantize_file, stream, unpack_file
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning.pattern import ONE_OF_TWO, pattern_of, prune_pattern
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import NumericsResult, VerifyReport, cpu, verify_file
from tests.cpu.modelfile import Array, load, naive_prune, normal, save

SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (32, 8)),
    "1x128": ScaleSpec("block", (1, 128)),
    "16x16": ScaleSpec("block", (16, 16)),
    "mx": ScaleSpec("mx", (1, 32)),
    "f16": ScaleSpec("none"),
    "bf16": ScaleSpec("none"),
    "e5m2": ScaleSpec("vector"),
    "s8": ScaleSpec("vector"),
    "s8 block": ScaleSpec("block", (32, 8)),
    "tf32": ScaleSpec("none"),
}


E4M3: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")}


def type_of(kind: str) -> OperandType:
    return OPERAND_TYPES.get(kind.split()[0], OPERAND_TYPES["e4m3"])


def prune_for(weight: Array, kind: str) -> Array:
    return naive_prune(weight) if kind != "tf32" else prune_pattern(weight, ONE_OF_TWO)


def make(tmp_path: Path, kind: str, layout: str = "row", *, prune: bool = True) -> Path:
    """A packed file of a ragged weight, beside ``dense``, ``pruned`` and another tensor."""
    weight = normal(1, (150, 84))
    weight[7] = 0
    weight[8, :4] = np.array([0, 0, 0, 1])
    tensors = {"a.weight": weight, "norm.weight": normal(2, (84,))}
    save(tmp_path / "dense", tensors)
    optype = type_of(kind)
    if not (tmp_path / "pruned").exists():
        choice = Choice(pattern=pattern_of(optype))
        prune_file(tmp_path / "dense", tmp_path / "pruned", choice=choice)
    quantize_file(
        tmp_path / ("dense" if prune else "pruned"),
        tmp_path / "packed",
        optype=optype,
        spec=SPECS[kind],
        layout=layout,
        prune=prune,
        overwrite=True,
    )
    return tmp_path / "packed"


def tampered(packed: Path, name: str, change: Callable[[Array], None]) -> Path:
    """``packed`` again with a part changed."""
    tensors, metadata = load(packed)
    part = tensors[name].copy()
    change(part)
    tensors[name] = part
    return save(packed.with_name("tampered"), tensors, metadata)


def test_pruned_by_another_method_before_it_was_quantized(tmp_path: Path) -> None:
    """Against the dense original kept places are taken as stored; values that differ are said."""
    dense = normal(1, (64, 84))
    kept = np.zeros((64, 21, 4), bool)
    kept[..., 1:3] = True  # which magnitude would not keep
    pruned = np.where(kept.reshape(64, 84), dense, np.float32(0))
    save(tmp_path / "dense", {"a.weight": dense})
    save(tmp_path / "pruned", {"a.weight": pruned})
    quantize_file(tmp_path / "pruned", tmp_path / "packed", **E4M3)
    for against, note in (("pruned", ""), ("dense", "the original is not 2:4; compared with")):
        report = verify_file(tmp_path / "packed", tmp_path / against, device="cpu")
        assert report.passed, report.failure
        (verdict,) = report.tensors
        assert verdict.agreement is not None and verdict.agreement.note.startswith(note)
    # Values that were changed, as sparsegpt does, are not those of the original.
    save(tmp_path / "updated", {"a.weight": pruned * np.float32(1.25)})
    quantize_file(tmp_path / "updated", tmp_path / "q", **E4M3)
    failed = failure(verify_file(tmp_path / "q", tmp_path / "dense", device="cpu"))
    assert failed.endswith(
        "(the original is not 2:4; pruned by magnitude to compare; "
        "if sparsegpt pruned it, compare with the pruned file)"
    )


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("prune", [True, False])
def test_what_quantize_writes_is_right(
    tmp_path: Path, kind: str, layout: str, prune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    packed = make(tmp_path, kind, layout, prune=prune)
    for against in ("dense", "pruned"):
        report = verify_file(packed, tmp_path / against, device="cpu")
        assert report.passed, report.failure
        (verdict,) = report.tensors
        assert verdict.structure is None
        assert verdict.agreement is not None
        assert verdict.agreement.passed
        pattern = pattern_of(type_of(kind))
        assert (f"not {pattern}" in verdict.agreement.note) == (against == "dense" and not prune)
        assert verdict.numerics is not None
        by_random, by_identity, *widened = verdict.numerics.checks
        assert [by_random.name, by_identity.name] == ["product", "identity"]
        # 1x128 has its scales in the main loop; smaller blocks have them in the weight.
        if kind in ("block", "s8 block", "16x16", "mx"):
            assert [check.name for check in widened] == [
                f"{name} {what}" for name in ("bf16", "f16") for what in ("product", "identity")
            ]
            assert all(0 < check.max_error <= check.bound for check in widened[::2])
            assert all(check.max_error == 0 for check in widened[1::2])
        else:
            assert not widened
        # With powers of two as scales, products of FP8 add up to few bits, and exactly.
        assert (by_random.max_error > 0) == (kind != "mx")
        assert by_random.max_error <= by_random.bound
        assert by_identity.max_error == 0
        assert report.passed_through == 1


def test_paths_may_be_strings(tmp_path: Path) -> None:
    """Those of side files, too: the alpha of smoothing is that of the file."""
    save(tmp_path / "dense", {"a.weight": normal(1, (64, 84))})
    amax = {"a.weight": np.linspace(1, 9, 84, dtype=np.float32)}
    calibration = Calibration(activations=save(tmp_path / "amax", amax))
    quantize_file(
        tmp_path / "dense", tmp_path / "packed", prune=True, calibration=calibration, **E4M3
    )
    packed, dense, side = (str(tmp_path / name) for name in ("packed", "dense", "amax"))
    report = verify_file(packed, dense, activations=side, device="cpu")
    assert report.passed, report.failure
    assert (report.path, report.against) == (packed, dense)
    with pytest.raises(UsageError, match="amax: proves nothing"):
        verify_file(packed, history=side, device="cpu")


def test_without_a_dense_file_agreement_is_not_claimed(tmp_path: Path) -> None:
    report = verify_file(make(tmp_path, "vector"), device="cpu")
    assert report.passed
    assert report.tensors[0].agreement is None
    assert report.passed_through is None


def failure(report: VerifyReport) -> str:
    assert not report.passed
    assert report.failure is not None
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["passed"] is False
    assert document["failure"] == report.failure
    return report.failure


def set_at(place: tuple[int, ...] | int, value: object) -> Callable[[Array], None]:
    def change(part: Array) -> None:
        part[place] = value

    return change


@pytest.mark.parametrize("nibble", [0b0000, 0b0101, 0b1010, 0b1111, 0b0001, 0b1011])
def test_an_illegal_pair_is_a_fault_of_structure(tmp_path: Path, nibble: int) -> None:
    packed = make(tmp_path, "vector")
    bad = tampered(packed, "a.weight_meta", set_at((3, 5), nibble << 4 | 0b0100))
    report = verify_file(bad, device="cpu")
    assert failure(report).startswith("a.weight: structure: ")
    assert "row 3, group 11" in failure(report)
    assert report.tensors[0].numerics is None


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, 1e-40])
@pytest.mark.parametrize("kind", ["tensor", "vector", "block"])
def test_a_bad_scale_is_a_fault_of_structure(tmp_path: Path, kind: str, value: float) -> None:
    packed = make(tmp_path, kind)
    bad = tampered(packed, "a.weight_scale", lambda scale: scale.flat.__setitem__(-1, value))
    assert failure(verify_file(bad, device="cpu")).startswith("a.weight: structure: scale")


@pytest.mark.parametrize("nibble", [0b1000, 0b1001, 0b1100, 0b1101, 0b0000])
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_tf32_has_two_nibbles_alone(tmp_path: Path, nibble: int, layout: str) -> None:
    """Four of the six pairs of a 16-bit type would take halves of two values."""
    packed = make(tmp_path, "tf32", layout)
    if layout == "row":
        bad = tampered(packed, "a.weight_meta", set_at((3, 5), nibble << 4 | 0b0100))
    else:
        # Row 3, pair 11: word 4 * 3 + 2 of the first block, its nibble 3.
        def change(blocks: Array) -> None:
            words = blocks[0, 0, 4096:].view("<u4")
            words[14] = words[14] & np.uint32(0xFFFF0FFF) | np.uint32(nibble << 12)

        bad = tampered(packed, "a.weight_blocks", change)
    report = verify_file(bad, device="cpu")
    assert failure(report) == (
        "a.weight: structure: metadata at row 3, group 11 is not 0100 or 1110"
    )


def test_tf32_that_was_not_rounded_is_a_fault_of_structure(tmp_path: Path) -> None:
    packed = make(tmp_path, "tf32")
    value = np.float32(1 + 2.0**-11)
    bad = tampered(packed, "a.weight_values", set_at((140, 7), value))
    text = failure(verify_file(bad, device="cpu"))
    assert text == "a.weight: structure: value at row 140, kept column 7 is not rounded to tf32"


@pytest.mark.parametrize("kind", ["e5m2", "s8", "tf32"])
def test_a_code_that_differs_is_named_by_its_column(tmp_path: Path, kind: str) -> None:
    packed = make(tmp_path, kind)
    values = load(packed)[0]["a.weight_values"]
    row = 140
    bits = f"u{values.itemsize}"
    low = 1 << 13 if kind == "tf32" else 1

    def change(part: Array) -> None:
        part.view(bits)[row, 5] ^= low

    text = failure(verify_file(tampered(packed, "a.weight_values", change), tmp_path / "dense"))
    unpack_file(packed, tmp_path / "codes", codes=True)
    codes = load(tmp_path / "codes")[0]["a.weight"]
    column = int(text.split("column ")[1].split()[0])
    assert f"agreement: code at row {row}, column {column}" in text
    assert codes[row, column].tobytes() == values[row, 5].tobytes()


def test_padding_that_is_not_empty_is_a_fault_of_structure(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector", "sm90")
    bad = tampered(packed, "a.weight_blocks", set_at((2, 0, 64 * 63), 1))  # row 191 of 150
    assert "padding at row 191" in failure(verify_file(bad, device="cpu"))


@pytest.mark.parametrize("index", ["first", "second"])
def test_another_legal_pair_disagrees(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    packed = make(tmp_path, "vector")
    row = load(packed)[0]["a.weight_meta"][140]
    # A group in a low nibble that keeps (1, 2): (0, 2) and (1, 3) differ in one index.
    byte = next(i for i in range(10) if int(row[i]) & 15 == 0b1001)
    new = (int(row[byte]) & 0xF0) | (0b1000 if index == "first" else 0b1101)
    bad = tampered(packed, "a.weight_meta", set_at((140, byte), new))
    assert verify_file(bad, device="cpu").passed  # right in itself
    report = verify_file(bad, tmp_path / "dense", device="cpu")
    keeps = "(0, 2)" if index == "first" else "(1, 3)"
    assert failure(report) == (
        f"a.weight: agreement: mask differs at row 140, group {2 * byte}: "
        f"keeps {keeps}, recomputed (1, 2)"
    )


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_another_code_disagrees_at_its_column(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    packed = make(tmp_path, "vector", layout)
    weight = naive_prune(load(tmp_path / "dense")[0]["a.weight"])
    columns = [c for c in range(4) if weight[130, c] != 0]
    if layout == "row":
        place: tuple[int, ...] = (130, 1)  # the second kept value of the first group
    else:
        # Row 130 is row 2 of block 2; byte 1 of chunk 0 lies in chunk 0 ^ (2 >> 1 & 3).
        place = (2, 0, 2 * 64 + 16 * 1 + 1)
    part = "values" if layout == "row" else "blocks"

    def flip(array: Array) -> None:
        array.view(np.uint8)[place] ^= 1

    bad = tampered(packed, f"a.weight_{part}", flip)
    report = verify_file(bad, tmp_path / "dense", device="cpu")
    assert f"code at row 130, column {columns[1]} is 0x" in failure(report)


@pytest.mark.parametrize(
    ("kind", "place"), [("tensor", [0]), ("vector", [149, 0]), ("block", [4, 10])]
)
def test_another_scale_disagrees(
    tmp_path: Path, kind: str, place: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    packed = make(tmp_path, kind)

    def nudge(scale: Array) -> None:
        scale[tuple(place)] = np.nextafter(scale[tuple(place)], np.float32(1))

    bad = tampered(packed, "a.weight_scale", nudge)
    assert f"agreement: scale at {place} is" in failure(
        verify_file(bad, tmp_path / "dense", device="cpu")
    )


def test_a_dense_file_of_other_values_disagrees(tmp_path: Path) -> None:
    packed = make(tmp_path, "f16")
    tensors, _ = load(tmp_path / "dense")
    tensors["a.weight"] = tensors["a.weight"].copy()
    tensors["a.weight"][9, 9] = 3
    other = save(tmp_path / "other", tensors)
    assert "row 9, " in failure(verify_file(packed, other, device="cpu"))


def test_a_dense_file_of_another_shape_or_dtype_disagrees(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector")
    tensors, _ = load(tmp_path / "dense")
    for other in (tensors["a.weight"][:10], tensors["a.weight"].astype(np.float64)):
        against = save(tmp_path / "other", tensors | {"a.weight": other})
        assert "the original is F" in failure(verify_file(packed, against, device="cpu"))


def test_tensors_that_passed_through_are_compared(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector")
    tensors, metadata = load(packed)
    norm = tensors["norm.weight"].copy()
    norm.view(np.uint8)[101] ^= 4
    bad = save(tmp_path / "bad", tensors | {"norm.weight": norm}, metadata)
    report = verify_file(bad, tmp_path / "dense", device="cpu")
    assert failure(report) == "norm.weight: differs from the original at its byte 101"

    wider = save(tmp_path / "bad", tensors | {"norm.weight": norm.astype(np.float64)}, metadata)
    assert "norm.weight: is F64" in failure(verify_file(wider, tmp_path / "dense", device="cpu"))

    more = save(tmp_path / "bad", tensors | {"new": norm}, metadata)
    assert "new: is not in the original" in failure(
        verify_file(more, tmp_path / "dense", device="cpu")
    )
    del tensors["norm.weight"]
    fewer = save(tmp_path / "bad", tensors, metadata)
    assert "norm.weight: is in the original, not here" in failure(
        verify_file(fewer, tmp_path / "dense", device="cpu")
    )


def test_a_tensor_that_the_original_lacks(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector")
    tensors, _ = load(tmp_path / "dense")
    tensors["b.weight"] = tensors.pop("a.weight")
    other = save(tmp_path / "other", tensors)
    assert "has no tensor 'a.weight'" in failure(verify_file(packed, other, device="cpu"))


def test_the_dense_file_must_be_dense(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector")
    with pytest.raises(BadInputError, match="takes the dense file"):
        verify_file(packed, packed, device="cpu")


def test_nan_in_the_dense_file_is_its_fault(tmp_path: Path) -> None:
    packed = make(tmp_path, "vector")
    tensors, _ = load(tmp_path / "dense")
    weight = tensors["a.weight"].copy()
    weight[1, 1] = np.nan
    other = save(tmp_path / "other", tensors | {"a.weight": weight})
    with pytest.raises(BadInputError, match="row 1, column 1"):
        verify_file(packed, other, device="cpu")


# --- numerics --------------------------------------------------------------------------------


def packed_matrix(kind: str, layout: str = "sm90") -> PackedMatrix:
    dense = prune_for(normal(1, (150, 84)), kind)
    return pack(dense, type_of(kind), SPECS[kind], layout=layout)[0]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (kind, what)
        for kind in SPECS
        for what in ("codes", "second", "scale")
        if what != "scale" or SPECS[kind].kind != "none"
    ],
)
def test_a_wrong_decoder_is_caught(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel that read one value wrongly would give fails both products, in that row."""
    packed = packed_matrix(kind)
    right = cpu.layout.decode_fragments

    def wrong(*arguments: object) -> tuple[Array, Array, Array]:
        codes, first, second = (part.copy() for part in right(*arguments))
        if what == "codes":
            # The top bit of the mantissa; its place is the same in all rows of all bands.
            codes.view(f"u{codes.itemsize}")[5, 3] ^= 1 << (codes.itemsize * 8 - 6)
        elif what == "second":
            first[5, 2], second[5, 2] = (0, 1) if (first[5, 2], second[5, 2]) != (0, 1) else (2, 3)
        return codes, first, second

    if what == "scale":
        factor = cpu._factor

        def wrong_factor(band: PackedMatrix) -> Array:
            scale = np.broadcast_to(factor(band), (150, 84)).copy()
            scale[5] *= np.float32(1.01)  # more than half an ulp of bf16
            return scale[:, :1] if SPECS[kind].block is None else scale

        monkeypatch.setattr(cpu, "_factor", wrong_factor)
    else:
        monkeypatch.setattr(cpu.layout, "decode_fragments", wrong)
    result = cpu.verify_matrix(packed, 0)
    assert not result.passed
    for check in result.checks:
        assert not check.passed, check.name
        assert check.max_error > check.bound
        assert check.first_bad is not None
        assert check.first_bad[0] == 5


def test_wrong_numerics_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make(tmp_path, "vector")
    right = cpu._factor
    monkeypatch.setattr(cpu, "_factor", lambda band: right(band) * np.float32(1.5))
    report = verify_file(packed, tmp_path / "dense", device="cpu")
    text = failure(report)
    assert text.startswith("a.weight: numerics on cpu: product at row 0, column 0: error ")
    assert text.endswith(" is allowed")
    assert report.tensors[0].structure is None


def test_infinities_of_the_nan_mode_are_no_fault() -> None:
    weight = naive_prune(normal(1, (70, 32)))
    weight[3, :4] = np.array([0, 1e9, 0, -1e9])
    packed, stats = pack(weight, OPERAND_TYPES["f16"], ScaleSpec("none"), overflow="nan")
    assert stats.clipped == 2
    assert cpu.verify_matrix(packed, 0).passed


def test_scales_at_both_ends_of_float32() -> None:
    weight = naive_prune(normal(1, (70, 32)))
    weight[3] *= np.float32(1e36)
    weight[4] *= np.float32(1e-36)
    for kind in ("vector", "block"):
        packed, _ = pack(weight, OPERAND_TYPES["e4m3"], SPECS[kind])
        assert cpu.verify_matrix(packed, 0).passed


def test_the_seed_chooses_the_activations() -> None:
    packed = packed_matrix("vector")
    results = [cpu.verify_matrix(packed, seed) for seed in (0, 0, 1)]
    assert results[0] == results[1]
    assert results[0] != results[2]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_verdict_does_not_depend_on_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_matrix("vector")
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    one = cpu.verify_matrix(packed, 0, workers=1)
    assert cpu.verify_matrix(packed, 0, workers=workers) == one


# --- devices ---------------------------------------------------------------------------------


def no_gpu() -> None:
    raise NoGpuError("no usable GPU: none here")


def test_auto_falls_back_to_the_cpu_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(no_gpu))
    report = verify_file(make(tmp_path, "vector"), device="auto")
    assert report.device == "cpu"
    assert report.device_note == "no usable GPU: none here"
    assert report.passed


def test_cuda_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(no_gpu))
    with pytest.raises(NoGpuError, match="none here"):
        verify_file(make(tmp_path, "vector"), device="cuda")


@pytest.mark.parametrize("device", ["gpu", "CUDA", "", None])
def test_an_unknown_device_is_a_usage_error(tmp_path: Path, device: Any) -> None:
    """It must not pass for "auto", whose CPU proves less than was asked for."""
    with pytest.raises(UsageError, match=r"unknown device .* \(known: auto, cpu, cuda\)"):
        verify_file(make(tmp_path, "vector"), device=device)


@pytest.mark.parametrize("kind", ["vector", "block", "f16"])
def test_a_gpu_runs_all_but_small_blocks(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sp24cli.verify import gpu

    class Fake:
        name = "Fake H200"

    def verify_matrix(packed: PackedMatrix, seed: int) -> NumericsResult:
        assert seed == 7
        assert packed.shape == (150, 84)
        return NumericsResult("Fake H200", ())

    monkeypatch.setattr(sp24cli.gpu.device.Device, "open", staticmethod(Fake))
    monkeypatch.setattr(gpu, "verify_matrix", verify_matrix)
    report = verify_file(make(tmp_path, kind), device="auto", seed=7)
    numerics = report.tensors[0].numerics
    assert report.device == "Fake H200"
    assert numerics is not None
    if kind == "block":
        assert numerics.device == "cpu"
        assert numerics.note.startswith("not run on the GPU: scales of 32x8 need a kernel")
        assert len(numerics.checks) == 6
    else:
        assert numerics.device == "Fake H200"
        assert not numerics.note
