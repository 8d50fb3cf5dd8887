"""What a run over a checkpoint has finished, so that the next one can go on from there.

The journal lies in the output folder from the first byte to the last: a folder that has one is
unfinished. It is only ever believed about a file whose size, times and inode are those that
were noted when it was complete, and only by a run with the same inputs and options. All else
is done again, so a journal can be lost, cut or edited without harm to the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from sp24cli import __version__
from sp24cli.checkpoint.folder import JOURNAL_NAME
from sp24cli.checkpoint.writer import TEMP_PREFIX, TEMP_SUFFIX, identity

_VERSION = 1
_COPY_BYTES = 1 << 24


def fingerprint(operation: str, options: Mapping[str, Any], inputs: list[Path]) -> str:
    """A hash of all that decides what a run writes."""
    plan = {
        "sp24": __version__,
        "operation": operation,
        "options": _canonical(options),
        "inputs": [[path.name, identity(path)] for path in inputs],
    }
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, Path):
        # A file that an operation reads besides: it counts with its content.
        return [str(value), identity(value) if value.exists() else None]
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), digest]
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: _canonical(getattr(value, f.name)) for f in fields(value)}
        return {type(value).__name__: named}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


class Journal:
    """The finished shards of the output ``folder``, each with its report of type ``report``.

    ``plan`` is the run's `fingerprint`; a journal of another plan counts as an empty one.
    """

    def __init__(self, folder: Path, plan: str, report: type[Any]) -> None:
        self.path = folder / JOURNAL_NAME
        self._plan = plan
        self._report = report
        self._shards: dict[str, dict[str, Any]] = {}

    def load(self) -> None:
        """Take over what an earlier run has noted; what makes no sense is left out."""
        try:
            table = json.loads(self.path.read_bytes())
            if table["version"] == _VERSION and table["plan"] == self._plan:
                self._shards = {str(k): dict(v) for k, v in table["shards"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._shards = {}

    def finished(self, name: str) -> Any | None:
        """The report of a shard, if the file in the folder is the one that was finished."""
        entry = self._shards.get(name, {})
        path = self.path.parent / name
        try:
            if path.is_symlink() or entry["output"] != identity(path):
                return None
            return rebuild(self._report, entry["report"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, NameError):
            return None

    def add(self, name: str, report: Any) -> None:
        """Note a shard as finished, as it lies in the folder now."""
        output = identity(self.path.parent / name)
        self._shards[name] = {"output": output, "report": asdict(report)}
        self.save()

    def save(self) -> None:
        table = {"version": _VERSION, "plan": self._plan, "shards": self._shards}
        replace_file(self.path, [json.dumps(table).encode()])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)


def rebuild(kind: Any, value: Any) -> Any:
    """The value of a type made of dataclasses, tuples and plain values, from its JSON.

    Raises:
        TypeError, ValueError, KeyError: what is there is no such value.
    """
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parameters:
            return None
        (kind,) = (each for each in parameters if each is not type(None))
        return rebuild(kind, value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        named = {f.name: rebuild(hints[f.name], value[f.name]) for f in fields(kind)}
        return kind(**named)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        if parameters[-1] is Ellipsis:
            return tuple(rebuild(parameters[0], item) for item in value)
        pairs = zip(parameters, value, strict=True)
        return tuple(rebuild(each, item) for each, item in pairs)
    if origin is dict:
        return {key: rebuild(parameters[1], item) for key, item in value.items()}
    if kind is Any or (origin is Literal and value in parameters):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write ``path`` whole or not at all; the mode follows the umask."""
    temp = path.parent / f"{TEMP_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}"
    try:
        # Not by tempfile, whose files are closed to all but their owner.
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    sync_folder(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of ``source``, links followed, whole or not at all."""
    with open(source, "rb") as file:
        replace_file(target, iter(lambda: file.read(_COPY_BYTES), b""))


def same_content(first: Path, second: Path) -> bool:
    """Whether both are regular files, links followed, of the same bytes."""
    if not (first.is_file() and second.is_file()):
        return False
    with open(first, "rb") as one, open(second, "rb") as other:
        while True:
            part = one.read(_COPY_BYTES)
            if part != other.read(_COPY_BYTES):
                return False
            if not part:
                return True


def sync_folder(folder: Path) -> None:
    """Make what was renamed and removed last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
