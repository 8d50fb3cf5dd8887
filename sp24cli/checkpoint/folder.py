"""A checkpoint as it lies on disk: a file, or a folder of shards with what belongs to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sp24cli.checkpoint import header, index
from sp24cli.checkpoint.header import Header, label
from sp24cli.checkpoint.index import SHARD_SUFFIX, SUFFIX, Index
from sp24cli.checkpoint.writer import TEMP_PREFIX, TEMP_SUFFIX
from sp24cli.errors import BadInputError, Sp24Error

#: In a folder that sp24 has not finished: what it has done so far.
JOURNAL_NAME = ".sp24-journal.json"
#: Weights in other formats, or in files that the index does not know. Beside the new weights
#: they would be the old ones, to be loaded by mistake.
OTHER_WEIGHTS = (
    SHARD_SUFFIX,
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".bin.index.json",
    SUFFIX,
)
#: Folders of tools, not of the model.
_TOOL_FOLDERS = (".cache", ".git", "__pycache__")


@dataclass(frozen=True)
class Shard:
    """One safetensors file of a checkpoint: its name there, where it is, and its header."""

    name: str
    path: Path
    header: Header


@dataclass(frozen=True)
class LeftOut:
    """A file of a folder that no output takes over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A folder's weights, in the order of their names, and its other files.

    ``index`` is None (and ``index_name`` empty) for a folder with a single safetensors file.
    ``others`` are paths relative to ``folder``.
    """

    folder: Path
    shards: tuple[Shard, ...]
    index: Index | None
    index_name: str
    others: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


def is_leftover(name: str) -> bool:
    """Whether a file is what a writer leaves when its process is killed."""
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` names a folder or an index, not a safetensors file."""
    # Not Path.is_dir, which raises what is for the reader of the file to say.
    return os.path.isdir(path) or path.name.endswith(SUFFIX)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder ``path`` (or of that index), all of its headers checked.

    Links are followed: the folder may be a snapshot that points into a store of blobs.

    Raises:
        BadInputError: no checkpoint, an output that was never finished, an index that does not
            agree with its shards, or a shard that is not a safetensors file.
    """
    folder, index_path = (path, None) if path.is_dir() else (path.parent, path)
    names = _listing(folder)
    if JOURNAL_NAME in names:
        raise BadInputError(
            f"{label(folder)}: is an unfinished output of sp24; finish it with --resume"
        )
    if index_path is None:
        found = [name for name in names if name.endswith(SUFFIX)]
        if len(found) > 1:
            raise BadInputError(
                f"{label(folder)}: has {len(found)} indexes ({found[0]}, {found[1]}); name one"
            )
        index_path = folder / found[0] if found else None
    table = None
    if index_path is not None:
        table = index.parse(index_path)
        wanted = table.shards
        for name, shard in table.weight_map.items():
            if shard not in names:
                raise BadInputError(
                    f"{label(index_path)}: tensor {header.quote(name)}: its shard {label(shard)}"
                    " does not exist"
                )
    else:
        wanted = tuple(n for n in names if n.endswith(SHARD_SUFFIX) and not n.startswith("."))
        if not wanted:
            raise BadInputError(f"{label(folder)}: holds no safetensors file")
        if len(wanted) > 1:
            raise BadInputError(
                f"{label(folder)}: holds {len(wanted)} safetensors files and no index"
            )
    shards = tuple(Shard(n, folder / n, header.parse(folder / n)) for n in wanted)
    if table is not None and index_path is not None:
        contents = {s.name: (s.path, s.header.by_name) for s in shards}
        index.check(table, index_path, contents)
    used = {*wanted, "" if index_path is None else index_path.name}
    others: list[Path] = []
    left_out: list[LeftOut] = []
    for relative, fault in _walk(folder, Path()):
        name = relative.name
        if len(relative.parts) == 1 and name in used:
            continue
        if fault is None and len(relative.parts) == 1 and name.endswith(OTHER_WEIGHTS):
            fault = "weights that are not in the index" if table else "other weights"
        if fault is None:
            others.append(relative)
        else:
            left_out.append(LeftOut(str(relative), fault))
    return Checkpoint(
        folder,
        shards,
        table,
        "" if index_path is None else index_path.name,
        tuple(others),
        tuple(left_out),
    )


def check_output_folder(output: Path, checkpoint: Checkpoint, beside: Iterable[Path] = ()) -> None:
    """`Sp24Error` unless ``output`` is a place that cannot touch the inputs: not the checkpoint's
    folder, in it or around it, nor a store that its links lead to, and not where the files
    ``beside`` it are that are read as well."""
    where = label(output)
    target = Path(os.path.realpath(output))
    source = Path(os.path.realpath(checkpoint.folder))
    if target == source:
        raise Sp24Error(f"{where}: is the input folder; choose another output")
    if source in target.parents or target in source.parents:
        raise Sp24Error(f"{where}: the input {label(source)} and the output lie in one another")
    files = [s.path for s in checkpoint.shards] + [checkpoint.folder / o for o in checkpoint.others]
    stores = {Path(os.path.realpath(file)).parent for file in files}
    for store in stores:
        # A store of blobs is nobody's folder; other links may lead to where users keep models.
        inside = store.name == "blobs" and store in target.parents
        if target == store or inside or target in store.parents:
            raise Sp24Error(f"{where}: lies where files of the input are, {label(store)}")
    for path in beside:
        if target in Path(os.path.realpath(path)).parents:
            raise Sp24Error(f"{where}: holds the input {label(path)}; choose another output")
    if not target.parent.is_dir():
        raise Sp24Error(f"{where}: the folder {label(target.parent)} does not exist")
    # A pipe that /dev/stdout leads to has no path of its own.
    if (os.path.lexists(target) or os.path.exists(output)) and not os.path.isdir(output):
        raise Sp24Error(f"{where}: is not a folder, as the input is")


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise BadInputError(f"{label(folder)}: cannot be read: {error.strerror}") from error


def _walk(folder: Path, inside: Path) -> Iterator[tuple[Path, str | None]]:
    """Every file below ``folder``, sorted, and what is wrong with it as one to copy."""
    for name in _listing(folder / inside):
        relative = inside / name
        path = folder / relative
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise BadInputError(f"{label(path)}: cannot be read: {error.strerror}") from error
        if stat.S_ISREG(mode):
            yield relative, "left by a run that was cut off" if is_leftover(name) else None
        elif not stat.S_ISDIR(mode):
            yield relative, "not a regular file"
        elif path.is_symlink():
            yield relative, "a link to a folder"
        elif name not in _TOOL_FOLDERS:
            yield from _walk(folder, relative)
