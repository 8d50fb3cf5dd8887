"""Reading a result back."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from sp24cli.bench.ladder import LadderResult
from sp24cli.bench.ladderview import markdown as ladder
from sp24cli.bench.reading import read_any, read_result
from sp24cli.bench.report import markdown
from sp24cli.bench.result import WgmmaCeiling
from sp24cli.errors import BadInputError
from tests.cpu.benchresult import two_cases
from tests.cpu.console import ROOT

ALONE = (WgmmaCeiling("e4m3", "ss", 3000.0, 2500.0, 1500.0, None),)
#: The results of the samples. What --tune has measured is a table of choices, and no result; what
#: the hardware has counted neither.
STORED = sorted(
    path
    for path in (ROOT / "samples/results").glob("*.json")
    if not {"sp24.choices", "sp24.counters"} & json.loads(path.read_text(encoding="utf-8")).keys()
)
RESULT = two_cases()
RESULT = replace(RESULT, environment=replace(RESULT.environment, wgmma=ALONE))


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "r.json"

    def read(document):
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return read_result(str(path))

    return read


def test_what_was_written_is_read(read):
    assert read(RESULT.to_json()) == RESULT


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.name)
def test_the_results_of_the_samples_are_read(path):
    found = read_any(str(path))
    assert found.rows if isinstance(found, LadderResult) else found.cases
    assert {failure.exit_code for failure in found.failures} <= {130}  # cut short
    assert found.environment.gpu.startswith("NVIDIA ")


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.name)
def test_the_tables_of_the_samples_are_those_of_their_results(path):
    found = read_any(str(path))
    text = ladder(found) if isinstance(found, LadderResult) else markdown(found)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == text


def test_there_are_results_to_read():
    assert len(STORED) > 3


def test_older_documents_lack_what_was_added_since(read):
    document = RESULT.to_json()
    del document["environment"]["copy_tbps"], document["environment"]["wgmma"]
    del document["environment"]["unread"], document["environment"]["uuid"]
    for case in document["cases"]:
        del case["chosen_by"], case["scale"], case["accumulate"]
    found = read(document)
    assert found.environment.copy_tbps is None
    assert found.environment.wgmma == ()
    assert found.cases[0].chosen_by is None
    assert found.cases[0].name == RESULT.cases[0].name
    was = RESULT.cases[0]
    added = {name: getattr(was, name) for name in ("chosen_by", "scale", "accumulate")}
    assert replace(found.cases[0], **added) == was


def test_unknown_fields_are_ignored(read):
    document = RESULT.to_json()
    document["environment"]["mood"] = "good"
    assert read(document) == RESULT


def test_an_infinite_error_is_null_in_between(read):
    check = replace(RESULT.cases[0].rows[1].check, max_error=math.inf, passed=False)
    rows = (RESULT.cases[0].rows[0], replace(RESULT.cases[0].rows[1], check=check))
    result = replace(RESULT, cases=(replace(RESULT.cases[0], rows=rows),))
    assert read(result.to_json()) == result


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[" * 100000, "not JSON"), ("[]", "not a result"), ("{}", "not a result"),
     ('{"sp24.bench": 2}', "version 2"), ('{"sp24.bench": 1}', "environment is missing")],
)  # fmt: skip
def test_what_is_no_result_is_refused(read, text, message):
    with pytest.raises(BadInputError, match=message):
        read(text)


def test_what_tune_has_written_is_known_by_name():
    path = str(ROOT / "samples/results/h200-2026-11-30-select30.json")
    for reader in (read_any, read_result):
        with pytest.raises(BadInputError, match="the times of --tune, which --from does not show"):
            reader(path)


def _set(*keys):
    *path, last, value = keys

    def change(document):
        for key in path:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("cases", 1, "shape", "n", "16"), r'cases\[1\]\.shape\.n is "16", not of type int'),
        (_set("cases", 0, "shape", "n", True), r"cases\[0\]\.shape\.n is true"),
        (_set("cases", 0, "rows", 1, "burst", "us", "x"), r"rows\[1\]\.burst\.us .* a number"),
        (_set("cases", 0, "rows", 1, "burst", "us", True), r"rows\[1\]\.burst\.us is true"),
        (_set("cases", 0, "rows", 1, "burst", "us", 0), r"cases\[0\] has a time"),
        (_set("cases", 0, "rows", 1, "burst", "us", None), r"cases\[0\] has a time"),
        (_set("cases", 0, "rows", []), r"cases\[0\] has no verified figures"),
        (_set("cases", 0, "checks", []), r"cases\[0\] has no verified figures"),
        (_set("cases", 0, "type", "e2m1"), "e2m1 into bf16"),
        (_set("cases", 0, "shape", "k", 0), "4096x8192x0"),
        (_set("cases", 0, "skipped", [["a"]]), r"skipped\[0\] is \[\"a\"\], not a list of 2"),
        (_set("environment", "peers", []), "environment.peers .* an object"),
        (_set("settings", "rounds", 0), "settings: at least one round"),
        (_set("notes", "none"), "notes .* a list"),
        (_set("notes", ["\ud800"]), r"notes\[0\] is .*, not text"),
        (_set("environment", "peers", {"\ud800": "9"}), "environment.peers is .*, not text"),
        (_set("environment", "sm_count", 0), "environment.sm_count is 0"),
        (_set("environment", "sm_count", 10**30), "environment.sm_count is 1000.* of 64 bits"),
        (_set("environment", "clock_mhz_max", None), "environment.clock_mhz_max is inf"),
        (_set("environment", "clock_mhz_max", 10**400), "clock_mhz_max is 1000.* a float holds"),
        (_set("environment", "clock_mhz_max", math.nan), "clock_mhz_max is NaN.* a float holds"),
        (_set("environment", "clock_mhz_max", 2e-4), "environment.clock_mhz_max is 0.0002"),
        (_set("environment", "copy_tbps", 1e-320), "environment.copy_tbps is 1e-320"),
        (_set("environment", "wgmma", 0, "burst_tflops", None), r"wgmma\[0\].burst_tflops is inf"),
        (_set("cases", 0, "shape", "m", 1 << 62), r"cases\[0\]\.shape is 4611686018427387904x"),
        (_set("cases", 0, "rows", 1, "burst", "us", 1e308), r"cases\[0\] has a time"),
        (_set("cases", 1, "rows", 0, "sustained", "tflops", None), r"cases\[1\] has tflops inf"),
        (_set("cases", 1, "rows", 0, "burst", "sm_mhz", 1e300), r"cases\[1\] has sm_mhz 1e\+300"),
    ],
)
def test_a_fault_is_named_with_its_place(read, change, message):
    document = RESULT.to_json()
    change(document)
    with pytest.raises(BadInputError, match=message) as fault:
        read(document)
    assert "r.json: " in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("rows", []), "a ladder of e4m3 with 0 rungs"),
        (_set("type", "e2m1"), "a ladder of e2m1 with"),
        (_set("shape", "n", 0), "shape is 4096x0x8192"),
        (_set("rows", 2, "row", "burst", "us", 0.0), "the ladder has a time"),
        (_set("rows", 2, "row", "burst", "tflops", None), "the ladder has tflops inf"),
        (_set("environment", "sm_count", 10**30), "environment.sm_count is 1000.* of 64 bits"),
        (_set("environment", "clock_mhz_max", 0), "environment.clock_mhz_max is 0.0"),
    ],
)
def test_a_fault_of_a_ladder_is_named(tmp_path, change, message):
    document = json.loads((ROOT / "samples/results/h200-2026-12-01-ladder-e4m3.json").read_text())
    change(document)
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=message) as fault:
        read_any(str(path))
    assert str(fault.value).startswith(f"{path}: ")


def test_a_missing_file_is_one_line():
    with pytest.raises(BadInputError, match=r"^no/such\.json: No such file or directory$"):
        read_result("no/such.json")
