"""The whole bench on a device made of host memory: order of things, faults, peers, reports."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sp24cli.activations import quantize_tokens
from sp24cli.bench import judge, plan, report
from sp24cli.bench import run as bench
from sp24cli.bench.problem import random_tokens, random_weight
from sp24cli.bench.rates import Shape
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.gpu.telemetry import Sample
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.quantize import quantize_file
from sp24cli.optypes import operand_type
from sp24cli.peers.loading import PeerError
from sp24cli.scaling import ScaleSpec
from tests.cpu.benchdevice import SETTINGS, KernelPlan, PeerLibrary, Weight, libraries, simulate
from tests.cpu.modelfile import load, normal, save


@pytest.fixture
def device(monkeypatch):
    return simulate(monkeypatch)


SMALL = Shape(128, 16, 256)


def run(device, shapes=(SMALL,), type_name="e4m3", *, peers=True, **options):
    order = options.pop("order", "nm")
    cases = plan.plan_shapes(shapes, type_name, workers=2, **options)
    return bench.run(plan.BenchPlan(cases, order, None, peers, SETTINGS, workers=2), device)


def only_failure(result):
    assert result.cases == ()
    (failure,) = result.failures
    return failure


@pytest.mark.parametrize("order", ["nm", "mn"])
@pytest.mark.parametrize(
    ("type_name", "scale", "out"),
    [("e4m3", "tensor", "bf16"), ("e4m3", "vector", "f32"), ("f16", "tensor", None)],
)
def test_ours_alone(device, order, type_name, scale, out):
    result = run(device, type_name=type_name, order=order, scale=scale, out=out)
    (case,) = result.cases
    (row,) = case.rows
    assert row.role.detail == "kernel_of_choice"
    assert row.burst.us == pytest.approx(10.0)
    assert row.burst.tflops == pytest.approx(2 * 128 * 16 * 256 / 10 / 1e6)
    assert row.check.passed
    assert [check.name for check in case.checks] == [
        "all elements", "every copy gives the same bits", "same bits after timing",
    ]  # fmt: skip
    assert case.out == (out or "f16")
    assert result.environment.peers == {
        "cuBLASLt": "not used: no cuBLASLt here", "cuSPARSELt": "not used: no cuSPARSELt here",
    }  # fmt: skip
    assert not device.buffers, "device memory leaked"


def fail_at_48_tokens(monkeypatch, error):
    random_tokens = plan.random_tokens

    def make(n, *rest):
        if n == 48:
            raise error
        return random_tokens(n, *rest)

    monkeypatch.setattr(plan, "random_tokens", make)


def test_an_interrupted_run_keeps_what_it_has(device, monkeypatch):
    fail_at_48_tokens(monkeypatch, KeyboardInterrupt)
    result = run(device, [Shape(128, n, 256) for n in (16, 32, 48, 64)])
    assert [case.shape.n for case in result.cases] == [16, 32]
    (failure,) = result.failures
    assert (failure.shape.n, failure.message, failure.exit_code) == (48, "interrupted", 130)
    assert not device.buffers
    with pytest.raises(KeyboardInterrupt):
        run(device, [Shape(128, 48, 256)])


def test_a_case_without_memory_does_not_take_the_others_along(device, monkeypatch):
    fail_at_48_tokens(monkeypatch, MemoryError)
    result = run(device, [Shape(128, n, 256) for n in (16, 48, 64)])
    assert [case.shape.n for case in result.cases] == [16, 64]
    (failure,) = result.failures
    assert (failure.shape.n, failure.message, failure.exit_code) == (48, "out of memory", 1)


def test_a_library_that_does_not_end_takes_no_figures_along(device, monkeypatch):
    libraries(monkeypatch, dense=12.0)

    def close(self):
        raise PeerError("cublasLtDestroy: an illegal memory access was encountered")

    monkeypatch.setattr(PeerLibrary, "close", close)
    (case,) = run(device).cases
    assert case.best("cublaslt", "burst") is not None


#: A type, B type, sum and output, and the name and output that they have in a result.
NEW_TYPES = [
    ({"type_name": "e4m3", "b_type": "e5m2"}, "e4m3_e5m2", "bf16"),
    ({"type_name": "e5m2", "b_type": "e4m3", "out": "f16"}, "e5m2_e4m3", "f16"),
    ({"type_name": "e5m2", "scale": "vector"}, "e5m2", "bf16"),
    ({"type_name": "s8"}, "s8", "s32"),
    ({"type_name": "s8", "out": "bf16", "scale": "vector"}, "s8", "bf16"),
    ({"type_name": "tf32"}, "tf32", "f32"),
    ({"type_name": "f16", "accumulate": "f16"}, "f16_sum16", "f16"),
]


@pytest.mark.parametrize(("options", "name", "out"), NEW_TYPES)
def test_every_pair_of_types_beside_peers(device, monkeypatch, options, name, out):
    """What is timed is verified in its own types, with what each peer was given."""
    libraries(
        monkeypatch, dense=5.0, sparse=({(o, i): 5.0 for o in ("nm", "mn") for i in (None, 0)},)
    )
    result = run(device, **options)
    (case,) = result.cases
    assert (case.type, case.out) == (name, out)
    families = [row.role.family for row in case.rows]
    assert families[:3] == ["sp24", "cublaslt", "cusparselt"]
    assert all(row.check.passed for row in case.rows)
    assert not device.buffers


#: Weights that are widened, and their outputs.
WIDENED = [
    ({"b_type": "bf16", "scale": "block", "block": "32x32"}, "e4m3_bf16", "bf16"),
    ({"b_type": "f16", "scale": "block"}, "e4m3_f16", "f16"),
    ({"scale": "mx"}, "e4m3_bf16", "bf16"),
    ({"b_type": "f16", "scale": "vector", "out": "f32"}, "e4m3_f16", "f32"),
    ({"b_type": "bf16"}, "e4m3_bf16", "bf16"),
]


@pytest.mark.parametrize(("options", "name", "out"), WIDENED)
def test_widened_weights_stand_beside_the_dense_product(device, monkeypatch, options, name, out):
    libraries(
        monkeypatch, dense=5.0, sparse=({(o, i): 5.0 for o in ("nm", "mn") for i in (None, 0)},)
    )
    (case,) = run(device, **options).cases
    assert (case.type, case.out) == (name, out)
    assert [row.role.family for row in case.rows] == ["sp24", "cublaslt"]
    assert all(row.check.passed for row in case.rows)
    ours, dense = case.rows
    # 16 bits a weight instead of 8 and a quarter of metadata for half of them.
    m, n, k = case.shape.m, case.shape.n, case.shape.k
    sixteen = {"bf16": 2, "f16": 2, "f32": 4}[out]
    moved = 2 * n * k + sixteen * m * n
    assert ours.burst.gbps == pytest.approx((m * k * 5 / 8 + moved) / ours.burst.us / 1e3)
    assert dense.burst.gbps == pytest.approx((2 * m * k + moved) / dense.burst.us / 1e3)
    assert not device.buffers


def test_small_scales_need_wide_activations():
    for options in ({"b_type": "e4m3"}, {"b_type": "e5m2"}):
        with pytest.raises(Sp24Error, match="activations of bf16 or f16, not of"):
            plan.plan_shapes((SMALL,), "e4m3", scale="mx", **options)
    with pytest.raises(Sp24Error, match="scales of 8x32 need a kernel"):
        plan.plan_shapes((SMALL,), "e4m3", scale="block", block="8x32")
    with pytest.raises(BadInputError, match="is not ROWSxCOLUMNS"):
        plan.plan_shapes((SMALL,), "e4m3", scale="block", block="8")


@pytest.mark.parametrize(("options", "name", "out"), [*NEW_TYPES, *WIDENED])
def test_a_wrong_element_is_seen_in_every_type(device, monkeypatch, options, name, out):
    def spoil(got, n):
        value = float(got[77, 5])
        got[77, 5] = value + (1 if out == "s32" else 3 * abs(value) + got.astype(float).std())
        return got

    monkeypatch.setattr(Weight, "fault", staticmethod(spoil))
    failure = only_failure(run(device, **options))
    assert failure.exit_code == 3
    assert "row 77, column 5" in failure.message


@pytest.mark.parametrize("k", [1020, 4])
def test_ragged_k_is_padded_to_whole_16_bytes(device, k):
    result = run(device, (Shape(100, 7, k),))
    assert result.cases[0].skipped == (("peers", "the peers need K to fill whole 16 bytes"),)


def test_a_wrong_element_stops_before_timing(device, monkeypatch):
    def spoil(got, n):
        got[77, 5] = 3 * got[77, 5] + 1
        return got

    monkeypatch.setattr(Weight, "fault", staticmethod(spoil))
    failure = only_failure(run(device))
    assert re.search(r"128x16x256 e4m3.*row 77, column 5", failure.message)
    assert failure.exit_code == 3
    assert device.log.count("sp24") < 64 + 2
    assert not device.buffers


def test_an_unwritten_element_is_seen(device, monkeypatch):
    """The output is poisoned, so what the kernel leaves out cannot pass by luck."""

    def leave(self, x, ldx, out, **scales):
        pass

    monkeypatch.setattr(KernelPlan, "enqueue", leave)
    assert "row 0, column 0" in only_failure(run(device)).message


def test_a_moving_result_is_a_race(device, monkeypatch):
    verified = []

    def late(got, n):
        if verified:
            got[1, 1] *= 1.01
        verified.append(True)
        return got

    monkeypatch.setattr(Weight, "fault", staticmethod(late))
    assert "same bits after timing" in only_failure(run(device)).message


def test_a_failed_case_does_not_take_the_others_along(device, monkeypatch):
    def spoil(got, n):
        return got * (got.shape != (64, 16))

    monkeypatch.setattr(Weight, "fault", staticmethod(spoil))
    seen = []
    shapes = (SMALL, Shape(64, 16, 128), Shape(128, 32, 256))
    cases = plan.plan_shapes(shapes, "e4m3", workers=1)
    result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS), device, finished=seen.append)
    assert [case.shape for case in result.cases] == [shapes[0], shapes[2]]
    assert list(result.cases) == seen
    assert [failure.shape for failure in result.failures] == [shapes[1]]
    assert "64x16x128 has no figures" in report.table(result)
    assert report.one_line(seen[0]) == "128x16x256 e4m3: sp24 10.00 us (sustained)"
    assert not device.buffers


SPARSE_TIMES = {
    ("nm", None): 30.0, ("mn", None): 35.0,
    ("nm", 0): 30.0, ("nm", 1): 14.0, ("nm", 2): 9.0,
    ("mn", 0): 35.0, ("mn", 1): 12.0, ("mn", 2): 25.0,
}  # fmt: skip


def test_peers_are_ranked_verified_and_timed(device, monkeypatch):
    # id 2 in nm is the fastest and wrong; id 2 in mn is refused.
    sparse = (SPARSE_TIMES, {("nm", 2)}, {("mn", 2)})
    libraries(monkeypatch, dense=20.0, sparse=sparse)
    result = run(device)
    (case,) = result.cases
    assert case.reference == "float64 product by cuBLASLt"
    assert [row.role.label for row in case.rows] == [
        "sp24", "cuBLASLt dense", "cuSPARSELt default", "cuSPARSELt id 1 mn", "cuSPARSELt id 1 nm",
    ]  # fmt: skip
    assert case.searched == 5
    assert dict(case.skipped) == {
        "cuSPARSELt id 2 nm": "its product is wrong; not timed",
        "cuSPARSELt id 2 mn (mn)": "matmul: not supported",
    }
    assert case.best("cusparselt", "burst").role.label == "cuSPARSELt id 1 mn"
    assert case.speedup("cusparselt", "burst") == pytest.approx(1.2)
    assert case.speedup("cusparselt", "sustained", default=True) == pytest.approx(3.0)
    assert case.speedup("cublaslt", "sustained") == pytest.approx(2.0)
    assert all(row.check.passed for row in case.rows)
    assert result.environment.peers == {"cuBLASLt": "13", "cuSPARSELt": "0.8"}
    assert not device.buffers


def test_a_peer_that_writes_nothing_does_not_inherit_our_result(device, monkeypatch):
    # Only nm: so the memory holds a right result in the right order when id 1 leaves it as it is.
    times = {("nm", None): 30.0, ("nm", 0): 30.0, ("nm", 1): 5.0}
    libraries(monkeypatch, sparse=(times, (), {("mn", None)}, {("nm", 1)}))
    (case,) = run(device).cases
    assert dict(case.skipped) == {"cuSPARSELt id 1 nm": "its product is wrong; not timed"}


def test_a_default_among_the_fastest_is_timed_once(device, monkeypatch):
    times = {("nm", None): 5.0, ("nm", 0): 5.0, ("mn", None): 30.0, ("mn", 0): 30.0}
    libraries(monkeypatch, sparse=(times, (), ()))
    (case,) = run(device).cases
    labels = [row.role.label for row in case.rows]
    assert labels == ["sp24", "cuSPARSELt default", "cuSPARSELt id 0 mn"]
    assert case.best("cusparselt", "burst").role.default


def test_peers_get_the_tensor_scale_as_alpha(device, monkeypatch):
    libraries(monkeypatch, dense=20.0)
    tensor = run(device, scale="tensor").cases[0]
    vector = run(device, scale="vector").cases[0]
    assert tensor.rows[1].role.alpha != 1.0
    assert vector.rows[1].role.alpha == 1.0
    assert tensor.rows[1].check.passed
    assert vector.rows[1].check.passed


def test_no_peers_leaves_them_out_but_keeps_the_reference(device, monkeypatch):
    libraries(monkeypatch, dense=20.0, sparse=(SPARSE_TIMES, (), ()))
    result = run(device, peers=False)
    assert [row.role.label for row in result.cases[0].rows] == ["sp24"]
    assert result.cases[0].reference == "float64 product by cuBLASLt"
    assert result.environment.peers == {
        "cuBLASLt": "13 (reference alone)", "cuSPARSELt": "not asked for",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nvml", "why"), [(None, "nvidia-ml-py is not installed"), (object(), "NVML does not answer")]
)
def test_a_card_that_cannot_be_read_is_said(device, monkeypatch, nvml, why):
    silent = SimpleNamespace(sample=lambda: Sample())
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: nvml)
    cases = plan.plan_shapes((SMALL,), "e4m3", workers=2)
    result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS), device, telemetry=silent)
    assert result.environment.unread == f"power, temperature and throttling not read: {why}"
    assert result.environment.unread in report.table(result).splitlines()
    assert f"- {result.environment.unread}" in report.markdown(result).splitlines()


def test_a_card_that_is_read_is_named(device, monkeypatch):
    monkeypatch.setattr(device, "uuid", "5a" * 16, raising=False)
    reading = SimpleNamespace(sample=lambda: Sample(power_w=400.0))
    cases = plan.plan_shapes((SMALL,), "e4m3", workers=2)
    result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS), device, telemetry=reading)
    assert (result.environment.unread, result.environment.uuid) == (None, "5a" * 16)


@pytest.mark.parametrize(
    ("options", "said", "name"),
    [
        ({}, ("tensor", "fast"), "128x16x256 e4m3 -> bf16 nm"),
        ({"type_name": "f16"}, ("none", "fast"), "128x16x256 f16 -> f16 nm"),
        (
            {"scale": "block", "block": "1x64"},
            ("block 1x64", "fast"),
            "128x16x256 e4m3 -> bf16 nm, scale block 1x64",
        ),
        ({"scale": "mx"}, ("mx", "fast"), "128x16x256 e4m3_bf16 -> bf16 nm, scale mx"),
    ],
)
def test_a_case_says_its_scales_and_sums(device, options, said, name):
    result = run(device, **options)
    (case,) = result.cases
    assert (case.scale, case.accumulate) == said
    assert name in report.table(result).splitlines()
    assert f"## {name.replace('->', '→')}" in report.markdown(result).splitlines()


def test_cases_share_a_weight(device, monkeypatch):
    drawn = []
    plain = plan.random_weight

    def count(m, k, *rest):
        drawn.append((m, k))
        return plain(m, k, *rest)

    monkeypatch.setattr(plan, "random_weight", count)
    shapes = (Shape(128, 16, 256), Shape(128, 32, 256), Shape(64, 16, 256))
    assert len(run(device, shapes).cases) == 3
    assert drawn == [(128, 256), (64, 256)]


class TestSummation:
    def test_precise_sums_are_timed_beside_the_fast_ones(self, device, monkeypatch):
        monkeypatch.setattr(Weight, "us", {"kernel_of_choice": 8.0})
        cases = plan.plan_shapes((SMALL,), "e4m3", workers=2)
        asked = plan.BenchPlan(cases, "nm", None, False, SETTINGS, 2, accumulate="precise")
        result = bench.run(asked, device)
        (case,) = result.cases
        assert (case.accumulate, case.name) == (
            "precise", "128x16x256 e4m3 -> bf16 nm, precise sums",
        )  # fmt: skip
        assert [(row.role.label, row.role.detail) for row in case.rows] == [
            ("sp24", "kernel_of_choice_precise"), ("sp24 fast", "kernel_of_choice"),
        ]  # fmt: skip
        assert [row.check.name for row in case.rows] == ["all elements", "exact integers"]
        assert case.speedup("sp24 fast", "burst") == pytest.approx(0.8)
        assert "sp24 against its own fast sums: burst x0.80" in report.table(result)

    def test_block_scales_are_judged_by_their_values_and_peers_by_codes(self, device, monkeypatch):
        libraries(monkeypatch, dense=20.0)
        (case,) = run(device, (Shape(256, 16, 512),), scale="block").cases
        assert [row.role.family for row in case.rows] == ["sp24", "sp24 fast", "cublaslt"]
        assert all(row.check.passed for row in case.rows)

    @pytest.mark.parametrize("of", ["a", "b"])
    def test_a_scale_of_the_next_block_is_found(self, device, monkeypatch, of):
        from dataclasses import replace

        cases = plan.plan_shapes((Shape(256, 16, 512),), "e4m3", scale="block", workers=2)
        packed, tokens = cases[0].load()
        uploaded = Weight.upload

        def moved(device, packed, *, activations=None):
            scale = np.roll(packed.scale, 1, axis=packed.scale.ndim - 1)
            return uploaded(device, replace(packed, scale=scale) if of == "a" else packed)

        assert packed.scale.shape == (2, 4) and tokens.scale.shape == (16, 4)
        monkeypatch.setattr(Weight, "upload", moved)
        if of == "b":
            enqueue = KernelPlan.enqueue

            def shifted(self, x, ldx, out, **scales):
                self.scale_b_k = 256 if self.scale_b_k else 0
                enqueue(self, x, ldx, out, **scales)

            monkeypatch.setattr(KernelPlan, "enqueue", shifted)
        result = bench.run(plan.BenchPlan(cases, "nm", None, False, SETTINGS, 2), device)
        assert "all elements" in only_failure(result).message


class TestFiles:
    @pytest.fixture
    def packed_file(self, tmp_path):
        from sp24cli.checkpoint.packedfile import merge_metadata, part_entries
        from sp24cli.checkpoint.writer import StreamingWriter

        e4m3 = operand_type("e4m3")
        matrices = {
            name: random_weight(m, k, e4m3, ScaleSpec(kind), seed=i, workers=1)
            for i, (name, m, k, kind) in enumerate(
                (("a.weight", 64, 128, "vector"), ("b.weight", 64, 128, "vector"),
                 ("c.weight", 128, 256, "tensor"))
            )
        }  # fmt: skip
        entries, metadata = [], {}
        for name, packed in matrices.items():
            entries += part_entries(name, packed.info)
        metadata = merge_metadata({}, {name: p.info for name, p in matrices.items()})
        path = tmp_path / "p.safetensors"
        with StreamingWriter(path, entries, metadata) as writer:
            for name, packed in matrices.items():
                writer.write(f"{name}_blocks", packed.blocks)
                writer.write(f"{name}_scale", packed.scale)
        return path

    def test_weights_of_one_shape_are_timed_once(self, device, packed_file):
        cases, notes = plan.plan_file(str(packed_file), (16, 32), workers=1)
        assert [str(case.shape) for case in cases] == [
            "64x16x128", "64x32x128", "128x16x256", "128x32x256",
        ]  # fmt: skip
        assert notes == ("a.weight (64x128) stands for 2 weights of its shape",)
        result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS, notes=notes), device)
        assert result.cases[0].weight.endswith("p.safetensors: a.weight")
        # Given weights may hold anything: their codes and indices are checked exactly as well.
        assert [check.name for check in result.cases[0].checks] == [
            "all elements", "exact integers", "every copy gives the same bits", "identity",
            "same bits after timing",
        ]  # fmt: skip
        assert notes[0] in report.table(result)

    def test_given_activations_choose_weights_and_count(self, device, packed_file, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((5, 256), np.float32))
        cases, _ = plan.plan_file(
            str(packed_file), (), activations=str(tmp_path / "x.npy"), workers=1
        )
        assert [str(case.shape) for case in cases] == ["128x5x256"]
        result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS), device)
        assert result.cases[0].activations.endswith("x.npy")

    @pytest.mark.parametrize("given", [True, False])
    def test_a_permuted_weight_meets_activations_in_its_order(
        self, device, monkeypatch, tmp_path, given
    ):
        """Ours gets those of the original, the peers what the gather makes of them."""
        path, x = tmp_path / "p.safetensors", tmp_path / "x.npy"
        source = save(tmp_path / "model", {"a.weight": normal(1, (128, 256))})
        quantize_file(
            source,
            path,
            optype=operand_type("e4m3"),
            spec=ScaleSpec("tensor"),
            prune=True,
            choice=Choice(permute=True),
        )
        np.save(x, np.random.default_rng(5).standard_normal((16, 256)))
        libraries(monkeypatch, dense=12.0, sparse=(SPARSE_TIMES,))
        cases, notes = plan.plan_file(
            str(path), (16,), activations=str(x) if given else None, workers=1
        )
        assert notes == ("a.weight: sp24's time includes reordering the activations' columns",)
        result = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS, notes=notes), device)
        assert not result.failures
        assert {row.role.family for row in result.cases[0].rows} == {
            "sp24", "cublaslt", "cusparselt",
        }  # fmt: skip
        assert not device.buffers

    @pytest.mark.parametrize("kind", ["vector", "block"])
    @pytest.mark.parametrize("permuted", [False, True])
    def test_a_smoothed_weight_meets_divided_activations(self, device, tmp_path, kind, permuted):
        path, x = smoothed_file(tmp_path, kind, permuted), tmp_path / "x.npy"
        given = np.random.default_rng(5).standard_normal((16, 256)).astype(np.float16)
        np.save(x, given)
        (case,), notes = plan.plan_file(str(path), (16,), activations=str(x), workers=1)
        assert notes[-1] == "a.weight: activations were divided by its factors"
        packed, tokens = case.load()
        moved = given.astype(np.float32) / packed.smooth
        if permuted:
            assert not np.array_equal(packed.perm, np.arange(256))
            moved = moved[:, packed.perm]
        # Scales of 128 columns are those of columns as they are stored.
        want = quantize_tokens(moved, packed.info.optype, 1, 128 if kind == "block" else 0)
        assert tokens.scale_k == want.scale_k
        assert tokens.scale.tobytes() == want.scale.tobytes()
        assert tokens.codes.tobytes() == want.codes.tobytes()
        if kind == "vector":
            result = bench.run(plan.BenchPlan((case,), "nm", settings=SETTINGS), device)
            assert not result.failures
        _, notes = plan.plan_file(str(path), (16,), workers=1)
        assert notes[-1] == "a.weight: activations are taken as divided by its factors"

    def test_factors_that_can_be_none_are_named(self, device, tmp_path):
        path = smoothed_file(tmp_path, "vector", False)
        tensors, metadata = load(path)
        tensors["a.weight_smooth"] = tensors["a.weight_smooth"].copy()
        tensors["a.weight_smooth"][3] = np.inf
        bad = save(tmp_path / "bad", tensors, metadata)
        cases, _ = plan.plan_file(str(bad), (16,), workers=1)
        (failure,) = bench.run(plan.BenchPlan(cases, "nm", settings=SETTINGS), device).failures
        assert failure.message == (
            f"{bad}: tensor 'a.weight': smooth inf at [3] is not positive, normal and finite"
        )

    def test_too_few_rows_or_another_k_are_refused(self, packed_file, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((5, 256), np.float32))
        np.save(tmp_path / "y.npy", np.ones((5, 12), np.float32))
        with pytest.raises(BadInputError, match="5 rows, not 16"):
            plan.plan_file(str(packed_file), (16,), activations=str(tmp_path / "x.npy"))
        with pytest.raises(BadInputError, match="K = 12"):
            plan.plan_file(str(packed_file), (), activations=str(tmp_path / "y.npy"))
        with pytest.raises(BadInputError, match="K = 256, not 128"):
            plan.plan_shapes((Shape(8, 4, 128),), "e4m3", activations=str(tmp_path / "x.npy"))


def smoothed_file(folder, kind, permuted):
    """A packed file of ``a.weight`` [128, 256], its columns smoothed."""
    source = save(folder / "model", {"a.weight": normal(1, (128, 256))})
    amax = np.exp(np.random.default_rng(2).normal(0, 3, 256)).astype(np.float32)
    quantize_file(
        source,
        folder / "p.safetensors",
        optype=operand_type("e4m3"),
        spec=ScaleSpec(kind, (128, 128) if kind == "block" else None),
        prune=True,
        choice=Choice(permute=permuted),
        calibration=Calibration(activations=save(folder / "amax", {"a.weight": amax})),
    )
    return folder / "p.safetensors"


class TestReports:
    @pytest.fixture
    def result(self, device, monkeypatch):
        libraries(monkeypatch, dense=20.0, sparse=(SPARSE_TIMES, {("nm", 2)}, ()))
        return run(device, (Shape(128, 16, 256), Shape(64, 16, 128)))

    def test_the_table_says_what_and_how(self, result):
        text = report.table(result)
        for part in (
            "128x16x256 e4m3 -> bf16 nm", "kernel kernel_of_choice", "float64 product by cuBLASLt",
            "dense-equivalent", "Simulated H200", "x1.20 / x1.20", "cuSPARSELt id 1 mn *",
            "its product is wrong", "sp24 against best cuSPARSELt: burst x1.20 (least x1.20)",
            "sp24 against default cuSPARSELt: burst x3.00", "random normal, seed 24",
        ):  # fmt: skip
            assert part in text, part

    def test_doubts_stand_on_the_row(self, result):
        case = result.cases[0]
        figure = replace(case.rows[0].sustained, doubts=("noise 9.0%",), throttle=("sw_power_cap",))
        rows = (replace(case.rows[0], sustained=figure), *case.rows[1:])
        text = report.table(replace(result, cases=(replace(case, rows=rows),)))
        (line,) = [line for line in text.splitlines() if line.startswith("sp24   ")]
        assert "sustained noise 9.0%" in line
        assert "throttled: sw_power_cap" in line

    def test_the_energy_of_a_product_stands_beside_the_power(self, result):
        case = result.cases[0]
        figure = replace(case.rows[0].sustained, power_w=700.0, joules=0.0123)
        rows = (replace(case.rows[0], sustained=figure), *case.rows[1:])
        shown = dict(zip(report.head(result), report.cells(result, case, rows[0]), strict=True))
        assert (shown["W"], shown["mJ"]) == ("700", "12.3")
        unread = dict(zip(report.head(result), report.cells(result, case, rows[1]), strict=True))
        assert unread["mJ"] == ""

    def test_json_is_plain_and_whole(self, result):
        document = json.loads(json.dumps(result.to_json(), allow_nan=False))
        assert document["sp24.bench"] == 1
        assert document["environment"]["fatbin_sha256"]
        row = document["cases"][0]["rows"][0]
        assert row["role"]["family"] == "sp24"
        assert row["burst"]["us"] == pytest.approx(10.0)
        assert document["settings"]["rounds"] == 2

    def test_csv_has_a_line_for_each_figure(self, result):
        lines = list(csv.DictReader(io.StringIO(report.comma_separated(result))))
        assert len(lines) == 2 * sum(len(case.rows) for case in result.cases)
        assert lines[0]["candidate"] == "sp24"
        assert float(lines[0]["us"]) == pytest.approx(10.0)
        assert {line["figure"] for line in lines} == {"burst", "sustained"}

    def test_markdown_tables_are_rectangular(self, result):
        rows = [line for line in report.markdown(result).splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1
        assert len(rows) == sum(2 + len(case.rows) for case in result.cases)


def test_bf16_nan_outputs_compare_by_bits():
    one = np.array([[0x7FC0, 0x7FC1]], np.uint16).view(ml_dtypes.bfloat16)
    assert np.array_equal(judge._bits(one), judge._bits(one.copy()))
    assert not np.array_equal(judge._bits(one), judge._bits(one[:, ::-1].copy()))


def test_a_commit_is_read_from_a_checkout_only(tmp_path):
    assert bench.source_commit(tmp_path) is None


def test_given_tokens_are_used(device, tmp_path):
    x = np.zeros((16, 256), np.float32)
    x[3, 7] = 2.0
    np.save(tmp_path / "x.npy", x)
    (case,) = plan.plan_shapes(
        (Shape(128, 16, 256),), "e4m3", activations=str(tmp_path / "x.npy"), workers=1
    )
    _, tokens = case.load()
    assert np.count_nonzero(tokens.codes.astype(np.float32)) == 1
    assert tokens.codes.shape == random_tokens(16, 256, operand_type("e4m3"), 1, 1).codes.shape
