"""The ladder without a GPU: its list, texts and plan, a simulated run and what is shown of it."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sp24cli.gpu.ladder
from sp24cli.bench import ladder, ladderview
from sp24cli.bench.rates import Shape
from sp24cli.bench.reading import read_any
from sp24cli.bench.result import Failure
from sp24cli.bench.rungs import LADDERS, NOTES, PRODUCTION, explain
from sp24cli.cli.main import run as command
from sp24cli.errors import BadInputError, NoGpuError, VerificationError
from sp24cli.gpu import select
from sp24cli.gpu.device import Device
from sp24cli.gpu.ladder import FORMS
from sp24cli.gpu.telemetry import Sample
from sp24cli.kernels import manifest
from sp24cli.kernels.manifest import RungEntry
from sp24cli.optypes import operands
from sp24cli.verify.result import Check
from tests.cpu.benchdevice import SETTINGS, KernelPlan, Weight, libraries, simulate

ROOT = Path(__file__).parents[2]
SMALL = Shape(128, 16, 256)


def listed():
    """(ladder, output, kind, number, label, metadata) of each SP24_RUNG row of kernels.def."""
    rows = re.findall(r"^SP24_RUNG\(([^\"]*)", (ROOT / "cuda" / "kernels.def").read_text(), re.M)
    split = [[part.strip() for part in row.split(",")] for row in rows]
    return [(r[0], r[1], r[2], int(r[3]), r[4], r[9]) for r in split]


def entry(number, label, *, side=False, a_type="e4m3", **changes):
    """A rung as the manifest would describe it."""
    fields = {
        "name": f"rung_{a_type}_{label}", "fatbin": f"ladder_{a_type}", "a_type": a_type,
        "out_type": "bf16", "order": "nm", "number": number, "label": label, "side": side,
        "changed": f"what {label} changed", "source": "rows", "meta": "scalar", "full": "merged",
        "release": "after_wait", "store": "scattered", "groups": 1, "wait": 0,
        "persistent": False, "raster": False, "unroll": 1, "tile_m": 64, "tile_n": 256,
        "tile_k": 128, "consumers": 1, "cluster": 1, "cluster_ctas": 1, "stages": 2, "threads": 256,
        "smem_bytes": 76800, "box_a": (64, 64), "box_b": (128, 256), "box_meta": (16, 64),
        "k_multiple": 4, "registers": 168, "local_bytes": 0, "args": "rung", **changes,
    }  # fmt: skip
    return RungEntry(**fields)


RUNGS = (
    entry(0, "baseline"),
    entry(1, "meta_copied"),
    entry(2, "a_from_registers", side=True),
    entry(3, "pipelined"),
    entry(0, "baseline", a_type="f16"),
)
#: Microseconds of the simulated rungs; the chosen kernel takes 10.
TIMES = {"baseline": 40.0, "meta_copied": 32.0, "a_from_registers": 36.0, "pipelined": 20.0}


EXACT = Check("exact integers", True, 0.0, 0.0, 0.0)


class RungWeight:
    """As sp24cli.gpu.ladder.RungWeight, by numpy. ``faults`` spoil the output of a label."""

    faults: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, weight, packed):
        assert packed.info.layout == "row"
        self.weight = weight
        self.held = weight.device.alloc(16)

    def plan(self, entry, n, x, ldx, out, *, scale_b=None, scale_b_rows=False):
        types = operands(entry.a_type)
        chosen = KernelPlan(self.weight, n, entry.out_type, entry.order, entry.name, types)
        fault = RungWeight.faults.get(entry.label)
        device = self.weight.device

        def enqueue():
            before = Weight.fault, dict(Weight.us)
            Weight.us = {entry.name: TIMES[entry.label]}
            if fault is not None:
                Weight.fault = staticmethod(fault)
            try:
                chosen.enqueue(x, ldx, out, scale_b, scale_b_rows)
            finally:
                Weight.fault, Weight.us = staticmethod(before[0]), before[1]
            device.launched.add(entry.label)

        return SimpleNamespace(enqueue=enqueue)

    def free(self):
        self.held.free()


@pytest.fixture
def device(monkeypatch):
    made = simulate(monkeypatch)
    made.launched = set()
    monkeypatch.setattr(sp24cli.gpu.ladder, "RungWeight", RungWeight)
    monkeypatch.setattr(RungWeight, "faults", {})
    return made


def climb(device, names=(), **options):
    plan = ladder.plan_ladder("e4m3", RUNGS, names, shape=SMALL, settings=SETTINGS, workers=2)
    return ladder.run(plan, device, **options)


@pytest.fixture
def result(device):
    return climb(device)


class TestList:
    def test_numbers_count_from_the_bottom_and_every_rung_is_explained(self):
        for name in LADDERS:
            rows = [row for row in listed() if row[0] == name]
            assert [row[3] for row in rows] == list(range(len(rows)))
            assert rows[0][2] == "main" and rows[-1][2] == "main"
            labels = [row[4] for row in rows]
            assert [label for of, label in NOTES if of == name] == [*labels, PRODUCTION]
        assert {row[0] for row in listed()} == set(LADDERS)

    def test_every_way_to_metadata_has_a_form_on_the_host(self):
        header = (ROOT / "cuda" / "include" / "sp24" / "ladder_config.cuh").read_text()
        ways = re.search(r"enum class Meta \{ (.*?) \};", header)
        assert ways is not None
        assert set(ways[1].split(", ")) == set(FORMS)
        assert {row[5] for row in listed()} <= set(FORMS)

    def test_the_manifest_agrees_with_the_list_once_built(self):
        built = {(r.a_type, r.number, r.label, r.side) for r in manifest.load().rungs}
        named = {(of, number, label, kind == "side") for of, _, kind, number, label, _ in listed()}
        assert built in (named, set())
        assert all(r.local_bytes == 0 for r in manifest.load().rungs)


class TestExplain:
    def test_by_label_number_and_kernel(self):
        text = explain(RUNGS, "meta_copied")
        assert text is not None
        assert text.startswith("e4m3 rung 1, meta_copied: what meta_copied changed\n  The producer")
        assert text.endswith("759 TFLOPS, +13.0% over the step before.")
        assert explain(RUNGS, "rung_e4m3_meta_copied") == explain(RUNGS, "1", "e4m3") == text
        assert all(len(line) <= 96 for line in text.splitlines()[1:])

    def test_a_name_of_both_ladders_tells_of_both(self):
        text = explain(RUNGS, "baseline")
        assert text is not None
        assert [part.split()[0] for part in text.split("\n\n")] == ["e4m3", "f16"]
        assert explain(RUNGS, "baseline", "f16") == text.split("\n\n")[1]

    def test_the_last_rung_is_the_chosen_kernel(self):
        text = explain(RUNGS, "4", "e4m3")
        assert text is not None and text.startswith("e4m3 rung 4, sp24: the kernel that sp24")
        assert explain(RUNGS, "nothing") is None

    @pytest.mark.parametrize("of", LADDERS)
    def test_a_rung_that_was_slower_than_the_one_before_says_so(self, of):
        """And figures in the notes are those of the samples, to what two cards may differ by."""
        (path,) = (ROOT / "samples" / "results").glob(f"h200-*-ladder-{of}.json")
        result = read_any(str(path))
        for rung in result.rows:
            why, gain = (
                NOTES[of, rung.label].why,
                ladderview.gain(result, rung, "burst", base=False),
            )
            told = re.search(r"(\d+) TFLOPS after (\d+)", why)
            if not rung.side and gain is not None and gain < 0.98:
                assert told is not None and "slower on an H200" in why, rung.label
            if told is not None:
                measured = [r.row.burst.tflops for r in (rung, result.before(rung))]
                assert list(map(float, told.groups())) == pytest.approx(measured, rel=0.05)

    def test_where_the_log_won_by_a_race_it_is_said(self):
        for label in ("early_release", "pipelined", "warp_release"):
            assert re.search(r"race|before it committed", NOTES["e4m3", label].why), label


class TestPlan:
    def test_all_rungs_of_one_ladder_by_number(self):
        plan = ladder.plan_ladder("e4m3", RUNGS[::-1], ())
        assert [r.label for r in plan.rungs] == list(TIMES)
        assert (plan.height, plan.case.shape) == (4, Shape(4096, 8192, 8192))
        assert (plan.case.type, plan.case.out) == ("e4m3", "bf16")

    def test_some_by_label_number_or_kernel(self):
        plan = ladder.plan_ladder("e4m3", RUNGS, ("3", "rung_e4m3_meta_copied", "sp24", "4"))
        assert [r.label for r in plan.rungs] == ["meta_copied", "pipelined"]

    def test_an_unknown_one_is_said_with_those_there_are(self):
        with pytest.raises(ValueError, match=r"e4m3 has no rung 'five' \(it has baseline, meta_"):
            ladder.plan_ladder("e4m3", RUNGS, ("five",))


class TestRun:
    def test_every_rung_is_verified_and_timed(self, device, result):
        assert [(r.number, r.label, r.side) for r in result.rows] == [
            (0, "baseline", False), (1, "meta_copied", False), (2, "a_from_registers", True),
            (3, "pipelined", False), (4, "sp24", False),
        ]  # fmt: skip
        assert [r.row.burst.us for r in result.rows] == pytest.approx([40, 32, 36, 20, 10])
        assert all(r.row.check.passed for r in result.rows)
        assert result.rows[1].row.role.detail == "rung_e4m3_meta_copied"
        assert (result.rows[1].log_tflops, result.rows[1].log_step) == (759.0, 0.13)
        assert not result.failures
        assert not device.buffers, "device memory leaked"

    def test_the_reference_and_what_is_not_read_are_said(self, device, monkeypatch):
        libraries(monkeypatch, dense=20.0)
        result = climb(device, telemetry=SimpleNamespace(sample=lambda: Sample()))
        assert result.environment.peers["cuBLASLt"] == "13 (reference alone)"
        assert "not read: " in ladderview.table(result)

    def test_gains_are_over_the_main_rung_before_and_over_the_lowest(self, result):
        by_label = {r.label: r for r in result.rows}

        def gains(label):
            return tuple(
                ladderview.gain(result, by_label[label], "burst", base=base)
                for base in (False, True)
            )

        assert gains("baseline") == (None, None)
        assert gains("a_from_registers") == pytest.approx((32 / 36, 40 / 36))
        assert gains("pipelined") == pytest.approx((32 / 20, 2))  # not over the side rung
        assert gains("sp24") == pytest.approx((2, 4))

    def test_cycles_of_a_step(self, result):
        figure = result.rows[0].row.burst
        assert result.cycles(replace(figure, sm_mhz=None)) is None
        assert figure.sm_mhz == pytest.approx(1700.0, rel=1e-3)  # as the simulated SMs count
        # A sixteenth of the columns of a step, twice its K.
        steps = 128 * 16 * 256 / (128 * 256 * 128)
        want = 40.0 * 1500.0 * 132 / steps
        assert result.cycles(replace(figure, sm_mhz=1500.0)) == pytest.approx(want)

    def test_a_wrong_element_keeps_a_rung_from_being_timed(self, device):
        def spoil(got, n):
            got[77, 5] = 3 * got[77, 5] + 1
            return got

        RungWeight.faults["meta_copied"] = spoil
        result = climb(device)
        assert [r.label for r in result.rows] == [
            "baseline", "a_from_registers", "pipelined", "sp24"
        ]  # fmt: skip
        (failure,) = result.failures
        assert re.search(r"rung meta_copied: .*row 77, column 5", failure.message)
        assert failure.exit_code == 3
        assert "no figures: rung meta_copied" in ladderview.table(result)

    def test_without_a_float64_product_the_chosen_kernel_stands_in(self, device, monkeypatch):
        monkeypatch.setattr("sp24cli.bench.judge.CPU_FLOPS", 0.0)
        monkeypatch.setattr("sp24cli.bench.judge.Judge.exact", lambda *_: EXACT)
        result = climb(device)
        assert (len(result.rows), result.failures) == (5, ())
        assert result.reference == "exact integers by Freivalds' test"

    def test_a_last_bit_that_differs_is_seen(self, device):
        def nudge(got, n):
            bits = got.view(np.uint16)
            bits[3, 3] ^= 1
            return got

        RungWeight.faults["pipelined"] = nudge
        (failure,) = climb(device).failures
        assert "the same bits in every copy, and as the others" in failure.message

    @pytest.mark.parametrize(
        ("split", "many_rows", "own"), [(1, 3072, False), (2, 3072, True), (1, 8, True)]
    )
    def test_a_chosen_kernel_that_sums_in_its_own_order(
        self, device, monkeypatch, split, many_rows, own
    ):
        """It splits K, or begins elsewhere along it: with few tokens, and many rows."""
        monkeypatch.setattr(Weight, "split", split)
        monkeypatch.setattr(select, "MANY_ROWS", many_rows)

        def nudge(got, n):
            got.view(np.uint16)[3, 3] ^= 1
            return got

        monkeypatch.setattr(Weight, "fault", staticmethod(nudge))
        RungWeight.faults |= dict.fromkeys(TIMES, lambda got, n: got)
        result = climb(device)
        assert len(result.failures) == (0 if own else 4)
        assert result.alike == (not own)
        assert ("with the bits of the last" in ladderview.table(result)) == (not own)
        assert ("with one another's bits; the last sums" in ladderview.table(result)) == own
        # Among themselves the rungs still agree, or it is a fault.
        RungWeight.faults["pipelined"] = nudge
        assert len(climb(device).failures) == (1 if own else 3)

    def test_a_rung_that_goes_wrong_while_it_is_timed_is_dropped(self, device):
        def late(got, n):
            if device.time_us > 2000.0:
                got.view(np.uint16)[3, 3] ^= 1
            return got

        RungWeight.faults["meta_copied"] = late
        result = climb(device)
        assert [r.label for r in result.rows] == [
            "baseline", "a_from_registers", "pipelined", "sp24"
        ]  # fmt: skip
        assert [r.row.burst.us for r in result.rows] == pytest.approx([40, 36, 20, 10])
        (failure,) = result.failures
        assert failure.message.startswith("rung meta_copied: rung_e4m3_meta_copied at")
        assert "same bits after timing" in failure.message
        assert failure.exit_code == 3
        assert not device.buffers

    def test_a_chosen_kernel_that_goes_wrong_is_an_error(self, device, monkeypatch):
        def late(got, n):
            if device.time_us > 2000.0:
                got.view(np.uint16)[3, 3] ^= 1
            return got

        monkeypatch.setattr(Weight, "fault", staticmethod(late))
        RungWeight.faults |= dict.fromkeys(TIMES, lambda got, n: got)
        with pytest.raises(VerificationError, match=r"kernel_of_choice.* same bits after timing"):
            climb(device)

    def test_an_output_that_is_not_written_is_seen(self, device, monkeypatch):
        idle = lambda self, *rest, **more: SimpleNamespace(enqueue=lambda: None)  # noqa: E731
        monkeypatch.setattr(RungWeight, "plan", idle)
        result = climb(device)
        assert len(result.failures) == 4
        assert [r.label for r in result.rows] == ["sp24"]

    def test_only_some(self, device):
        result = climb(device, ("pipelined",))
        assert [r.label for r in result.rows] == ["pipelined", "sp24"]
        assert result.rows[1].number == 4
        assert device.launched == {"pipelined"}

    def test_it_tells_how_far_it_is(self, device):
        said, done = [], []
        climb(device, progress=said.append, finished=done.append)
        assert "verifying rung 2, a_from_registers" in said
        assert "timing, run 10 of 10" in said
        assert done[0] == "rung 0, baseline: right in every element"


class TestShown:
    def test_the_table(self, result):
        text = ladderview.table(result)
        lines = {line.split()[0]: line for line in text.splitlines() if re.match(r" \d", line)}
        assert list(lines) == ["0", "1", "2+a_from_registers", "3", "4"]
        assert re.match(r" 0 baseline +\d+\.\d+ +0\.\d+ +671 +\d+ +\d+ +\d+% ", lines["0"])
        assert "MHz and cycles are those that the SMs counted" in text
        assert re.search(r"\+25\.0% +x1\.25 .*\+25\.0% +x1\.25 +759 +\+13\.0% ", lines["1"])
        assert lines["4"].endswith("launches overlap, two threads copy")
        assert ladderview.LEGEND in text
        assert "every rung verified in every element (float64 product by numpy)" in text

    def test_not_every_rung_is_verified_where_some_failed(self, result):
        text = ladderview.table(replace(result, failures=(Failure(SMALL, "rung x: fault", 3),)))
        assert "every rung" not in text
        assert "rungs with figures verified in every element (float64 product by numpy)" in text

    @pytest.mark.parametrize(
        ("numbers", "shown"),
        [((0, 1, 2, 4), "0-2, 4"), ((1, 3), "1, 3"), ((4,), "4"), ((2, 3), "2-3"), ((), None)],
    )
    def test_what_held_rungs_back_is_one_line(self, result, numbers, shown):
        def held(rung):
            if rung.number not in numbers:
                return rung
            # In either figure.
            figure = "burst" if rung.number % 2 else "sustained"
            changed = replace(getattr(rung.row, figure), throttle=("power cap",))
            return replace(rung, row=replace(rung.row, **{figure: changed}))

        changed = replace(result, rows=tuple(map(held, result.rows)))
        found = [line for line in ladderview.doubts(changed) if "throttled" in line]
        assert found == ([] if shown is None else [f"throttled (power cap): rungs {shown}"])
        assert all(line in ladderview.table(changed) for line in found)

    def test_csv_and_markdown(self, result):
        rows = list(csv.DictReader(io.StringIO(ladderview.comma_separated(result))))
        assert len(rows) == 10
        assert rows[2]["rung"] == "meta_copied" and rows[2]["figure"] == "burst"
        assert float(rows[2]["us"]) == pytest.approx(32.0)
        assert rows[4]["side"] == "True"
        text = ladderview.markdown(result)
        assert text.startswith("# sp24 bench --ladder e4m3\n")
        widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| ")}
        assert widths == {len(ladderview.HEAD) - 1}

    def test_the_picture_names_every_rung_and_both_climbs(self, result):
        found = re.findall(r"<!-- (.*?) -->", ladderview.picture(result, "svg").decode())
        for text in ("0 baseline", "2+ a_from_registers", "4 sp24", "burst", "sustained",
                     "sp24, burst", "sp24, sustained", "the log, H800 PCIe"):  # fmt: skip
            assert text in found, text
        assert ladderview.picture(result, "png").startswith(b"\x89PNG")
        assert ladderview.picture(result, "svg") == ladderview.picture(result, "svg")

    def test_the_page_is_whole(self, result):
        page = ladderview.page(result)
        assert page.startswith("<!DOCTYPE html>") and page.endswith("</body></html>\n")
        assert page.count("<table>") == 1 and "<svg" in page
        assert page.count("<tr") == 1 + len(result.rows)

    def test_json_goes_both_ways(self, result, tmp_path):
        path = tmp_path / "ladder.json"
        path.write_text(json.dumps(result.to_json(), allow_nan=False))
        assert read_any(str(path)) == result

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sp24.ladder": 9}, "version 9"),
            ({"rows": []}, "with 0 rungs"),
            ({"type": "int4"}, "a ladder of int4"),
            ({"slots": "two"}, 'slots is "two", not of type int'),
        ],
    )
    def test_a_document_that_is_not_one(self, result, tmp_path, change, message):
        path = tmp_path / "ladder.json"
        path.write_text(json.dumps({**result.to_json(), **change}))
        with pytest.raises(BadInputError, match=message):
            read_any(str(path))


class TestCommand:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch):
        def refuse(ordinal=0):
            raise NoGpuError("no usable GPU: the NVIDIA driver is not installed")

        monkeypatch.setattr(Device, "open", refuse)
        loaded = replace(manifest.load(), rungs=RUNGS)
        monkeypatch.setattr(manifest, "load", lambda: loaded)

    def test_explain_needs_no_gpu(self, capsys):
        assert command(["bench", "--ladder", "e4m3", "--explain", "pipelined"]) == 0
        assert capsys.readouterr().out == f"{explain(RUNGS, 'pipelined', 'e4m3')}\n"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--explain", "x"], "no rung is called 'x': there are e4m3: baseline, "),
            (["--explain", "1", "--rounds", "2"], "--explain does not go with --rounds"),
            (["--rung", "baseline"], "--rung is for --ladder"),
            (["--ladder", "e4m3", "--rung", "x"], "no rung 'x'"),
            (["--ladder", "e4m3", "--suite", "llm"], "--ladder does not go with --suite"),
            (["--ladder", "e4m3", "--tune"], "--ladder does not go with --tune"),
            (["--ladder", "bf16"], "bf16"),
            (["--ladder", "f16", "--shape", "4x4x4", "--shape", "8x8x8"], "one --shape"),
        ],
    )
    def test_usage_errors_come_before_the_gpu(self, capsys, arguments, message):
        assert command(["bench", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1

    def test_without_a_gpu_it_is_one_line_and_exit_5(self, capsys):
        assert command(["bench", "--ladder", "f16", "--rung", "0", "--shape", "64x64x64"]) == 5
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_run_is_shown_and_written_and_a_wrong_rung_is_exit_3(
        self, monkeypatch, capsys, tmp_path, device
    ):
        monkeypatch.setattr(Device, "open", lambda: device)
        monkeypatch.setattr("sp24cli.gpu.telemetry.Telemetry", lambda device: None)
        monkeypatch.setattr("sp24cli.bench.statistics.Settings", lambda **_: SETTINGS)
        RungWeight.faults["pipelined"] = lambda got, n: got + 1
        files = [str(tmp_path / f"ladder.{kind}") for kind in ("json", "csv", "md", "svg")]
        options = ["--json", files[0], "--csv", files[1], "--md", files[2], "--plot", files[3]]
        assert command(["bench", "--ladder", "e4m3", "--shape", "128x16x256", *options]) == 3
        captured = capsys.readouterr()
        assert " 1 meta_copied" in captured.out
        assert captured.err.splitlines()[-1].startswith("sp24: error: rung pipelined: rung_e4m3_")
        assert command(["bench", "--from", files[0], "--plot", str(tmp_path / "x.html")]) == 0
        assert capsys.readouterr().out == captured.out
        assert all(Path(file).stat().st_size for file in files)

    def test_a_baseline_is_of_the_bench(self, capsys, tmp_path, result):
        path = tmp_path / "ladder.json"
        path.write_text(json.dumps(result.to_json()))
        assert command(["bench", "--from", str(path), "--baseline", str(path)]) == 4
        assert "not a result of sp24 bench --json" in capsys.readouterr().err
