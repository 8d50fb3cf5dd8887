"""Tuning and the ceiling, on a device made of host memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sp24cli.bench import ceiling, page, plan, report, tune
from sp24cli.bench import run as bench
from sp24cli.bench.ceiling import bound_by_memory, copy_bandwidth, memory_floor_us
from sp24cli.bench.instrument import DeviceTimer, Instrument
from sp24cli.bench.rates import Shape
from sp24cli.bench.result import WgmmaCeiling
from sp24cli.cli.main import run as sp24
from sp24cli.gpu import select
from sp24cli.gpu.device import Device
from sp24cli.gpu.select import Selector, candidates, choose
from sp24cli.kernels import choices, manifest
from sp24cli.kernels.choices import Measured, Problem, Table
from tests.cpu.benchdevice import SETTINGS, KernelPlan, Weight, simulate
from tests.cpu.benchresult import DECODE, LARGE, two_cases

CANDIDATES = candidates("e4m3", "bf16", "nm")
SHAPES = (Shape(128, 16, 256), Shape(128, 48, 256))


def problem(shape, summation="fast"):
    return Problem("e4m3", "bf16", "nm", shape.m, shape.n, shape.k, summation)


def likely(p):
    """What the model says of each kernel, microseconds in manifest order."""
    return Selector(132, ()).times_us(p)


def hopeful(p):
    """The kernels that the model does not put too far behind its best, in manifest order."""
    limit = tune._HOPELESS * min(likely(p).values())
    return [name for name, us in likely(p).items() if us <= limit]


PROBLEMS = [problem(shape) for shape in SHAPES]
#: Timed at both shapes: the kernel that the others must agree with, the one that the model chooses,
#: and the next in its favour.
FIRST = hopeful(PROBLEMS[0])[0]
MODEL = choose(PROBLEMS[0], 132, ()).kernel.name
FASTEST, SLOWER = sorted({*likely(PROBLEMS[0])} - {FIRST, MODEL}, key=likely(PROBLEMS[0]).get)[:2]


def fastest(kernel):
    """Times of all kernels, of which this one is the fastest."""
    return {e.name: 2.0 for e in CANDIDATES} | {kernel: 1.0}


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "shipped", lambda: ())
    monkeypatch.setattr(tune, "shipped", lambda: ())
    monkeypatch.setattr(Weight, "us", {FASTEST: 6.0, SLOWER: 8.0, MODEL: 7.0})
    select.forget()
    yield simulate(monkeypatch)
    select.forget()


def ceiling_entry(source):
    return manifest.CeilingEntry(
        f"ceiling_e4m3_{source}", "gemm_e4m3", "e4m3", source, 128, 256, 128, 64, 256, 4096, 160, 0,
        "ceiling",
    )  # fmt: skip


def tuned(device, *shapes, **fields):
    cases = plan.plan_shapes(shapes or SHAPES, "e4m3", workers=1)
    return tune.tune(replace(plan.BenchPlan(cases, "nm", settings=SETTINGS), **fields), device)


def test_every_kernel_that_may_be_the_fastest_is_timed(device):
    result = tuned(device)
    assert [case.measured.problem for case in result.cases] == PROBLEMS
    for case in result.cases:
        assert case.measured.times == pytest.approx(
            dict.fromkeys(hopeful(case.measured.problem), 10.0)
            | {FASTEST: 6.0, SLOWER: 8.0, MODEL: 7.0}
        )
        assert case.measured.kernel == FASTEST
    assert result.failures == ()
    assert result.table.fatbins == manifest.load().sha256
    assert not device.buffers, "device memory leaked"


@pytest.mark.parametrize(
    ("shape", "tile_n"),
    [(SHAPES[0], 256), (Shape(1024, 2048, 256), 8)],
)
def test_a_hopeless_kernel_is_not_run(device, monkeypatch, shape, tile_n):
    """A wide tile of few tokens, a narrow one of many."""
    right, ran = KernelPlan.enqueue, set()

    def enqueue(self, *arguments, **scales):
        ran.add(self.name)
        right(self, *arguments, **scales)

    monkeypatch.setattr(KernelPlan, "enqueue", enqueue)
    (case,) = tuned(device, shape).cases
    assert ran == set(case.measured.times) == set(hopeful(problem(shape)))
    assert case.chosen in ran
    assert not ran & {e.name for e in CANDIDATES if e.tile_n == tile_n}


def test_hopeless_is_told_by_kernels_that_sum_alike(device):
    """Fast sums have tiles that promoted ones lack, and would leave fewer of these."""
    (case,) = tuned(device, SHAPES[0], accumulate="precise").cases
    assert list(case.measured.times) == hopeful(problem(SHAPES[0], "precise"))


def test_a_hopeless_kernel_is_timed_where_it_is_chosen(device, monkeypatch):
    """Without its time nobody would know what the choice costs."""
    hopeless = next(e.name for e in CANDIDATES if e.name not in hopeful(PROBLEMS[0]))
    shipped = Table(device.name, "", (Measured(PROBLEMS[0], fastest(hopeless)),))
    monkeypatch.setattr(tune, "shipped", lambda: (shipped,))
    (case,) = tuned(device, SHAPES[0]).cases
    assert (case.chosen, case.chosen_by) == (hopeless, "table")
    assert set(case.measured.times) == {hopeless, *hopeful(PROBLEMS[0])}
    assert case.loss == pytest.approx(10 / 6 - 1)


def test_the_least_of_several_rounds_counts(device, monkeypatch):
    """A kernel that met a hot chip once does not lose by it."""
    seen = []

    def least_us(self, ready, repeats):
        seen.append(ready)
        return {1: 9.0, 2: 5.0, 3: 7.0}[sum(one is ready for one in seen)]

    monkeypatch.setattr(tune.Instrument, "_least_us", least_us)
    cases = plan.plan_shapes(SHAPES[:1], "e4m3", workers=1)
    (case,) = tune.tune(plan.BenchPlan(cases, "nm", settings=SETTINGS), device).cases
    assert set(case.measured.times.values()) == {5.0}
    assert len(case.measured.times) > 1
    first = seen[: len(case.measured.times)]
    assert len(set(map(id, first))) == len(first)
    assert list(map(id, seen)) == 3 * list(map(id, first)), "in turn, so that heat falls on all"


def test_times_are_kept_to_the_nanosecond(device, monkeypatch):
    monkeypatch.setattr(tune.Instrument, "_least_us", lambda *_: 9.00049)
    (case,) = tuned(device, SHAPES[0]).cases
    assert set(case.measured.times.values()) == {9.0}


def test_what_would_have_been_chosen_is_judged(device, monkeypatch):
    """By the model for the first shape; by a shipped table, never by the user's, for the second."""
    shipped = Table(device.name, "", (Measured(PROBLEMS[1], fastest(SLOWER)),))
    monkeypatch.setattr(tune, "shipped", lambda: (shipped, replace(shipped, gpu="another")))
    path = choices.cache_path(device.uuid, manifest.load().sha256)
    choices.write_cache(path, Table(device.name, "", (Measured(PROBLEMS[0], {FASTEST: 1.0}),)))
    first, second = tuned(device).cases
    assert (first.chosen, first.chosen_by) == (MODEL, "model, corrected by table")
    assert first.loss == pytest.approx(7 / 6 - 1)
    assert (second.chosen, second.chosen_by) == (SLOWER, "table")
    text = tune.table(tuned(device))
    assert f"model, corrected by table chooses {MODEL}, 16.7% from the fastest" in text
    assert "at worst 33.3% (128x48x256), 2 beyond 3 %" in text


