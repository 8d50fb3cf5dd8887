"""Products checked in pieces of K say what they say of all of it."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.fp8 import convert
from sp24cli.optypes import OPERAND_TYPES, operand_type
from sp24cli.packed import Layout, PackedMatrix, pack
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import cpu, pieces
from sp24cli.verify.smoothed import SmoothedTokens
from tests.cpu.modelfile import normal
from tests.cpu.test_verify_smoothed import smoothed

M, K = 130, 1100

#: A block that lies in several pieces, one that pieces cut, one of many in a piece.
SPECS = {
    "none": ScaleSpec("none"),
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "wide": ScaleSpec("block", (64, 1024)),
    "cut": ScaleSpec("block", (32, 100)),
    "small": ScaleSpec("block", (16, 16)),
    "mx": ScaleSpec("mx", (1, 32)),
}
CASES = [(name, spec) for name in ("e4m3", "s8") for spec in SPECS if spec != "none"]
CASES += [(name, "none") for name in ("bf16", "tf32")]
every_case = pytest.mark.parametrize(("type_name", "spec"), CASES)


def make(type_name: str, spec: str, layout: Layout = "row") -> PackedMatrix:
    optype = operand_type(type_name)
    dense = normal(1, (M, K)) * np.exp(normal(2, (M, 1), deviation=1.0))
    dense = convert(dense, optype) if type_name == "tf32" else dense
    return pack(prune_magnitude(dense, pattern_of(optype)), optype, SPECS[spec], layout=layout)[0]


@every_case
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_columns_of_a_packed_matrix(type_name: str, spec: str, layout: Layout) -> None:
    packed = make(type_name, spec, layout)
    whole = packed.dequantize(np.float64)
    step = packed.info.optype.block_k
    for start in range(0, K, step):
        for stop in (start + step, start + 3 * step, K):
            part = packed.columns(slice(start, stop))
            assert part.shape == (M, min(stop, K) - start)
            assert part.dequantize(np.float64).tobytes() == whole[:, start:stop].tobytes()
            assert part.to_layout("sm90").to_layout("row").codes().tobytes() == (
                packed.codes()[:, start:stop].tobytes()
            )
    for wrong in (slice(4, K), slice(0, step + 4)):
        with pytest.raises(ValueError, match="is not a multiple of"):
            packed.columns(wrong)


@every_case
def test_pieces_pass_where_the_whole_does(
    type_name: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make(type_name, spec)
    whole = cpu.verify_matrix(packed, 3, workers=2)
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1)
    found = cpu.verify_matrix(packed, 3, workers=2)
    assert whole.passed and found.passed
    assert [c.name for c in found.checks] == [c.name for c in whole.checks]
    for one, other in zip(found.checks, whole.checks, strict=True):
        # Float32 in another order has other errors, of about the same size.
        assert bool(one.rel_frobenius) == bool(other.rel_frobenius)
        assert one.rel_frobenius <= 10 * other.rel_frobenius


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("type_name", ["e4m3", "s8"])
def test_pieces_of_smoothed_columns(
    type_name: str, permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = smoothed(type_name, "vector", permuted)
    assert packed.smooth is not None
    assert packed.shape[1] > packed.info.optype.block_k
    random = np.random.default_rng(1)
    tokens = SmoothedTokens.random(random, 32, packed.smooth, packed.info.optype)
    whole = tokens.original_product(packed, packed.shape[0])
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1)
    found = tokens.original_product(packed, packed.shape[0])
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert cpu.verify_matrix(packed, 3).passed


def test_activations_are_those_of_all_rows_at_once() -> None:
    for name, optype in OPERAND_TYPES.items():
        if name == "s8":
            continue
        found = cpu.random_activations(np.random.default_rng(5), 7, 101, optype)
        at_once = np.random.default_rng(5).standard_normal((7, 101), np.float32)
        assert found.tobytes() == convert(at_once, optype).tobytes()
