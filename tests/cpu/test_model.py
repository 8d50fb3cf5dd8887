"""The time model of kernels, and what measured times correct of it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from sp24cli.gpu.correction import Correction
from sp24cli.gpu.model import H200, Constants, Points, residents, times_us
from sp24cli.gpu.select import candidates
from sp24cli.kernels import choices, manifest
from sp24cli.kernels.choices import Measured, Problem
from sp24cli.kernels.manifest import Entry

SMS = 132
LOADED = manifest.load().entries
LOADED_NAMES = [e.name for e in LOADED]


def kernel(tile_n: int, cluster: int, split: int = 1, tile_m: int = 128) -> Entry:
    (entry,) = (
        e
        for e in candidates("e4m3", "bf16", "nm")
        if (e.tile_m, e.tile_n, e.cluster, e.split) == (tile_m, tile_n, cluster, split)
    )
    return entry


def at(m: int, n: int, k: int) -> Problem:
    return Problem("e4m3", "bf16", "nm", m, n, k)


def us(entry: Entry, m: int, n: int, k: int, constants: Constants = H200, sms: int = SMS) -> float:
    return float(times_us(Points.of([(entry, at(m, n, k))], sms), constants)[0])


#: Nothing costs anything but what a test names; the smooth maxima are sharp.
FREE = Constants(
    **{f.name: 1e-9 for f in fields(Constants)}
    | {"l2": 1e12, "dram": 1e12}
    | {"sum_time": 50.0, "sum_memory": 50.0}
)


def test_every_kernel_takes_some_time_at_every_problem() -> None:
    sizes = [(0, 0, 0), (1, 1, 1), (64, 3, 128), (28672, 4096, 8192), (1 << 20, 1, 64)]
    for sms in (1, 78, 114, SMS):
        for m, n, k in sizes:
            pairs = [(e, Problem(e.type, e.out_type, e.order, m, n, k)) for e in LOADED]
            found = times_us(Points.of(pairs, sms))
            assert np.isfinite(found).all() and (found > 0.5).all()


def test_the_wgmmas_of_a_step_read_b_and_a_part_of_a() -> None:
    port = replace(FREE, port=1.0, a_rows=40.0)
    # 64 steps of 2 warpgroups, 256 + 40 rows each; by 4 parts of K, 16 steps of 32 + 40.
    assert us(kernel(256, 2), 256, 256, 8192, port) == pytest.approx(64 * 2 * 296 / 1000)
    assert us(kernel(32, 1, 4), 128, 32, 8192, port) == pytest.approx(16 * 2 * 72 / 1000)


def test_tiles_come_in_rounds_over_the_places_that_clusters_find() -> None:
    port = replace(FREE, port=1.0, a_rows=40.0)
    pairs, fours = kernel(256, 2), kernel(256, 4)
    step = 2 * 296 / 1000
    # 66 pairs on 132 SMs, 30 clusters of four; 57 and 28 on an H100's 114.
    for entry, places, sms in (
        (pairs, 66, 132),
        (fours, 30, 132),
        (pairs, 57, 114),
        (fours, 25, 114),
    ):
        rows = entry.tile_m * entry.cluster
        assert us(entry, places * rows, 256, 128, port, sms) == pytest.approx(step)
        assert us(entry, places * rows + 1, 256, 128, port, sms) == pytest.approx(2 * step)


def test_a_tile_ends_with_its_columns_and_what_its_parts_exchange() -> None:
    end = replace(FREE, column=1.0)
    assert us(kernel(128, 2), 128, 8, 128, end) == pytest.approx(2 * 128 / 1000)
    assert us(kernel(128, 1, 2), 128, 8, 128, end) == pytest.approx(2 * 64 / 1000)
    sent = replace(FREE, exchange=500.0, sent=1.0)
    assert us(kernel(128, 2), 128, 8, 128, sent) < 1e-3
    assert us(kernel(128, 1, 2), 128, 8, 128, sent) == pytest.approx((500 + 2 * 64) / 1000)
    assert us(kernel(32, 1, 4), 128, 8, 128, sent) == pytest.approx((500 + 2 * 24) / 1000)


def test_a_round_that_is_partly_filled_reads_less() -> None:
    entry = kernel(8, 1)
    dram = replace(FREE, dram=1.0)
    one, more = us(entry, 132 * 128, 8, 1024, dram), us(entry, 198 * 128, 8, 1024, dram)
    # 1.5 times the bytes of A and D, and B once.
    assert more == pytest.approx(1.5 * one, rel=1e-3)


def test_full_rounds_and_the_last_are_limited_each_by_what_sets_its_pace() -> None:
    # 0.5 us of compute a tile; a round of 132 tiles reads for 1.32 us, one tile for 0.01.
    entry = kernel(8, 1)
    one_tile = us(entry, 128, 8, 1024, replace(FREE, l2=1.0))
    both = replace(FREE, warpgroup=500 / 8 / 2, l2=one_tile * 1000 / 10)
    assert us(entry, 132 * 128, 8, 1024, both) == pytest.approx(1.32, rel=0.02)
    assert us(entry, 133 * 128, 8, 1024, both) == pytest.approx(1.32 + 0.5, rel=0.02)


def test_no_stage_is_shorter_than_the_thread_that_asks_for_it() -> None:
    issue = replace(FREE, issue=100.0)
    # 8 blocks along K, a stage each, or two a stage.
    assert us(kernel(64, 1), 128, 64, 1024, issue) == pytest.approx(8 * 100 / 1000)
    assert us(kernel(8, 1), 128, 8, 1024, issue) == pytest.approx(4 * 100 / 1000)
    assert us(kernel(8, 1), 128, 8, 1024, replace(issue, warpgroup=200.0)) == pytest.approx(
        8 * 400 / 1000, rel=0.01
    )


def test_a_step_waits_for_its_share_of_the_time_that_all_stages_are_on_their_way() -> None:
    flight = replace(FREE, flight=900.0)
    # Ten stages of a block, nine of two.
    assert us(kernel(64, 1), 128, 64, 1024, flight) == pytest.approx(8 * 90 / 1000)
    assert us(kernel(8, 1), 128, 8, 1024, flight) == pytest.approx(8 * 50 / 1000)


def test_two_ctas_of_a_small_kernel_share_an_sm() -> None:
    by_stages = {e.stages: e for e in candidates("e4m3", "bf16", "nm") if e.consumers == 1}
    assert {stages: residents(e) for stages, e in by_stages.items()} == {7: 2, 10: 1, 11: 1, 15: 1}
    wgmma = replace(FREE, warpgroup=1000.0)
    # Clusters of two parts of K on 132 SMs: 66 places, or twice as many.
    for stages, places in ((15, 66), (7, 132)):
        one = us(by_stages[stages], places * 64, 16, 256, wgmma)
        assert us(by_stages[stages], (places + 1) * 64, 16, 256, wgmma) == pytest.approx(2 * one)


def test_clusters_read_their_a_and_the_rows_of_b_that_there_are() -> None:
    entry = kernel(64, 1)
    l2 = replace(FREE, l2=1.0)
    blocks = 2 * entry.block_bytes
    # 10 tiles of 8 steps: 4 of 64 rows, or all of them.
    assert us(entry, 10 * 128, 4, 1024, l2) == pytest.approx(80 * (blocks + 128 * 4) / 1000)
    assert us(entry, 10 * 128, 64, 1024, l2) == pytest.approx(80 * (blocks + 128 * 64) / 1000)
    # Of two columns of tiles one has 64 of them, the other 4.
    assert us(entry, 10 * 128, 68, 1024, l2) == pytest.approx(80 * (2 * blocks + 128 * 68) / 1000)
    # Parts of K share the steps; CTAs along M share the rows, but not their A.
    halves, fours = kernel(64, 1, 2), kernel(64, 4, tile_m=256)
    assert us(halves, 10 * 128, 4, 1024, l2) == us(entry, 10 * 128, 4, 1024, l2)
    # Balanced: 16 blocks of rows are a block each for the CTAs of four clusters.
    assert us(fours, 1024, 64, 128, l2) == pytest.approx((8 * blocks + 4 * 128 * 64) / 1000)
    whole = replace(fours, balanced=False)
    assert us(whole, 1024, 64, 128, l2) == pytest.approx((8 * blocks + 128 * 64) / 1000)


def test_warpgroups_without_rows_cost_nothing() -> None:
    wgmma = replace(FREE, warpgroup=100.0)
    entry = kernel(64, 4, tile_m=256)
    # 30 clusters of 4: 240 blocks of rows are two a CTA, 241 for some three.
    assert us(entry, 240 * 64, 64, 1024, wgmma) == pytest.approx(8 * 2 * 100 / 1000)
    assert us(entry, 241 * 64, 64, 1024, wgmma) == pytest.approx(8 * 3 * 100 / 1000)


def test_a_launch_waits_for_places() -> None:
    start = replace(FREE, launch=1000.0, late=100.0, several=10000.0, wide=100000.0)
    entry = kernel(8, 1)
    # Up to half of the SMs the next launch's CTAs find a place at once, then fewer and fewer.
    assert us(entry, 66 * 128, 8, 128, start) == pytest.approx(1.0, abs=1e-3)
    assert us(entry, 88 * 128, 8, 128, start) == pytest.approx(1.05, abs=1e-3)
    assert us(entry, 132 * 128, 8, 128, start) == pytest.approx(1.1, abs=1e-3)
    assert us(entry, 133 * 128, 8, 128, start) == pytest.approx(11.1, abs=1e-3)
    assert us(kernel(256, 2), 128, 8, 128, start) == pytest.approx(101.0, abs=1e-3)


def test_weights_that_are_widened_take_longer() -> None:
    (entry,) = (
        e
        for e in candidates("e4m3_bf16", "bf16", "nm", "widened")
        if (e.tile_n, e.split) == (16, 1)
    )
    widen = replace(FREE, warpgroup=50.0, widen=20.0)
    steps = 128  # of 64
    assert us(entry, 128, 16, 8192, widen) == pytest.approx(steps * 4 * 70 / 1000)


def test_sums_that_are_promoted_take_longer_by_their_pieces_and_scales() -> None:
    def wide(summation: str) -> Entry:
        found = candidates("e4m3", "f32", "nm", summation)
        return next(e for e in found if (e.tile_n, e.consumers) == (128, 2))

    piece, scale = replace(FREE, piece=1.0), replace(FREE, scale=1.0)
    spread = replace(FREE, spread=1.0)
    for summation, pieces, scaled, spreads in (
        ("precise", 32, 0, 0),
        ("tile128", 0, 0, 64),
        ("block128", 64, 64, 0),
        ("row64", 128, 128, 0),
    ):
        entry = wide(summation)
        assert us(entry, 128, 128, 8192, piece) == pytest.approx(pieces * 128 / 1000, abs=1e-3)
        assert us(entry, 128, 128, 8192, scale) == pytest.approx(scaled * 128 / 1000, abs=1e-3)
        assert us(entry, 128, 128, 8192, spread) == pytest.approx(spreads * 128 / 1000, abs=1e-3)
    # Both warpgroups read A's two blocks, and half of B twice; or one block and all of B.
    port = replace(FREE, port=1.0, a_rows=40.0)
    assert us(wide("precise"), 128, 128, 128, port) == pytest.approx(2 * (128 + 80) / 1000)
    assert us(wide("tile128"), 128, 128, 128, port) == pytest.approx(2 * (128 + 40) / 1000)


class TestCorrection:
    HERE = at(4096, 100, 8192)
    ENTRIES = candidates("e4m3", "bf16", "nm")

    def corrected(self, rows: list[Measured], problem: Problem) -> dict[str, float]:
        """Corrected times by those of the model alone."""
        before = Correction([], SMS).times_us(self.ENTRIES, problem)
        after = Correction(rows, SMS).times_us(self.ENTRIES, problem)
        return dict(zip((e.name for e in self.ENTRIES), after / before, strict=True))

    def slower(self, problem: Problem, factor: float, *names: str) -> Measured:
        """The model's times, of these kernels by so much longer."""
        times = Correction([], SMS).times_us(self.ENTRIES, problem)
        return Measured(
            problem,
            {
                e.name: float(t) * (factor if e.name in names else 1.0)
                for e, t in zip(self.ENTRIES, times, strict=True)
            },
        )

    def test_nothing_measured_corrects_nothing(self) -> None:
        assert set(self.corrected([], self.HERE).values()) == {1.0}

    def test_a_measurement_is_nearly_believed_and_others_are_left(self) -> None:
        name = kernel(128, 1, 2).name
        found = self.corrected([self.slower(self.HERE, 1.2, name)], self.HERE)
        # A measurement's noise takes a tenth, the mean of more than six near the fastest a sixth.
        assert 1.2**0.7 < found.pop(name) < 1.2
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.2 / 6)

    def test_a_slower_card_tells_nothing(self) -> None:
        found = self.corrected([self.slower(self.HERE, 2.0, *LOADED_NAMES)], self.HERE)
        assert found == pytest.approx(dict.fromkeys(found, 1.0))

    def test_the_less_alike_the_less_it_tells(self) -> None:
        name = kernel(128, 1, 2).name
        row = self.slower(self.HERE, 1.2, name)
        there = [at(4096, 100, 8192), at(4096, 100, 5120), at(4096, 90, 2560), at(28672, 8000, 512)]
        told = [self.corrected([row], problem)[name] for problem in there]
        assert told == sorted(told, reverse=True)
        assert 0.99 < told[-1] < 1.03

    def test_several_measurements_weigh_more_than_one(self) -> None:
        name = kernel(128, 1, 2).name
        row = self.slower(self.HERE, 1.2, name)
        once, often = self.corrected([row], self.HERE), self.corrected([row] * 5, self.HERE)
        assert once[name] < often[name] < 1.2

    def test_the_other_operand_types_of_a_tile_tell_as_much(self) -> None:
        row = self.slower(self.HERE, 1.2, kernel(128, 1, 2).name)
        entries = candidates("f16", "f32", "mn")
        problem = Problem("f16", "f32", "mn", 4096, 100, 4096)
        before, after = (Correction(rows, SMS).times_us(entries, problem) for rows in ([], [row]))
        tile = (128, 2, 128, 1)
        (i,) = (
            i for i, e in enumerate(entries) if (e.tile_n, e.split, e.tile_m, e.cluster) == tile
        )
        assert (after / before)[i] > 1.2**0.7

    def test_hopeless_and_unknown_kernels_tell_nothing(self) -> None:
        name = kernel(128, 1, 2).name
        slow = self.slower(self.HERE, 10.0, name)
        assert self.corrected([slow], self.HERE)[name] == 1.0
        self.corrected([Measured(self.HERE, {"gemm_of_old": 1.0})], self.HERE)


def test_the_shipped_table_chooses_well() -> None:
    """Of every second problem, by the others: what `samples/fit_model.py` says of ten folds."""
    (table,) = (t for t in choices.shipped() if t.gpu == "NVIDIA H200")
    by_name = {e.name: e for e in LOADED}
    rows = [row for row in table.measured if len(row.times) > 1]

    def losses(correction: Correction) -> list[float]:
        found = []
        for row in rows[1::2]:
            entries = [by_name[name] for name in row.times]
            chosen = entries[int(correction.times_us(entries, row.problem).argmin())]
            found.append(row.times[chosen.name] / row.times[row.kernel] - 1)
        return found

    alone, corrected = losses(Correction([], SMS)), losses(Correction(rows[::2], SMS))
    assert len(corrected) > 140
    assert np.mean(corrected) < 0.009
    assert np.mean(np.array(corrected) > 0.03) < 0.125
    # The model alone: 1.1 % and 13.7 %.
    assert np.mean(corrected) < 0.85 * np.mean(alone)
