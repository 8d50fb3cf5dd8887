"""Measured times of kernels by GPU and problem: the table in the package, and the user's cache.

Both are JSON of one form, so that what a user's card measured can be shipped::

    {"sp24.choices": 1,
     "gpus": {"NVIDIA H200": {"fatbins": SHA256, "measured": [
        {"type": "e4m3", "out": "bf16", "order": "nm", "m": 4096, "n": 16, "k": 8192,
         "kernel": NAME, "us": 12.3, "others": {NAME: 14.5}}]}}}

``kernel`` is the fastest, ``others`` are the rest that were timed (in the package's table those
within three times of it; `gpu/correction.py` asks for them, too); ``summation`` stands in a row
whose sums are not the fast ones (see `Problem`). What a table says of a kernel holds as long as
a kernel of that name exists, so a table outlives a rebuild; the cache, which costs its user a
minute to make again, belongs to one card and one set of fatbins.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sp24cli.errors import BadInputError
from sp24cli.kernels import manifest

#: Version of the JSON document.
SCHEMA = 1

#: What reading a document that is none of ours raises.
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Problem:
    """What a kernel is chosen for: operand and output type, order of D, M×N×K, and how it is to
    sum (`manifest.SUMMATIONS`)."""

    type: str
    out: str
    order: str
    m: int
    n: int
    k: int
    summation: str = "fast"


@dataclass(frozen=True)
class Measured:
    """Microseconds of each kernel that was timed on a problem; at least one."""

    problem: Problem
    times: Mapping[str, float]

    @property
    def kernel(self) -> str:
        """The fastest, by name where several are."""
        return min(self.times, key=lambda name: (self.times[name], name))


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU, with the fatbins of that hash."""

    gpu: str
    fatbins: str
    measured: tuple[Measured, ...]

    def merged(self, newer: Iterable[Measured]) -> Table:
        """This table with ``newer`` in place of what it says of the same problems."""
        rows = {row.problem: row for row in self.measured}
        rows.update((row.problem, row) for row in newer)
        return Table(self.gpu, self.fatbins, tuple(rows.values()))


def to_text(tables: Iterable[Table]) -> str:
    """The JSON document, a line a problem so that a change of one is a small difference."""

    def row(measured: Measured) -> str:
        times = dict(sorted(measured.times.items(), key=lambda item: (item[1], item[0])))
        kernel = next(iter(times))
        us = times.pop(kernel)
        problem = dict(vars(measured.problem))
        if problem["summation"] == "fast":
            del problem["summation"]  # the usual one goes without saying
        return json.dumps({**problem, "kernel": kernel, "us": us, "others": times}, allow_nan=False)

    parts = []
    for table in tables:
        rows = ",\n  ".join(row(measured) for measured in table.measured)
        body = f"[\n  {rows}\n ]" if rows else "[]"
        head = f' {json.dumps(table.gpu)}: {{"fatbins": {json.dumps(table.fatbins)}, '
        parts.append(f'{head}"measured": {body}}}')
    gpus = ",\n".join(parts)
    return f'{{"sp24.choices": {SCHEMA},\n"gpus": {{\n{gpus}\n}}}}\n'


def from_text(text: str, where: str) -> tuple[Table, ...]:
    """The tables of a document; `BadInputError` naming ``where`` if it is none of ours."""
    try:
        document = json.loads(text)
        if document["sp24.choices"] != SCHEMA:
            raise BadInputError(f"{where}: choices of version {document['sp24.choices']!r}")
        return tuple(
            Table(str(gpu), str(found["fatbins"]), tuple(_row(row) for row in found["measured"]))
            for gpu, found in document["gpus"].items()
        )
    except _FAULTS as error:
        raise BadInputError(f"{where}: not a table of measured kernels ({error!r})") from None


def _row(raw: dict[str, Any]) -> Measured:
    times = {
        str(name): float(us) for name, us in {**raw["others"], raw["kernel"]: raw["us"]}.items()
    }
    names = (raw["type"], raw["out"], raw["order"])
    sides = (raw["m"], raw["n"], raw["k"])
    summation = raw.get("summation", "fast")
    if not all(isinstance(name, str) for name in (*names, summation)):
        raise ValueError("a type, order or summation that is no name")
    if not all(type(side) is int and 1 <= side < 1 << 31 for side in sides):
        raise ValueError("a size that is none")
    if not all(math.isfinite(us) and us > 0 for us in times.values()):
        raise ValueError("a time that is not positive")
    return Measured(Problem(*names, *sides, summation), times)


@cache
def shipped() -> tuple[Table, ...]:
    """The tables beside the fatbins; none where there is no such file."""
    path = manifest.FOLDER / "choices.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    return from_text(text, str(path))


def cache_path(uuid: str, fatbins: str) -> Path | None:
    """The user's file for one card and one set of fatbins; None where no folder is known."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is to be ignored.
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "sp24" / f"choices-{uuid[:32]}-{fatbins[:16]}.json"


def read_cache(path: Path | None) -> Table | None:
    """What ``sp24 bench --tune`` left there; None if nothing. `BadInputError` if unreadable."""
    if path is None:
        return None
    try:
        tables = from_text(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: {error}") from None
    return tables[0] if tables else None


def write_cache(path: Path, table: Table) -> None:
    """Write the file whole or not at all; `OSError` where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_text([table]))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
