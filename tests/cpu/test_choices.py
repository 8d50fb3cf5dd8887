"""The choice of kernels: measured tables, the user's cache, and the model behind them."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sp24cli.bench import problem
from sp24cli.bench.problem import (
    SUITE_NAMES,
    SUITES,
    fit_shapes,
    grid_shapes,
    select_shapes,
    suite,
)
from sp24cli.cli import bench as command
from sp24cli.errors import BadInputError
from sp24cli.gpu import select
from sp24cli.gpu.select import Selector, candidates, choose
from sp24cli.kernels import choices, manifest
from sp24cli.kernels.choices import Measured, Problem, Table
from tests.cpu.console import ROOT

KERNELS = {(e.tile_n, e.cluster): e.name for e in candidates("e4m3", "bf16", "nm") if e.split == 1}
#: What the model chooses for `HERE`, and one that it does not.
WIDE, SMALL = KERNELS[256, 2], KERNELS[16, 1]
HERE = Problem("e4m3", "bf16", "nm", 4096, 8192, 8192)


def at(m=4096, n=8192, k=8192, *, out="bf16", order="nm", type_name="e4m3"):
    return Problem(type_name, out, order, m, n, k)


def table(*rows: tuple[Problem, dict[str, float]]) -> Table:
    return Table("NVIDIA H200", "ab", tuple(Measured(p, times) for p, times in rows))


def every(times: dict[str, float]) -> dict[str, float]:
    """These and the times of all other kernels, which are slow."""
    names = [e.name for e in candidates("e4m3", "bf16", "nm")]
    return dict.fromkeys(names, 2 * max(times.values())) | times


def chosen(wanted: Problem, *known: tuple[str, Table]) -> tuple[str, str]:
    choice = choose(wanted, 132, known)
    return choice.kernel.name, choice.by


def tile(name: str) -> tuple[int, int]:
    (entry,) = (e for e in manifest.load().entries if e.name == name)
    return entry.tile_n, entry.cluster


class TestChoose:
    def test_without_measurements_the_model_decides(self):
        assert chosen(HERE) == (WIDE, "model")
        assert chosen(HERE, ("table", table())) == (WIDE, "model")

    def test_a_measurement_of_the_problem_overrules_the_model(self):
        known = table((HERE, every({WIDE: 300.0, SMALL: 290.0})))
        assert chosen(HERE, ("table", known)) == (SMALL, "table")

    def test_of_kernels_as_fast_the_one_that_was_reported_is_chosen(self):
        """Read again, it comes last."""
        measured = Measured(HERE, every({WIDE: 290.0, SMALL: 290.0}))
        assert measured.kernel == min(WIDE, SMALL)
        known = Table("NVIDIA H200", "ab", (measured,))
        (again,) = choices.from_text(choices.to_text([known]), "x")
        assert again == known
        assert chosen(HERE, ("cache", again)) == (measured.kernel, "cache")

    def test_the_users_own_comes_first_but_only_where_it_has_the_problem(self):
        cache = table((HERE, every({WIDE: 300.0, SMALL: 290.0})))
        shipped = table(
            (HERE, every({WIDE: 300.0, SMALL: 310.0})), (at(n=100), every({WIDE: 2.0, SMALL: 3.0}))
        )
        known = ("cache", cache), ("table", shipped)
        assert chosen(HERE, *known) == (SMALL, "cache")
        assert chosen(at(n=100), *known) == (WIDE, "table")

    def test_problems_alike_correct_the_model(self):
        """What was measured of one problem tells on those beside it, and on none far away."""
        likely = Selector(132, ()).times_us(HERE)
        second = sorted(likely, key=lambda kernel: likely[kernel])[1]
        times = {WIDE: 1.3 * likely[WIDE], second: likely[second]}
        known = table((HERE, times))
        assert chosen(at(n=8000), ("table", known)) == (second, "model, corrected by table")
        far = at(m=1024, n=16)
        assert chosen(far, ("table", known))[0] == chosen(far)[0]

    def test_both_tables_correct(self):
        known = ("cache", table((HERE, {WIDE: 300.0}))), ("table", table((HERE, {SMALL: 290.0})))
        assert chosen(at(n=16), *known)[1] == "model, corrected by cache and table"

    def test_another_type_output_and_order_correct_too(self):
        likely = Selector(132, ()).times_us(HERE)
        second = sorted(likely, key=lambda kernel: likely[kernel])[1]
        known = table((HERE, {WIDE: 1.3 * likely[WIDE], second: likely[second]}))
        for wanted in (at(out="f32", order="mn"), at(type_name="f16", k=4096)):
            (before, _), (after, by) = chosen(wanted), chosen(wanted, ("table", known))
            assert by == "model, corrected by table"
            assert (tile(before), tile(after)) == (tile(WIDE), tile(second))

    @pytest.mark.parametrize(
        ("likely", "want"),
        [(101.9, (SMALL, "table")), (102.1, (WIDE, "model, corrected by table"))],
    )
    def test_a_kernel_that_was_not_timed_must_be_likely_to_be_faster_by_a_margin(
        self, likely, want, monkeypatch
    ):
        """Beside the fastest that was, by the model, whatever the card's own pace is."""
        times = every({SMALL: 290.0})
        del times[WIDE]
        modelled = every({SMALL: likely, WIDE: 100.0})
        monkeypatch.setattr(Selector, "times_us", lambda self, problem: modelled)
        assert chosen(HERE, ("table", table((HERE, times)))) == want

    def test_a_kernel_that_was_timed_and_is_slower_is_not_chosen_for_its_likely_time(
        self, monkeypatch
    ):
        other = KERNELS[128, 2]
        modelled = every({WIDE: 100.0, other: 105.0, SMALL: 110.0})
        monkeypatch.setattr(Selector, "times_us", lambda self, problem: modelled)
        times = {
            name: us for name, us in every({SMALL: 290.0, WIDE: 300.0}).items() if name != other
        }
        assert chosen(HERE, ("table", table((HERE, times))))[0] == other

    def test_what_any_table_timed_is_not_left_to_the_model(self):
        likely = Selector(132, ()).times_us(HERE)
        shipped = every({SMALL: 290.0}) | {WIDE: 310.0}
        cached = {name: us for name, us in shipped.items() if name != WIDE}
        assert likely[WIDE] < likely[SMALL]
        known = ("cache", table((HERE, cached))), ("table", table((HERE, shipped)))
        assert chosen(HERE, *known) == (SMALL, "cache")

    def test_times_of_other_sums_do_not_count(self):
        known = table((replace(HERE, summation="precise"), {WIDE: 300.0, SMALL: 290.0}))
        assert chosen(HERE, ("table", known))[1] == "model, corrected by table"

    def test_kernels_that_are_no_more_do_not_count(self):
        known = table((HERE, every({WIDE: 300.0, SMALL: 310.0}) | {"gemm_of_old": 1.0}))
        assert chosen(HERE, ("table", known)) == (WIDE, "table")
        assert chosen(HERE, ("table", table((HERE, {"gemm_of_old": 1.0}))))[0] == WIDE

    @pytest.mark.parametrize("side", ["m", "n", "k"])
    def test_an_empty_problem_has_a_kernel(self, side):
        known = table((HERE, {WIDE: 300.0, SMALL: 310.0}))
        assert chosen(at(**{side: 0}), ("table", known))[1] == "model, corrected by table"


