"""Writing: a safetensors file tensor by tensor, which appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint import header
from sp24cli.checkpoint.header import DTYPES, PathLike, TensorSpec, label, quote
from sp24cli.checkpoint.locking import lock
from sp24cli.errors import Sp24Error

#: How the hidden file is called until it is complete; killed, a process leaves it.
TEMP_PREFIX = ".sp24-"
TEMP_SUFFIX = ".tmp"

#: Bytes written before the disk is asked to take them, beside what is being computed: the sync at
#: the end, for which all waits, then finds few left.
FLUSH_BYTES = 1 << 26


def check_output(
    path: PathLike, *, forbid: Iterable[PathLike] = (), overwrite: bool = False
) -> None:
    """`Sp24Error` unless ``path`` may be written: not one of the inputs ``forbid`` by any name
    (symbolic and hard links included), in a folder that exists, and new or, with
    ``overwrite``, a regular file, which must not be where the process itself prints to."""
    where = label(path)
    target = os.path.realpath(path)
    for source in forbid:
        if os.path.exists(target) and os.path.exists(source) and os.path.samefile(target, source):
            raise Sp24Error(f"{where}: is the input {label(source)}; choose another output")
    with contextlib.suppress(OSError):
        # Not of the target: a pipe that /dev/stdout leads to has no path.
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
            raise Sp24Error(f"{where}: is not a regular file; choose another output")
        if _is_printed_to(found):
            raise Sp24Error(f"{where}: is where the report is printed; choose another output")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise Sp24Error(f"{where}: the folder {label(folder)} does not exist")
    if os.path.lexists(target):
        if os.path.isdir(target):
            raise Sp24Error(f"{where}: is a directory")
        if not overwrite:
            raise Sp24Error(f"{where}: exists already; it is replaced only on request")
        if not os.path.isfile(target):
            raise Sp24Error(f"{where}: is not a regular file")


def _is_printed_to(found: os.stat_result) -> bool:
    """Whether a file is standard output or error: replaced, it would take what is there along."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return True
    return False