def test_a_kernel_that_disagrees_stops_its_case(device, monkeypatch):
    right = KernelPlan.enqueue

    def spoil(self, x, ldx, out, **scales):
        right(self, x, ldx, out, **scales)
        if self.name == SLOWER and self.n == 48:
            device.array(out.ptr, np.uint16, (48, 128))[5, 77] = 0x4500

    monkeypatch.setattr(KernelPlan, "enqueue", spoil)
    result = tuned(device)
    assert len(result.cases) == 1
    (failure,) = result.failures
    assert failure.exit_code == 3
    assert failure.message.startswith(f"{SLOWER} and {FIRST} at 128x48x256 e4m3 differ")
    assert not device.buffers


def test_a_kernel_that_writes_nothing_disagrees(device, monkeypatch):
    right = KernelPlan.enqueue

    def lazy(self, x, ldx, out, **scales):
        if self.name != SLOWER:
            right(self, x, ldx, out, **scales)

    monkeypatch.setattr(KernelPlan, "enqueue", lazy)
    assert len(tuned(device).failures) == 2


class TestCommand:
    @pytest.fixture(autouse=True)
    def opened(self, device, monkeypatch):
        monkeypatch.setattr(Device, "open", lambda ordinal=0: device)
        self.path = choices.cache_path(device.uuid, manifest.load().sha256)

    ARGUMENTS = ("bench", "--tune", "--shape", "128x16x256", "--shape", "128x48x256")

    def test_the_choice_is_kept_and_used(self, device, capsys):
        card = type("Card", (), {"name": device.name, "uuid": device.uuid, "sm_count": 132})()
        assert select.chosen(card, PROBLEMS[0]).by == "model"
        assert sp24(list(self.ARGUMENTS)) == 0
        captured = capsys.readouterr()
        assert "without tuning: 16.7%" in captured.out
        assert captured.err == f"kept the choices for 2 problems in {self.path}\n"
        select.forget()
        choice = select.chosen(card, PROBLEMS[0])
        assert (choice.kernel.name, choice.by) == (FASTEST, "cache")

    def test_a_second_run_adds_to_the_first(self, capsys):
        assert sp24([*self.ARGUMENTS[:4], "--quiet"]) == 0
        assert sp24(["bench", "--tune", "--shape", "64x16x256", "--quiet"]) == 0
        assert [row.problem.m for row in choices.read_cache(self.path).measured] == [128, 64]
        assert capsys.readouterr().err == ""

    def test_json_is_what_can_be_shipped(self, capsys, tmp_path):
        assert sp24([*self.ARGUMENTS, "--json", str(tmp_path / "choices.json")]) == 0
        text = (tmp_path / "choices.json").read_text()
        (table,) = choices.from_text(text, "")
        assert [row.problem for row in table.measured] == PROBLEMS
        assert choose(PROBLEMS[0], 132, [("table", table)]).kernel.name == FASTEST
        capsys.readouterr()
        assert sp24([*self.ARGUMENTS, "--json", "-"]) == 0
        assert choices.from_text(capsys.readouterr().out, "")[0].measured[1].problem.n == 48

    @pytest.mark.parametrize("done", [0, 1])
    def test_what_was_measured_before_an_interruption_is_kept(self, capsys, monkeypatch, done):
        random_tokens = plan.random_tokens

        def interrupt(n, *rest):
            if n == SHAPES[done].n:
                raise KeyboardInterrupt
            return random_tokens(n, *rest)

        monkeypatch.setattr(plan, "random_tokens", interrupt)
        assert sp24([*self.ARGUMENTS, "--quiet"]) == 130
        assert capsys.readouterr().err == "sp24: error: interrupted\n"
        kept = choices.read_cache(self.path)
        assert [row.problem for row in kept.measured] == PROBLEMS[:1] if done else kept is None

    def test_a_choice_is_kept_though_the_json_cannot_be_written(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        assert sp24([*self.ARGUMENTS, "--json", str(tmp_path / "file" / "t.json")]) == 1
        captured = capsys.readouterr()
        assert "without tuning:" in captured.out
        assert captured.err.splitlines()[-1].endswith("file: File exists")
        assert len(choices.read_cache(self.path).measured) == 2

    def test_a_cache_that_cannot_be_written_is_said_after_the_table(self, capsys, tmp_path):
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        self.path.parent.write_text("")
        assert sp24([*self.ARGUMENTS, "--json", str(tmp_path / "t.json")]) == 1
        captured = capsys.readouterr()
        assert "without tuning:" in captured.out
        assert captured.err.splitlines()[-1] == f"sp24: error: {self.path.parent}: File exists"
        assert len(choices.from_text((tmp_path / "t.json").read_text(), "")[0].measured) == 2

    def test_an_unreadable_cache_is_replaced_with_a_warning(self, capsys):
        self.path.parent.mkdir(parents=True)
        self.path.write_text("{")
        assert sp24(list(self.ARGUMENTS)) == 0
        warning, kept = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"sp24: warning: replaced: {self.path}: ")
        assert kept.startswith("kept")
        assert len(choices.read_cache(self.path).measured) == 2

    def test_a_wrong_kernel_is_not_kept(self, capsys, monkeypatch):
        monkeypatch.setattr(KernelPlan, "enqueue", lambda self, x, ldx, out, **scales: None)
        assert sp24(list(self.ARGUMENTS)) == 3
        assert not self.path.exists()
        assert capsys.readouterr().err.count("\n") == 1

    def test_the_ceiling_and_the_choice_stand_in_the_table(self, capsys, monkeypatch):
        monkeypatch.setattr(ceiling, "COPY_BYTES", 1 << 20)
        monkeypatch.setattr("sp24cli.bench.statistics.Settings", lambda **fields: SETTINGS)
        monkeypatch.setattr("sp24cli.gpu.telemetry.Telemetry", lambda device: None)
        assert sp24(["bench", "--ceiling", "--shape", "128x16x256", "--quiet"]) == 0
        out = capsys.readouterr().out
        assert "copying memory: 4.00 TB/s, read + write" in out
        assert "kernel kernel_of_choice (by model)" in out
        # 128 rows of 128 values and 32 bytes of metadata at 4 TB/s.
        assert "bound by memory: the packed weight at the rate of a copy takes 0.0051 us" in out


