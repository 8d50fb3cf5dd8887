"""Shapes, random data and given activations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from sp24cli.activations import quantize_tokens
from sp24cli.bench.problem import (
    SUITES,
    load_activations,
    parse_shape,
    random_normal,
    random_tokens,
    random_weight,
)
from sp24cli.bench.rates import Shape, peak_tflops, rates
from sp24cli.errors import BadInputError
from sp24cli.optypes import OPERAND_TYPES, operand_type
from sp24cli.packed import check_structure
from sp24cli.pruning.pattern import find_crowded, pattern_of
from sp24cli.scaling import ScaleSpec

E4M3 = operand_type("e4m3")


def test_shapes_are_read():
    assert parse_shape("4096x8192X28672") == Shape(4096, 8192, 28672)
    assert str(parse_shape("1×77×4092")) == "1x77x4092"


@pytest.mark.parametrize(
    "text",
    [
        "4096",
        "1x2",
        "1x2x3x4",
        "axbxc",
        "0x16x16",
        "16x0x16",
        "16x16x18",
        "-1x16x16",
        "٣x4x4",
        "4x2147483648x4",
    ],
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match=r"MxNxK|positive|multiple of 4|below 2\^31"):
        parse_shape(text)


def test_the_suite_has_the_nine_shapes():
    assert len(SUITES["llm"]) == 9
    assert Shape(28672, 16, 8192) in SUITES["llm"]


def test_random_values_depend_on_seed_and_shape_alone():
    one = random_normal(150, 40, 7, np.float32, workers=1)
    assert np.array_equal(one, random_normal(150, 40, 7, np.float32, workers=3))
    assert not np.array_equal(one, random_normal(150, 40, 8, np.float32, workers=1))


def test_random_values_are_normal_and_never_repeat():
    values = random_normal(256, 512, 1, np.float32, workers=2)
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.02
    assert np.unique(values, axis=0).shape[0] == 256
    # Independent rows: no two of them resemble each other.
    overlap = values @ values.T / 512 - np.diag(np.square(values).mean(axis=1))
    assert float(np.abs(overlap).max()) < 0.35


@pytest.mark.parametrize("name", list(OPERAND_TYPES))
def test_random_weights_are_packed_24_and_full(name):
    optype = operand_type(name)
    spec = ScaleSpec("tensor" if optype.scaled else "none")
    packed = random_weight(128, 256, optype, spec, seed=3, workers=2)
    assert check_structure(packed) is None
    assert packed.info.layout == "sm90"
    dense = packed.dequantize(np.float32)
    assert find_crowded(dense, pattern_of(optype)) is None
    # Normal values never vanish on their own, 8-bit types lose few: nothing degenerate.
    assert np.count_nonzero(dense) > (0.48 if name == "s8" else 0.495) * dense.size
    pairs = packed.to_layout("row").meta
    # All six pairs beside all six; of tf32 two beside two.
    assert len(np.unique(pairs)) == (4 if name == "tf32" else 36)
    bits = np.bitwise_or.reduce(packed.codes().view(f"u{optype.itemsize}").ravel())
    assert int(bits).bit_count() >= {"s8": 8, "tf32": 16}.get(name, 7)


def test_tokens_are_quantized_by_row():
    dense = random_normal(9, 64, 5, np.float32, workers=1) * np.logspace(-3, 3, 9)[:, None]
    tokens = quantize_tokens(dense.astype(np.float32), E4M3, workers=2)
    assert tokens.codes.dtype == ml_dtypes.float8_e4m3fn
    assert tokens.scale.shape == (9,)
    back = tokens.codes.astype(np.float32) * tokens.scale[:, None]
    assert np.abs(back - dense).max(axis=1) / np.abs(dense).max(axis=1) == pytest.approx(
        0, abs=0.04
    )
    assert np.all(np.abs(tokens.codes.astype(np.float32)).max(axis=1) == 448)


def test_activations_are_scaled_by_row_and_block():
    dense = np.random.default_rng(3).standard_normal((70, 300)).astype(np.float32)
    dense[:, 128:256] *= 1000
    tokens = quantize_tokens(dense, E4M3, workers=2, scale_k=128)
    assert tokens.scale.shape == (70, 3) and tokens.scale_k == 128
    for block in range(3):
        columns = slice(128 * block, 128 * block + 128)
        alone = quantize_tokens(np.ascontiguousarray(dense[:, columns]), E4M3, workers=1)
        assert np.array_equal(tokens.codes[:, columns].view(np.uint8), alone.codes.view(np.uint8))
        assert np.array_equal(tokens.scale[:, block], alone.scale)
    assert tokens.first(4).scale.shape == (4, 3) and tokens.first(4).scale_k == 128


def test_first_tokens_keep_their_scales():
    tokens = random_tokens(10, 32, E4M3, seed=1, workers=1)
    few = tokens.first(3)
    assert few.codes.shape == (3, 32)
    assert np.array_equal(few.scale, tokens.scale[:3])


def test_unscaled_types_carry_no_scale():
    tokens = random_tokens(4, 32, operand_type("f16"), seed=1, workers=1)
    assert tokens.scale is None
    assert tokens.codes.dtype == np.float16


def test_tokens_and_weight_of_one_seed_differ():
    dense = random_normal(16, 16, 24, np.float32, workers=1)
    tokens = random_tokens(16, 16, operand_type("f16"), 24, workers=1)
    assert not np.array_equal(dense.astype(np.float16), tokens.codes)


class TestActivations:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "acts:1.safetensors"
        save_file(
            {
                "h.0": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
                "half": np.ones((5, 8), ml_dtypes.bfloat16),
                "flat": np.ones(8, np.float32),
                "int": np.ones((2, 8), np.int32),
                "bad": np.array([[0, 1], [2, np.nan]], np.float32),
                "none": np.ones((0, 8), np.float32),
            },
            path,
        )
        return path

    def test_leading_dimensions_are_flattened(self, file):
        array = load_activations(f"{file}:h.0")
        assert array.shape == (6, 4)
        assert array[5, 3] == 23

    def test_bf16_is_read(self, file):
        assert load_activations(f"{file}:half").dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("flat", "two dimensions"),
            ("int", "not a float"),
            ("bad", "row 1, column 1 is not finite"),
            ("none", "empty"),
            ("gone", "gone"),
        ],
    )
    def test_unfit_tensors_are_named(self, file, name, message):
        with pytest.raises(BadInputError, match=message):
            load_activations(f"{file}:{name}")

    def test_a_file_of_several_needs_a_name(self, file):
        with pytest.raises(BadInputError, match="6 tensors"):
            load_activations(str(file))

    def test_a_file_of_one_needs_none(self, tmp_path):
        save_file({"x": np.ones((2, 4), np.float16)}, tmp_path / "x.safetensors")
        assert load_activations(str(tmp_path / "x.safetensors")).shape == (2, 4)

    @pytest.mark.parametrize("fault", ["empty", "archive", "header", "short"])
    def test_a_damaged_npy_is_named(self, tmp_path, fault):
        path = tmp_path / "x.npy"
        np.save(path, np.ones((3, 4)))
        whole = path.read_bytes()
        damaged = {"header": whole[:40] + b" " * 200, "short": whole[:-1]}
        path.write_bytes(damaged.get(fault, b""))
        if fault == "archive":
            with path.open("wb") as file:
                np.savez(file, a=np.ones((3, 4)))
        with pytest.raises(BadInputError, match=r"x\.npy: ") as caught:
            load_activations(str(path))
        assert "\n" not in str(caught.value)

    def test_npy(self, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((3, 4)))
        assert load_activations(str(tmp_path / "x.npy")).shape == (3, 4)

    def test_pickles_are_not_opened(self, tmp_path):
        np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
        with pytest.raises(BadInputError, match=r"x\.npy"):
            load_activations(str(tmp_path / "x.npy"))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(BadInputError, match="nowhere"):
            load_activations(str(tmp_path / "nowhere.safetensors"))


class TestRates:
    SHAPE = Shape(4096, 8192, 8192)

    def test_tflops_are_dense_equivalent(self):
        # 2·4096·8192·8192 = 549.8 GFLOP in 250 us
        found = rates(
            self.SHAPE, "e4m3", "bf16", 250.0, sparse=True, sm_count=132, clock_khz=1_980_000
        )
        assert found.tflops == pytest.approx(2199.0, rel=1e-4)
        # values 16.8 MB + metadata 4.2 MB + B 67.1 MB + D 67.1 MB
        assert found.gbps == pytest.approx(
            (4096 * 4096 + 4096 * 1024 + 8192 * 8192 + 2 * 4096 * 8192) / 250.0 / 1e3
        )
        assert found.peak_share == pytest.approx(2199.0 / 4282.1, rel=1e-3)

    def test_the_peer_without_sparsity_reads_the_dense_weight(self):
        sparse, dense = (
            rates(
                Shape(1024, 16, 4096), "f16", "f16", 10.0,
                sparse=kind, sm_count=132, clock_khz=1_980_000,
            )
            for kind in (True, False)
        )  # fmt: skip
        saved = 1024 * 4096 - 1024 * 4096 // 8
        assert (dense.gbps - sparse.gbps) * 10.0 * 1e3 == pytest.approx(saved)
        assert dense.peak_share == pytest.approx(2 * sparse.peak_share)

    @pytest.mark.parametrize(("name", "sparse", "tflops"), [
        ("e4m3", True, 3957), ("e4m3", False, 1979), ("f16", True, 1979), ("bf16", False, 989),
        ("s8", True, 3957), ("e5m2", False, 1979), ("tf32", True, 989), ("tf32", False, 494.7),
    ])  # fmt: skip
    def test_the_peak_is_the_published_one_at_the_published_clock(self, name, sparse, tflops):
        # NVIDIA H100 SXM: 132 SMs at 1830 MHz boost
        peak = peak_tflops(operand_type(name), sparse=sparse, sm_count=132, clock_khz=1_830_000)
        assert peak == pytest.approx(tflops, rel=1e-3)