class StreamingWriter:
    """Writes one safetensors file in a ``with`` block; the file appears when the block ends.

    Tensors may come in any order, each whole or in row blocks from the first row on. Data lies in
    the library's order, so the same tensors give the same bytes however they came. Until the end
    all is in a hidden file beside the output, which goes when the block fails; that of a process
    that was killed goes, where there are locks, when the same output is written again. The
    output's mode follows the umask.

    Args:
        path: the output. A symbolic link is followed.
        entries: name, safetensors dtype and shape of every tensor.
        metadata: the file's ``__metadata__``; empty for none.
        forbid: the inputs, which the output must not be, and which must not change meanwhile.
        overwrite: replace an existing output.
        scratch_bytes: what else the disk must have room for meanwhile.

    Raises:
        Sp24Error: the output may not or cannot be written, the disk has too little room, a
            tensor got data that do not fit it, or an input was written to.
        BadInputError: entries or metadata that no file can hold.
    """

    def __init__(
        self,
        path: PathLike,
        entries: Iterable[TensorSpec],
        metadata: Mapping[str, str],
        *,
        forbid: Iterable[PathLike] = (),
        overwrite: bool = False,
        scratch_bytes: int = 0,
    ) -> None:
        self.path = path
        self._where = label(path)
        self._forbid = tuple(forbid)
        self._states = [_state(source) for source in self._forbid]
        self._overwrite = overwrite
        specs = header.file_order(entries)
        self._prefix = header.build(specs, metadata, self._where)
        data_bytes = sum(
            header.tensor_bytes(dtype, shape, self._where) for _, dtype, shape in specs
        )
        #: What the file will hold, as its reader will see it.
        self.header = header.decode(
            self._prefix[header.LENGTH_BYTES :], len(self._prefix) + data_bytes, self._where
        )
        self._written = dict.fromkeys(self.header.by_name, 0)
        self._target = os.path.realpath(path)
        self._folder = os.path.dirname(self._target)
        of_output = hashlib.sha256(os.fsencode(os.path.basename(self._target))).hexdigest()[:8]
        self._temp_prefix = f"{TEMP_PREFIX}{of_output}-"
        self._temp: str | None = None
        self._file: BinaryIO | None = None
        self._flusher = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._unflushed = 0
        self._check_output()
        self._remove_abandoned()
        self._check_room(self.header.file_bytes + scratch_bytes)

    def __enter__(self) -> StreamingWriter:
        name = f"{self._temp_prefix}{secrets.token_hex(8)}{TEMP_SUFFIX}"
        self._temp = os.path.join(self._folder, name)
        try:
            # os.open, not tempfile, whose files are closed to all but their owner.
            descriptor = os.open(
                self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
            )
            self._file = open(descriptor, "r+b", buffering=0)
            lock(descriptor)
            self._put(0, memoryview(self._prefix))
        except OSError as error:
            self._discard()
            raise Sp24Error(
                f"{self._where}: cannot be written in {label(self._folder)}: {error.strerror}"
            ) from error
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, data: npt.NDArray[Any] | bytes | bytearray | memoryview) -> None:
        """Write a tensor, or the next rows of it.

        An array must have the tensor's dtype and its sizes beyond the first axis; its strides
        do not matter. Bytes (the only way for dtypes narrower than a byte) are taken as they
        are.
        """
        entry = self.header.by_name.get(name)
        where = f"{self._where}: tensor {quote(name)}"
        if entry is None:
            raise Sp24Error(f"{where}: is not among the announced ones")
        if isinstance(data, np.ndarray):
            want = DTYPES[entry.dtype].numpy
            if data.dtype != want:
                raise Sp24Error(f"{where}: got {data.dtype}, announced {entry.dtype}")
            if data.ndim != len(entry.shape) or data.shape[1:] != entry.shape[1:]:
                raise Sp24Error(
                    f"{where}: got shape {list(data.shape)}, announced {list(entry.shape)}"
                )
            view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        else:
            view = memoryview(data).cast("B")
        done = self._written[name]
        if done + view.nbytes > entry.nbytes:
            raise Sp24Error(f"{where}: got {done + view.nbytes} bytes, announced {entry.nbytes}")
        try:
            self._put(entry.begin + done, view)
            self._flush_now_and_then(view.nbytes)
        except OSError as error:
            raise Sp24Error(f"{where}: cannot be written: {error.strerror}") from error
        self._written[name] = done + view.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise Sp24Error(f"{self._where}: cannot be written: {failure.strerror}") from failure
        finally:
            self._discard()

    def _commit(self) -> None:
        for name, done in self._written.items():
            nbytes = self.header.by_name[name].nbytes
            if done != nbytes:
                raise Sp24Error(
                    f"{self._where}: tensor {quote(name)}: got {done} bytes, announced {nbytes}"
                )
        assert self._file is not None
        assert self._temp is not None
        if self._flush is not None:
            # Of what failed there the sync might not tell again.
            self._flush.result()
        os.fsync(self._file.fileno())
        self._file.close()
        for source, before in zip(self._forbid, self._states, strict=True):
            after = _state(source)
            # Another file in its place does no harm: what was opened is still there.
            if before and after and before[:2] == after[:2] and before != after:
                raise Sp24Error(f"{label(source)}: was written to while it was read")
        # Hours may have passed: an output that has appeared since is not replaced either.
        self._check_output()
        os.replace(self._temp, self._target)
        self._temp = None
        _sync_folder(self._folder)

    def _discard(self) -> None:
        """Close and remove the temporary file, if there is one; never hides another error."""
        try:
            # First what uses the file's descriptor, whose number another file may have next.
            self._flusher.shutdown()
        finally:
            with contextlib.suppress(OSError):
                if self._file is not None:
                    self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                if self._temp is not None:
                    os.unlink(self._temp)
            self._temp = None

    def _put(self, position: int, view: memoryview) -> None:
        if self._file is None:
            raise ValueError(f"{self._where}: is not open")
        self._file.seek(position)
        while view.nbytes:
            # Unbuffered, so one call may take only part.
            view = view[self._file.write(view) :]

    def _flush_now_and_then(self, written: int) -> None:
        """Have the disk take what was written, when it is enough and nothing is under way."""
        self._unflushed += written
        if self._unflushed < FLUSH_BYTES or not (self._flush is None or self._flush.done()):
            return
        if self._flush is not None:
            self._flush.result()
        assert self._file is not None
        sync = getattr(os, "fdatasync", os.fsync)
        self._flush = self._flusher.submit(sync, self._file.fileno())
        self._unflushed = 0

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left of this output: hidden files that none holds locked."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self._folder)
        for name in names:
            if not (name.startswith(self._temp_prefix) and name.endswith(TEMP_SUFFIX)):
                continue
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    if lock(descriptor):
                        os.unlink(path)
                finally:
                    os.close(descriptor)

    def _check_output(self) -> None:
        check_output(self.path, forbid=self._forbid, overwrite=self._overwrite)

    def _check_room(self, needed: int) -> None:
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise Sp24Error(f"{label(self._folder)}: {error.strerror}") from error
        if free < needed:
            raise Sp24Error(
                f"{self._where}: needs {needed} bytes, but {label(self._folder)} has {free} free"
            )


def identity(path: PathLike) -> list[int]:
    """What changes whenever the content of a file does: the change time cannot be set."""
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _state(path: PathLike) -> list[int] | None:
    """The `identity` of a file without its change time, which a new link to it changes as well;
    None if it is not there."""
    try:
        return identity(path)[:-1]
    except OSError:
        return None


def _sync_folder(folder: str) -> None:
    """Make the rename last through a power cut, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