class TestFile:
    ROWS = table(
        (HERE, {WIDE: 300.5, SMALL: 290.25}),
        (at(n=16), {SMALL: 7.0}),
        (replace(HERE, summation="precise"), {"gemm_precise": 350.0}),
    )

    def test_text_and_back(self):
        other = Table("NVIDIA H100", "cd", ())
        text = choices.to_text([self.ROWS, other])
        assert choices.from_text(text, "x") == (self.ROWS, other)
        assert json.loads(text)["gpus"]["NVIDIA H200"]["measured"][0] == {
            "type": "e4m3", "out": "bf16", "order": "nm", "m": 4096, "n": 8192, "k": 8192,
            "kernel": SMALL, "us": 290.25, "others": {WIDE: 300.5},
        }  # fmt: skip
        assert json.loads(text)["gpus"]["NVIDIA H200"]["measured"][2]["summation"] == "precise"

    @pytest.mark.parametrize(
        "text",
        ["", "{}", "[]", "null", '{"sp24.choices": 2, "gpus": {}}', '{"sp24.choices": 1}',
         '{"sp24.choices": 1, "gpus": []}', '{"sp24.choices": 1, "gpus": {"x": {}}}',
         "[" * 100000],
    )  # fmt: skip
    def test_what_is_no_table_is_refused_by_name(self, text):
        with pytest.raises(BadInputError, match=r"^there\.json: "):
            choices.from_text(text, "there.json")

    @pytest.mark.parametrize(
        ("key", "value"),
        [("us", 0), ("us", "x"), ("us", 1e999), ("us", 10**400), ("m", 0), ("m", 1e999),
         ("m", 4096.5), ("k", 1 << 31), ("type", ["e4m3"]), ("out", math.nan),
         ("summation", {})],
    )  # fmt: skip
    def test_a_row_that_cannot_be_is_refused(self, key, value):
        document = json.loads(choices.to_text([self.ROWS]))
        document["gpus"]["NVIDIA H200"]["measured"][0][key] = value
        with pytest.raises(BadInputError, match=r"^there\.json: "):
            choices.from_text(json.dumps(document), "there.json")

    def test_newer_rows_replace_those_of_the_same_problem(self):
        merged = self.ROWS.merged([Measured(HERE, {WIDE: 1.0}), Measured(at(n=8), {SMALL: 2.0})])
        assert [row.problem.n for row in merged.measured] == [8192, 16, 8192, 8]
        assert merged.measured[0].kernel == WIDE


class TestCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(choices, "shipped", lambda: ())
        select.forget()
        yield tmp_path
        select.forget()

    DEVICE = SimpleNamespace(name="NVIDIA H200", uuid="5" * 32, sm_count=132)

    @property
    def path(self):
        return choices.cache_path(self.DEVICE.uuid, manifest.load().sha256)

    # SimpleNamespace compares by value and has no hash; a Device is told apart by identity.
    @pytest.fixture
    def device(self):
        return type("Card", (), vars(self.DEVICE))()

    def test_what_was_kept_is_chosen(self, device, folder):
        assert select.chosen(device, HERE).by == "model"
        choices.write_cache(self.path, table((HERE, every({WIDE: 300.0, SMALL: 290.0}))))
        assert select.chosen(device, HERE).by == "model", "read once a process"
        select.forget()
        choice = select.chosen(device, HERE)
        assert (choice.kernel.name, choice.by) == (SMALL, "cache")
        assert [path.parent for path in folder.rglob("*.json")] == [folder / "sp24"]

    def test_another_card_or_other_fatbins_have_their_own(self):
        paths = {choices.cache_path(*names) for names in (("a", "b"), ("a", "c"), ("d", "b"))}
        assert len(paths) == 3

    def test_only_tables_of_this_gpu_count(self, device, monkeypatch):
        rows = table((HERE, {WIDE: 300.0, SMALL: 290.0})).measured
        monkeypatch.setattr(choices, "shipped", lambda: (Table("NVIDIA H100", "", rows),))
        assert select.chosen(device, HERE).by == "model"

    @pytest.mark.parametrize("fault", ["text", "binary", "folder", "row"])
    def test_an_unreadable_cache_is_one_warning(self, device, caplog, fault):
        self.path.parent.mkdir()
        if fault == "folder":
            self.path.mkdir()
        elif fault == "row":
            text = choices.to_text([table((HERE, {WIDE: 300.0}))])
            self.path.write_text(text.replace('"m": 4096', '"m": 1e400'))
        else:
            self.path.write_bytes(b"{" if fault == "text" else b"\xff\xfe")
        with caplog.at_level(logging.WARNING):
            for n in (16, 32):
                assert select.chosen(device, at(n=n)).by == "model"
        (record,) = caplog.records
        assert record.getMessage().startswith("sp24: warning: choices of kernels ignored: /")
        assert "\n" not in record.getMessage()

    def test_a_failed_write_leaves_the_old_one(self, monkeypatch):
        old = table((HERE, {WIDE: 300.0}))
        choices.write_cache(self.path, old)

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(choices.os, "replace", fail)
        with pytest.raises(OSError, match="full"):
            choices.write_cache(self.path, table())
        assert choices.read_cache(self.path) == old
        assert len(list(self.path.parent.iterdir())) == 1

    def test_where_the_cache_lies(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert choices.cache_path("u", "f") == tmp_path / "home/.cache/sp24/choices-u-f.json"
        assert choices.read_cache(choices.cache_path("u", "f")) is None


def test_the_shipped_table_names_kernels_that_exist():
    names = {entry.name for entry in manifest.load().entries}
    assert choices.shipped()
    for shipped in choices.shipped():
        for row in shipped.measured:
            assert set(row.times) <= names, row.problem
            assert row.problem.type in row.kernel


def test_the_shipped_choice_is_near_the_fastest_on_shapes_it_was_not_made_from():
    """As cuda/README.md has it: 0.10 % in the mean, and none of thirty beyond 3 %."""
    path = ROOT / "samples/results/h200-2026-11-30-select30.json"
    (measured,) = choices.from_text(path.read_text(encoding="utf-8"), path.name)
    known = [("table", table) for table in choices.shipped() if table.gpu == measured.gpu]
    assert {row.problem for row in measured.measured}.isdisjoint(
        row.problem for _, table in known for row in table.measured
    )
    selector = Selector(132, known)
    lost = []
    for row in measured.measured:
        choice = selector.choose(row.problem)
        assert choice.by == "model, corrected by table"
        lost.append(row.times[choice.kernel.name] / row.times[row.kernel] - 1)
    assert len(lost) == 30
    assert max(lost) <= 0.03
    assert math.fsum(map(math.log1p, lost)) / len(lost) < 0.0011


class TestSuites:
    def test_the_command_knows_them_all(self):
        assert command.SUITES == SUITE_NAMES

    def test_the_thirty_are_a_seeds_and_off_the_grid(self):
        thirty = suite("select30", 24)
        assert len(set(thirty)) == 30
        assert thirty == suite("select30", 24) == select_shapes(30, 24)
        assert thirty != suite("select30", 25)
        assert not set(thirty) & set(grid_shapes())
        for shape in thirty:
            assert shape.k % 128 == 0 and shape.m % 64 == 0 and 1 <= shape.n <= 8192
        assert min(shape.n for shape in thirty) < 16 < 1024 < max(shape.n for shape in thirty)

    def test_a_drawn_shape_of_the_grid_is_left_out(self, monkeypatch):
        first, *others = select_shapes(30, 24)
        monkeypatch.setattr(problem, "grid_shapes", lambda: (first,))
        assert select_shapes(29, 24) == tuple(others)

    def test_those_to_fit_to_are_none_of_the_thirty(self, monkeypatch):
        shapes = suite("fit", 24)
        assert len(set(shapes)) == 300
        assert shapes == fit_shapes(300, 24) != fit_shapes(300, 25)
        assert not set(shapes) & {*suite("select30", 24), *grid_shapes()}
        # Also where the two seeds give the same.
        drawn = select_shapes(40, 25)
        monkeypatch.setattr(
            problem, "select_shapes", lambda count, seed: drawn[:count] if seed == 25 else drawn[:3]
        )
        assert fit_shapes(20, 24) == drawn[3:23]

    def test_those_of_few_tokens_are_in_no_other_suite(self, monkeypatch):
        shapes = suite("fit-few", 24)
        assert len(set(shapes)) == 120
        assert shapes == suite("fit-few", 24) != suite("fit-few", 25)
        for name in ("select30", "grid", "fit"):
            assert not set(shapes) & set(suite(name, 24))
        for shape in shapes:
            assert shape.m <= 8192 and shape.n <= 64 and shape.k <= 8192
        # Also where the seeds give the same.
        kept = shapes[0], shapes[5]
        monkeypatch.setattr(problem, "fit_shapes", lambda count, seed: kept)
        assert suite("fit-few", 24)[:118] == tuple(s for s in shapes if s not in kept)

    def test_the_grid_holds_the_models_shapes_once(self):
        grid = grid_shapes()
        assert set(SUITES["llm"]) <= set(grid)
        assert len(set(grid)) == len(grid)
