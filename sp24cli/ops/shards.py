"""How an operation on one file runs over a whole checkpoint, shard by shard.

All inputs are checked first, then each shard appears in the new folder when it is complete,
then the other files are carried over and the index is written. Until then a journal in the
folder says what is done, and a run with ``resume`` goes on from there. What has no journal is never
replaced unasked: where it may be the finished output, it is made again beside it and compared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from sp24cli.checkpoint import index, locking
from sp24cli.checkpoint.folder import (
    JOURNAL_NAME,
    OTHER_WEIGHTS,
    Checkpoint,
    LeftOut,
    Shard,
    check_output_folder,
    is_checkpoint,
    is_leftover,
    open_checkpoint,
)
from sp24cli.checkpoint.header import Header, TensorEntry, label, load_object, parse, quote
from sp24cli.checkpoint.jsontext import dump
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.writer import TEMP_PREFIX, TEMP_SUFFIX
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.formats.dequantized import open_dense
from sp24cli.ops.choose import Choice
from sp24cli.ops.engine import Engine
from sp24cli.ops.journal import (
    Journal,
    copy_file,
    fingerprint,
    replace_file,
    same_content,
    sync_folder,
)
from sp24cli.ops.plan import (
    ANNOUNCE,
    Announced,
    make_plan,
    not_finite,
    stored_order,
    tensor_label,
)
from sp24cli.ops.report import document
from sp24cli.ops.stream import Progress, default_workers, map_bands, prune_ranges
from sp24cli.pruning import permute
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, find_crowded, pattern_of, violation
from sp24cli.sparsity import find_nonfinite

CONFIG_NAME = "config.json"
#: What a finished output is compared with, a shard at a time.
_AGAIN_NAME = f"{TEMP_PREFIX}again{TEMP_SUFFIX}"


class _Report(Protocol):
    """What the reports of all operations have: see `sp24cli.ops`."""

    @property
    def output_bytes(self) -> int: ...
    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Report)


@dataclass(frozen=True)
class ShardDone:
    """One shard; ``resumed`` if an earlier run had finished it."""

    name: str
    source_bytes: int
    output_bytes: int
    resumed: bool


@dataclass(frozen=True)
class FolderReport:
    """What happened to a checkpoint around its tensors.

    ``index`` is the name of the new index, None where one shard needs none. ``disk_bytes`` is
    the room that the run needed (in a dry run: would need) on the disk.
    """

    shards: tuple[ShardDone, ...]
    index: str | None
    carried: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    disk_bytes: int

    @property
    def resumed(self) -> int:
        return sum(shard.resumed for shard in self.shards)


@dataclass(frozen=True)
class Done(Generic[R]):
    """The report of an operation on all tensors, and for a checkpoint that on its files."""

    report: R
    folder: FolderReport | None

    def to_json(self) -> dict[str, Any]:
        result = self.report.to_json()
        if self.folder is not None:
            result["checkpoint"] = document(self.folder)
        return result


@dataclass(frozen=True)
class Operation(Generic[R]):
    """An operation on one file and what a checkpoint needs to know of it.

    ``find_nonfinite`` and ``find_violation`` say what in the selected weights is an error, and
    ``engine`` may help to find it; ``rehearse`` finds it by a dry run. ``config`` makes the new
    config.json, ``beside`` are the files that are read as well.
    """

    name: str
    function: Callable[..., R]
    report: type[R]
    options: Mapping[str, Any]
    workers: int | None
    find_nonfinite: bool = False
    find_violation: bool = False
    rehearse: bool = False
    engine: Engine | None = None
    config: Callable[[dict[str, Any], R], dict[str, Any]] | None = None
    beside: tuple[Path, ...] = ()

    def run(
        self,
        source: Path,
        output: Path | None,
        *,
        overwrite: bool,
        progress: Progress | None,
    ) -> R:
        return self.function(
            source,
            output,
            workers=self.workers,
            overwrite=overwrite,
            progress=progress,
            **self.options,
        )

    def announce(self, source: Path) -> Announced:
        """What ``source`` becomes."""
        try:
            self.run(source, ANNOUNCE, overwrite=True, progress=None)
        except Announced as announced:
            return announced
        raise AssertionError("an operation without a sink")


@dataclass(frozen=True)
class _Plan(Generic[R]):
    """What a run will write: the header of every new shard, the index, the config.

    ``scratch_bytes`` by shard is the room that is needed while it is made.
    """

    operation: Operation[R]
    checkpoint: Checkpoint
    headers: Mapping[str, Header]
    scratch_bytes: Mapping[str, int]
    index: bytes | None
    config: dict[str, Any] | None

    @property
    def names(self) -> set[str]:
        names = {shard.name for shard in self.checkpoint.shards}
        return names | {other.parts[0] for other in self.checkpoint.others} | {self.index_name}

    @property
    def index_name(self) -> str:
        return self.checkpoint.index_name

    def run(self, shard: Shard, output: Path | None, progress: Progress | None) -> R:
        return self.operation.run(shard.path, output, overwrite=True, progress=progress)

    @property
    def copied(self) -> tuple[Path, ...]:
        """The other files that are carried over as they are."""
        others = self.checkpoint.others
        return others if self.config is None else tuple(o for o in others if str(o) != CONFIG_NAME)

    def new_config(self, report: R) -> bytes | None:
        """The content of the new config.json, None where there is none but a copy."""
        if self.config is None:
            return None
        assert self.operation.config is not None
        return (dump(self.operation.config(self.config, report)) + "\n").encode()

    def bytes_needed(self, shards: Sequence[Shard]) -> int:
        others = sum((self.checkpoint.folder / o).stat().st_size for o in self.checkpoint.others)
        return (
            sum(self.headers[shard.name].file_bytes for shard in shards)
            + others
            + len(self.index or b"")
            + max((self.scratch_bytes[shard.name] for shard in shards), default=0)
        )


def run(
    operation: Operation[R],
    source: Path,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> Done[R]:
    """The operation on a file, or on a checkpoint as this module says; ``output`` None is a
    dry run."""
    if not is_checkpoint(source):
        report = operation.run(source, output, overwrite=overwrite, progress=progress)
        return Done(report, None)
    checkpoint = open_checkpoint(source)
    if output is not None:
        check_output_folder(output, checkpoint, operation.beside)
    plan = _make_plan(operation, checkpoint)
    if output is None:
        return _dry_run(plan, source, progress)
    return _write(plan, source, output, resume, overwrite, progress)


def _make_plan(operation: Operation[R], checkpoint: Checkpoint) -> _Plan[R]:
    announced = {shard.name: operation.announce(shard.path) for shard in checkpoint.shards}
    headers = {name: each.header for name, each in announced.items()}
    scratch = {name: each.scratch_bytes for name, each in announced.items()}
    home: dict[str, str] = {}
    for shard in checkpoint.shards:
        for name in headers[shard.name].by_name:
            if name in home:
                raise BadInputError(
                    f"{label(shard.path)}: would have a tensor {quote(name)}, as would "
                    f"{label(home[name])}"
                )
            home[name] = shard.name
    table = None
    if checkpoint.index is not None:
        total = sum(entry.nbytes for header in headers.values() for entry in header.entries)
        table = index.build(home, total, checkpoint.index.metadata)
    config = None
    if operation.config is not None and Path(CONFIG_NAME) in checkpoint.others:
        path = checkpoint.folder / CONFIG_NAME
        try:
            config = load_object(
                path.read_text(encoding="utf-8"), f"{label(path)}: config", as_written=True
            )
        except UnicodeDecodeError as error:
            raise BadInputError(f"{label(path)}: is not UTF-8 at byte {error.start}") from error
    return _Plan(operation, checkpoint, headers, scratch, table, config)


def _dry_run(plan: _Plan[R], source: Path, progress: Progress | None) -> Done[R]:
    shards = plan.checkpoint.shards
    bar = _Bar(sum(shard.header.file_bytes for shard in shards), progress)
    reports = []
    for shard in shards:
        part = bar.part(shard.header.file_bytes)
        reports.append(plan.run(shard, None, part))
    return _done(plan, source, None, reports, (), plan.bytes_needed(shards))


def _write(
    plan: _Plan[R],
    source: Path,
    output: Path,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> Done[R]:
    operation, shards = plan.operation, plan.checkpoint.shards
    inputs = [shard.path for shard in shards]
    journal = Journal(
        output, fingerprint(operation.name, operation.options, inputs), operation.report
    )
    is_new = not output.exists()
    with contextlib.ExitStack() as stack:
        finished: dict[str, R] = {}
        if not is_new:
            stack.enter_context(_lock(output))
            if resume and not overwrite and _looks_finished(plan, output):
                return _compare(plan, source, output, progress)
            if _may_resume(plan, output, resume, overwrite):
                journal.load()
                finished = _finished(plan, output, journal)
        todo = [shard for shard in shards if shard.name not in finished]
        needed = plan.bytes_needed(todo)
        _check_room(output, needed)
        scans = operation.find_nonfinite or operation.find_violation or operation.rehearse
        size = sum(shard.header.file_bytes for shard in todo)
        bar = _Bar((1 + scans) * size, progress)
        if scans:
            for shard in todo:
                part = bar.part(shard.header.file_bytes)
                if operation.rehearse:
                    plan.run(shard, None, part)
                else:
                    _scan(operation, shard, part)
        if is_new:
            _make_folder(output)
            stack.enter_context(_lock(output))
        try:
            _begin(plan, output, journal)
            reports = []
            for shard in shards:
                if shard.name in finished:
                    reports.append(finished[shard.name])
                    continue
                part = bar.part(shard.header.file_bytes)
                reports.append(plan.run(shard, output / shard.name, part))
                journal.add(shard.name, reports[-1])
            done = _done(plan, source, output, reports, finished, needed)
            _carry_over(plan, output, done.report)
            journal.remove()
        except OSError as error:
            raise Sp24Error(f"{label(output)}: cannot be written: {error.strerror}") from error
        finally:
            # Where nothing was finished in a folder that was not there, it goes again.
            with contextlib.suppress(OSError):
                if is_new and set(os.listdir(output)) <= {JOURNAL_NAME}:
                    journal.path.unlink(missing_ok=True)
                    output.rmdir()
    return done


def _may_resume(plan: _Plan[R], output: Path, resume: bool, overwrite: bool) -> bool:
    """Whether the folder that is there is an unfinished output; `Sp24Error` if it may not be
    used at all."""
    names = os.listdir(output)
    if not names:
        return False
    unfinished = JOURNAL_NAME in names
    where = label(output)
    if resume and unfinished:
        _check_stays(plan, where, names)
        return True
    if not overwrite:
        if unfinished:
            raise Sp24Error(
                f"{where}: is an unfinished output; --resume finishes it, --force starts again"
            )
        if resume:
            raise Sp24Error(
                f"{where}: has no journal to resume by: it is not an output of this run"
            )
        raise Sp24Error(f"{where}: exists already and is not empty; --force replaces what is there")
    _check_stays(plan, where, names)
    return False


def _check_stays(plan: _Plan[R], where: str, names: list[str]) -> None:
    """`Sp24Error` if weights of another run would stay beside those of this one."""
    for name in sorted(names):
        if name.endswith(OTHER_WEIGHTS) and name not in plan.names:
            raise Sp24Error(f"{where}: has {label(name)}, which would stay; choose another output")


def _looks_finished(plan: _Plan[R], output: Path) -> bool:
    """Whether the folder has no journal, but the index and the headers of what this run would
    write. Any model of the architecture may have these."""
    if os.path.lexists(output / JOURNAL_NAME):
        return False
    try:
        if plan.index is not None and (output / plan.index_name).read_bytes() != plan.index:
            return False
        return all(parse(output / name) == header for name, header in plan.headers.items())
    except (OSError, BadInputError):
        return False


def _compare(plan: _Plan[R], source: Path, output: Path, progress: Progress | None) -> Done[R]:
    """Run once more beside a folder that looks finished; `Sp24Error` at the first file that is
    not what comes out. Nothing there is touched."""
    shards = plan.checkpoint.shards
    needed = max(plan.headers[s.name].file_bytes + plan.scratch_bytes[s.name] for s in shards)
    _check_room(output, needed)
    bar = _Bar(sum(shard.header.file_bytes for shard in shards), progress)
    again = output / _AGAIN_NAME
    try:
        # First what takes no time.
        for other in plan.copied:
            _check_same(
                output / other, same_content(plan.checkpoint.folder / other, output / other)
            )
        reports = []
        for shard in shards:
            again.unlink(missing_ok=True)
            reports.append(plan.run(shard, again, bar.part(shard.header.file_bytes)))
            _check_same(output / shard.name, same_content(again, output / shard.name))
        done = _done(plan, source, output, reports, (), needed)
        config = plan.new_config(done.report)
        if config is not None:
            path = output / CONFIG_NAME
            _check_same(path, path.is_file() and path.read_bytes() == config)
    except OSError as error:
        raise Sp24Error(f"{label(output)}: cannot be compared: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            again.unlink()
    return done


def _check_same(path: Path, same: bool) -> None:
    if not same:
        fault = "is not the output of this run" if os.path.lexists(path) else "is missing"
        raise Sp24Error(f"{label(path)}: {fault}; --force replaces what is there")


def _finished(plan: _Plan[R], output: Path, journal: Journal) -> dict[str, R]:
    """The reports of the shards that need not be done again."""
    finished = {}
    for shard in plan.checkpoint.shards:
        report = journal.finished(shard.name)
        if report is None:
            continue
        with contextlib.suppress(BadInputError):
            if parse(output / shard.name) == plan.headers[shard.name]:
                finished[shard.name] = report
    return finished


def _begin(plan: _Plan[R], output: Path, journal: Journal) -> None:
    """Mark the folder as unfinished; take away what an earlier run has left halfway."""
    journal.save()
    for name in os.listdir(output):
        # Links would be written through, to wherever they lead.
        if is_leftover(name) or ((output / name).is_symlink() and name in plan.names):
            (output / name).unlink()
    if plan.index is not None:
        (output / plan.index_name).unlink(missing_ok=True)


def _carry_over(plan: _Plan[R], output: Path, report: R) -> None:
    for other in plan.checkpoint.others:
        target = output / other
        for folder in reversed(other.parents[:-1]):
            if (output / folder).is_symlink():
                raise Sp24Error(f"{label(output / folder)}: is a link; choose another output")
            (output / folder).mkdir(exist_ok=True)
        config = plan.new_config(report) if str(other) == CONFIG_NAME else None
        if config is not None:
            replace_file(target, [config])
        else:
            copy_file(plan.checkpoint.folder / other, target)
    if plan.index is not None:
        replace_file(output / plan.index_name, [plan.index])
    sync_folder(output)


def _done(
    plan: _Plan[R],
    source: Path,
    output: Path | None,
    reports: Sequence[R],
    finished: Mapping[str, R] | tuple[()],
    needed: int,
) -> Done[R]:
    checkpoint = plan.checkpoint
    folder = FolderReport(
        shards=tuple(
            ShardDone(s.name, s.header.file_bytes, r.output_bytes, s.name in finished)
            for s, r in zip(checkpoint.shards, reports, strict=True)
        ),
        index=plan.index_name or None,
        carried=tuple(str(other) for other in checkpoint.others),
        left_out=checkpoint.left_out,
        disk_bytes=needed,
    )
    named = {"source": str(source), "output": None if output is None else str(output)}
    return Done(_joined(reports, named), folder)


def _joined(reports: Sequence[R], named: Mapping[str, Any]) -> R:
    """One report of all shards: tensors in order, counts added up; the rest is the same in all."""
    whole: dict[str, Any] = {}
    for field in fields(reports[0]):  # type: ignore[arg-type]
        values = [getattr(report, field.name) for report in reports]
        if field.name in named:
            whole[field.name] = named[field.name]
        elif isinstance(values[0], tuple):
            whole[field.name] = tuple(item for value in values for item in value)
        elif type(values[0]) is int:
            whole[field.name] = sum(values)
        else:
            whole[field.name] = values[0]
    return replace(reports[0], **whole)  # type: ignore[type-var]


def _scan(operation: Operation[R], shard: Shard, progress: Progress | None) -> None:
    """Read the selected weights of a shard for what the operation would refuse."""
    options = operation.options
    workers = operation.workers or default_workers()
    selection = options.get("selection") or Selection()
    choice = options.get("choice") or Choice()
    optype = options.get("optype")
    pattern = choice.pattern if optype is None else pattern_of(optype)
    siblings = options.get("siblings", ())
    with open_dense(shard.path, selection, options.get("dequantize_fp8"), siblings) as file:
        chosen = make_plan(file, selection, group=pattern.group).chosen
        size = sum(entry.nbytes for entry in chosen)
        done = 0
        for entry in chosen:
            wanted = pattern if operation.find_violation else None
            for count in _look_through(file, entry, wanted, operation.engine, workers):
                done += count
                if progress is not None:
                    progress(done, size)
    if progress is not None:
        progress(1, 1)


def _look_through(
    file: SafetensorsFile,
    entry: TensorEntry,
    pattern: Pattern | None,
    engine: Engine | None,
    workers: int,
) -> Iterator[int]:
    """`_look` at all of a weight."""
    look = partial(_look, file, entry, pattern)
    knows = pattern in (None, TWO_OF_FOUR) and stored_order(file, entry) is None
    if engine is not None and knows and engine.prunes(entry):
        wanted = pattern is not None
        return engine.check(file, entry.name, look, find_violations=wanted, workers=workers)
    return map_bands(look, prune_ranges(entry.shape), entry.shape[1], workers)


def _look(
    file: SafetensorsFile, entry: TensorEntry, pattern: Pattern | None, start: int, stop: int
) -> int:
    """The bytes of some rows of a weight that are as they must be, else `BadInputError`.

    ``pattern`` is what they must have, None for any.
    """
    name, where = entry.name, tensor_label(file, entry.name)
    dense = file.array(name, slice(start, stop))
    if (place := find_nonfinite(dense)) is not None:
        raise not_finite(where, dense, start, place)
    if pattern is not None:
        order = stored_order(file, entry)
        if order is not None:
            dense = permute.apply(dense, order)
        if (place := find_crowded(dense, pattern)) is not None:
            raise BadInputError(f"{where}: {violation(pattern, *place, start)}")
    file.drop_cache(name, slice(start, stop))
    return dense.nbytes


class _Bar:
    """One progress over several parts, each of which counts for itself."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._begun = 0

    def part(self, size: int) -> Progress | None:
        """The progress of the next part, which counts as ``size`` of the whole."""
        begun, progress = self._begun, self._progress
        self._begun += size
        if progress is None:
            return None
        report = progress

        def advance(done: int, total: int) -> None:
            report(begun + (size * done // total if total else size), self._total)

        return advance


def _check_room(output: Path, needed: int) -> None:
    folder = output if output.exists() else output.absolute().parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise Sp24Error(f"{label(folder)}: {error.strerror}") from error
    if free < needed:
        raise Sp24Error(
            f"{label(output)}: needs {needed} bytes, but {label(folder)} has {free} free"
        )


def _make_folder(output: Path) -> None:
    """`Sp24Error` if it cannot be made, or another run has just made it."""
    try:
        output.mkdir()
    except FileExistsError:
        with _lock(output):
            raise Sp24Error(f"{label(output)}: appeared while this run began") from None
    except OSError as error:
        raise Sp24Error(f"{label(output)}: cannot be made: {error.strerror}") from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other runs out of ``folder``; the system lets go of it with the process."""
    if not locking.AVAILABLE:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise Sp24Error(f"{label(folder)}: cannot be read: {error.strerror}") from error
    try:
        if locking.lock(descriptor) is False:
            raise Sp24Error(f"{label(folder)}: another run is writing here")
        yield
    finally:
        os.close(descriptor)