class TestCeiling:
    def test_a_copy_counts_what_it_reads_and_writes(self, device, monkeypatch):
        monkeypatch.setattr(ceiling, "COPY_BYTES", 1 << 20)
        assert copy_bandwidth(device, DeviceTimer(device)) == pytest.approx(4.0)
        assert not device.buffers

    def test_the_median_of_many_copies(self, device, monkeypatch):
        monkeypatch.setattr(ceiling, "COPY_BYTES", 1000)
        # The warm-up would make 2 the middle.
        times = iter([900.0] * ceiling._WARM_UP + [2.0] * 7 + [1.0] * 8)
        timer = SimpleNamespace(event=device.event, elapsed_ms=lambda start, end: next(times))
        assert copy_bandwidth(device, timer) == pytest.approx(2 * 1000 / 1.0 / 1e9)

    def test_a_small_card_copies_less(self, device, monkeypatch):
        monkeypatch.setattr(device, "mem_bytes", 8 << 16, raising=False)
        sizes = []
        alloc = device.alloc
        monkeypatch.setattr(device, "alloc", lambda n: sizes.append(n) or alloc(n))
        copy_bandwidth(device, DeviceTimer(device))
        assert sizes == [1 << 16, 1 << 16]

    def test_it_is_measured_when_asked_for(self, device, monkeypatch):
        monkeypatch.setattr(ceiling, "COPY_BYTES", 1 << 20)
        cases = plan.plan_shapes(SHAPES[:1], "e4m3", workers=1)
        asked = plan.BenchPlan(cases, "nm", settings=SETTINGS, ceiling=True)
        assert bench.run(asked, device).environment.copy_tbps == pytest.approx(4.0)
        assert bench.run(replace(asked, ceiling=False), device).environment.copy_tbps is None

    def test_the_tensor_cores_alone(self, device, monkeypatch):
        entries = [ceiling_entry("ss"), ceiling_entry("rs")]
        layout = manifest.ArgumentLayout(0, 16, (("sums", "uint64_t", 0), ("tiles", "int32_t", 8)))
        loaded = ceiling.manifest.load()
        loaded = replace(loaded, args={**loaded.args, "ceiling": layout})
        monkeypatch.setattr(ceiling.manifest, "load", lambda: loaded)
        device.launch_us = {"ceiling_e4m3_ss": 10.0, "ceiling_e4m3_rs": 8.0}
        found = ceiling.wgmma_ceilings(device, Instrument(DeviceTimer(device), SETTINGS), entries)
        assert [(c.type, c.source) for c in found] == [("e4m3", "ss"), ("e4m3", "rs")]
        # The simulated launch takes as long for each CTA, so their number cancels.
        flops = ceiling.WGMMA_TILES * 64 * 2 * 128 * 256 * 128
        for got, us in zip(found, (10.0, 8.0), strict=True):
            assert got.burst_tflops == pytest.approx(flops / us / 1e6)
            assert got.sustained_tflops == pytest.approx(flops / us / 1e6)
            assert got.sm_mhz == pytest.approx(1700.0, rel=1e-3)
        assert not device.buffers
        assert not ceiling.wgmma_ceilings(device, Instrument(DeviceTimer(device), SETTINGS), [])

    def test_every_sparse_row_is_a_share_of_what_bounds_it(self):
        alone = (
            WgmmaCeiling("e4m3", "ss", 3000.0, 2500.0, 1500.0, None),
            WgmmaCeiling("e4m3", "rs", 3200.0, 2400.0, None, None),
            WgmmaCeiling("f16", "ss", 1.0, 1.0, None, None),
        )
        made = two_cases(4.0)
        result = replace(made, environment=replace(made.environment, wgmma=alone))
        large, decode = result.cases
        ours, dense = large.rows[:2]
        assert ceiling.shares(result.environment, large, ours) == (
            "wgmma",
            pytest.approx(ours.burst.tflops / 3200.0),
            pytest.approx(ours.sustained.tflops / 2500.0),
        )
        assert ceiling.shares(result.environment, large, dense) is None
        by, burst, sustained = ceiling.shares(result.environment, decode, decode.rows[0])
        assert (by, round(burst, 2), round(sustained, 2)) == ("copy", 1.0, 0.92)
        text = report.table(result)
        assert (
            "sparse wgmmas alone, e4m3: A from shared memory 3000 burst / 2500 sustained at 1500 "
            "MHz, A from registers 3200 burst / 2400 sustained TFLOPS"
        ) in text
        assert "copy 100% / 92%" in text
        share = f"{ours.burst.tflops / 3200:.0%} / {ours.sustained.tflops / 2500:.0%}"
        assert share in text and share in report.markdown(result)
        assert "of ceiling" in page.page(result)
        assert "of ceiling" not in report.table(two_cases(None))
        assert len(report.head(result)) == len(report.cells(result, large, ours))

    def test_sixteen_bit_types_share_a_ceiling(self):
        made = two_cases(4.0)
        alone = (WgmmaCeiling("f16", "ss", 1000.0, 1000.0, None, None),)
        environment = replace(made.environment, wgmma=alone)
        case = made.cases[0]
        assert ceiling.shares(environment, case, case.rows[0]) is None
        bf16 = replace(case, type="bf16")
        assert ceiling.shares(environment, bf16, case.rows[0]) is not None

    def test_the_floor_is_the_packed_weight(self):
        packed = 28672 * (8192 // 2 + 8192 // 8)
        assert memory_floor_us(DECODE, "e4m3", 4.0) == pytest.approx(packed / 4e6)

    @pytest.mark.parametrize(
        ("shape", "bound"),
        [(DECODE, True), (Shape(8192, 128, 8192), True), (Shape(8192, 1024, 8192), False),
         (LARGE, False)],
    )  # fmt: skip
    def test_what_is_bound_by_memory(self, shape, bound):
        limits = {"copy_tbps": 4.3, "sm_count": 132, "clock_khz": 1_980_000}
        assert bound_by_memory(shape, "e4m3", "bf16", **limits) == bound

    def test_the_table_gives_the_share_where_memory_is_the_bound(self):
        result = two_cases(4.0)
        large, decode = (report.case_head(result, case) for case in result.cases)
        assert not any("bound by memory" in line for line in large)
        assert decode[-1] == (
            "bound by memory: the packed weight at the rate of a copy takes 36.70 us, 100% of "
            "burst, 92% of sustained"
        )
        unknown = two_cases(None)
        assert "bound by memory" not in report.table(unknown)
        assert "copying" not in report.table(unknown)
