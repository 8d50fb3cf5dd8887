"""A `BenchResult` or a `LadderResult` from the JSON that an earlier run wrote."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from sp24cli.bench.check import OUT_ROUNDING
from sp24cli.bench.ladder import SCHEMA as LADDER_SCHEMA
from sp24cli.bench.ladder import LadderResult
from sp24cli.bench.rates import Shape
from sp24cli.bench.result import SCHEMA, BenchResult, Environment, Row
from sp24cli.errors import BadInputError
from sp24cli.optypes import OPERANDS

#: What no number of a result is beyond, whatever its unit, nor a time or a rate below: ratios and
#: products of a few of them are floats.
_LEAST, _MOST = 1e-3, 1e15


def read_result(path: str) -> BenchResult:
    """The result in a file of ``sp24 bench --json``; `BadInputError` with the place of a fault.

    Fields that were added to the document since have their defaults, unknown ones are ignored.
    """
    result = _read(path, "sp24.bench", SCHEMA, BenchResult)
    assert isinstance(result, BenchResult)
    found = _fault(result)
    if found is not None:
        raise BadInputError(f"{path}: {found}")
    return result


def read_any(path: str) -> BenchResult | LadderResult:
    """The same, or the result of ``sp24 bench --ladder --json``."""
    if "sp24.ladder" not in _document(path):
        return read_result(path)
    result = _read(path, "sp24.ladder", LADDER_SCHEMA, LadderResult)
    assert isinstance(result, LadderResult)
    found = _ladder_fault(result)
    if found is not None:
        raise BadInputError(f"{path}: {found}")
    return result


def _document(path: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not JSON ({error})") from None
    return document if isinstance(document, dict) else {}


def _read(path: str, key: str, schema: int, kind: type[Any]) -> Any:
    document = _document(path)
    version = document.get(key)
    if version is None and "sp24.choices" in document:
        raise BadInputError(f"{path}: the times of --tune, which --from does not show")
    if version is None:
        raise BadInputError(f"{path}: not a result of sp24 bench --json")
    if version != schema:
        raise BadInputError(f"{path}: a result of version {version!r}, known is {schema}")
    try:
        return _value(document, kind, "")
    except _FaultError as fault:
        raise BadInputError(f"{path}: {fault}") from None


def _fault(result: BenchResult) -> str | None:
    """What reports and comparisons rely on and types do not say."""
    for i, case in enumerate(result.cases):
        if case.type not in OPERANDS or case.out not in OUT_ROUNDING:
            return f"cases[{i}] multiplies {case.type} into {case.out}"
        if not case.checks or case.best("sp24", "burst") is None:
            return f"cases[{i}] has no verified figures of sp24"
        found = _shape_fault(case.shape) or _rows_fault(case.rows)
        if found is not None:
            return f"cases[{i}]{found}"
    return _environment_fault(result.environment)


def _ladder_fault(result: LadderResult) -> str | None:
    """The same of a ladder."""
    if not result.rows or result.type not in OPERANDS:
        return f"a ladder of {result.type} with {len(result.rows)} rungs"
    found = _shape_fault(result.shape)
    if found is not None:
        return found.lstrip(".")
    found = _rows_fault([rung.row for rung in result.rows])
    return f"the ladder{found}" if found else _environment_fault(result.environment)


def _shape_fault(shape: Shape) -> str | None:
    sides = (shape.m, shape.n, shape.k)
    return None if 1 <= min(sides) <= max(sides) < _MOST else f".shape is {shape}"


def _rows_fault(rows: Sequence[Row]) -> str | None:
    for row in rows:
        for figure in (row.burst, row.sustained):
            if not _LEAST < figure.us < _MOST:
                return " has a time that no product takes"
            for name, value in vars(figure).items():
                if isinstance(value, float) and not abs(value) < _MOST:
                    return f" has {name} {value}"
    return None


def _environment_fault(environment: Environment) -> str | None:
    rates = {
        "sm_count": environment.sm_count,
        "clock_mhz_max": environment.clock_mhz_max,
        "copy_tbps": environment.copy_tbps,
    }
    for i, alone in enumerate(environment.wgmma):
        for name in ("burst_tflops", "sustained_tflops"):
            rates[f"wgmma[{i}].{name}"] = getattr(alone, name)
    for name, rate in rates.items():
        if rate is not None and not _LEAST < rate < _MOST:
            return f"environment.{name} is {rate}"
    return None


class _FaultError(Exception):
    """A value that does not fit, with its place in the document."""


def _value(raw: Any, kind: Any, where: str) -> Any:
    """``raw`` as an instance of the type ``kind``, which is one that results are made of."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if raw is None:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _value(raw, kind, where)
    if dataclasses.is_dataclass(kind):
        return _record(raw, kind, where)
    if origin is tuple:
        return _sequence(raw, arguments, where)
    if origin is dict:
        _need(isinstance(raw, dict), where, "an object", raw)
        return {
            _value(key, str, where): _value(item, arguments[1], f"{where}.{key}")
            for key, item in raw.items()
        }
    if kind is float:
        if raw is None:  # how JSON holds what is not finite
            return math.inf
        _need(isinstance(raw, (int, float)) and not isinstance(raw, bool), where, "a number", raw)
        try:
            number = float(raw)
        except OverflowError:  # JSON has integers that no float holds
            number = math.nan
        _need(not math.isnan(number), where, "a number that a float holds", raw)
        return number
    _need(type(raw) is kind, where, f"of type {kind.__name__}", raw)
    if kind is int:
        _need(abs(raw) < 1 << 63, where, "of 64 bits", raw)
    if kind is str:
        # Escapes of JSON can stand for halves of a character, which no file holds.
        _need(not any("\ud800" <= c <= "\udfff" for c in raw), where, "text", raw)
    return raw


def _record(raw: Any, kind: Any, where: str) -> Any:
    _need(isinstance(raw, dict), where, "an object", raw)
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        place = f"{where}.{field.name}".lstrip(".")
        if field.name in raw:
            values[field.name] = _value(raw[field.name], hints[field.name], place)
        elif field.default is dataclasses.MISSING:
            raise _FaultError(f"{place} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise _FaultError(f"{where}: {error}") from None


def _sequence(raw: Any, arguments: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _need(isinstance(raw, list), where, "a list", raw)
    if arguments[1:] == (...,):
        kinds = arguments[:1] * len(raw)
    else:
        _need(len(raw) == len(arguments), where, f"a list of {len(arguments)}", raw)
        kinds = arguments
    return tuple(
        _value(item, kind, f"{where}[{i}]")
        for i, (item, kind) in enumerate(zip(raw, kinds, strict=True))
    )


def _need(right: bool, where: str, what: str, raw: Any) -> None:
    if not right:
        shown = json.dumps(raw)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise _FaultError(f"{where or 'the document'} is {shown}, not {what}")
