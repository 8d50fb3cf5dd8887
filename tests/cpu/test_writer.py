"""Streamed writing: the library's bytes, whole or not at all, and never over an input."""

from __future__ import annotations

import collections
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import TensorSpec, deserialize, serialize_file

from sp24cli.checkpoint import writer
from sp24cli.checkpoint.folder import is_leftover
from sp24cli.checkpoint.header import DTYPES
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.writer import StreamingWriter, check_output
from sp24cli.errors import BadInputError, Sp24Error

#: The library's serializer takes numpy's names, but has no 6-bit type.
WHOLE = {d.name: d.numpy for d in DTYPES.values() if d.numpy is not None}
ENTRY = ("x", "F32", (4, 3))
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def save(path: Path, array: npt.NDArray[Any] = X, **options: Any) -> None:
    with StreamingWriter(path, [ENTRY], {}, **options) as out:
        out.write("x", array)


def save_by(
    path: Path,
    steps: Callable[[StreamingWriter], None],
    entry: Any = ENTRY,
    **options: Any,
) -> None:
    """What happens when the block of the writer of ``path`` is ``steps``."""
    with StreamingWriter(path, [entry], {}, **options) as out:
        steps(out)


def sample() -> dict[str, tuple[str, npt.NDArray[Any]]]:
    """A tensor of each dtype that numpy has, of sizes that would misalign each other."""
    rng = np.random.default_rng(1)
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    for name, dtype in WHOLE.items():
        raw = rng.integers(0, 2 if name == "BOOL" else 256, 15 * dtype.itemsize).astype(np.uint8)
        tensors[f"é.{name}"] = (name, raw.view(dtype).reshape(5, 3))
    tensors["scalar"] = ("F64", np.array(1.5))
    tensors["empty"] = ("F32", np.zeros((0, 4), np.float32))
    return tensors


def save_by_library(path: Path, metadata: dict[str, str]) -> None:
    tensors = sample()
    serialize_file(
        {
            name: TensorSpec(
                dtype=array.dtype.name,
                shape=list(array.shape),
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, (_, array) in tensors.items()
        },
        path,
        metadata,
    )


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_every_dtype_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    save_by_library(tmp_path / "library", {"format": "pt"})
    tensors = sample()
    entries = [(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    with StreamingWriter(tmp_path / "ours", entries, {"format": "pt"}) as out:
        for name, (_, array) in tensors.items():
            out.write(name, array)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_library_and_reader_read_what_was_written(tmp_path: Path) -> None:
    """Narrow types, too, which the library reads but does not write from numpy."""
    narrow = {"f4": ("F4", (2, 4), b"1234"), "f6": ("F6_E2M3", (4,), b"123")}
    tensors = sample()
    entries = [(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    entries += [(name, dtype, shape) for name, (dtype, shape, _) in narrow.items()]
    with StreamingWriter(tmp_path / "f", entries, {"k": "v"}) as out:
        for name, (_, _, raw) in narrow.items():
            out.write(name, raw)
        for name, (_, array) in tensors.items():
            out.write(name, array)
    library = dict(deserialize((tmp_path / "f").read_bytes()))
    assert set(library) == set(tensors) | set(narrow)
    with SafetensorsFile(tmp_path / "f") as file:
        assert file.metadata == {"k": "v"}
        for name, (dtype, array) in tensors.items():
            assert library[name]["dtype"] == dtype
            assert library[name]["shape"] == list(array.shape)
            assert library[name]["data"] == array.tobytes()
            assert file.array(name).tobytes() == array.tobytes()
            assert file.entry(name).begin % array.dtype.itemsize == 0
        for name, (dtype, shape, raw) in narrow.items():
            assert library[name] == {"dtype": dtype, "shape": list(shape), "data": raw}
            assert file.raw(name) == raw


def test_bytes_do_not_depend_on_order_or_chunks(tmp_path: Path) -> None:
    tensors = sample()
    entries = [(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    written = []
    for turn in (1, -1):
        with StreamingWriter(tmp_path / "f", entries[::turn], {"a": "1"}, overwrite=True) as out:
            for name in list(tensors)[::-turn]:
                array = tensors[name][1]
                if array.ndim == 0:
                    out.write(name, array)
                    continue
                for row in range(0, len(array), 3 + turn):
                    out.write(name, array[row : row + 3 + turn])
        written.append((tmp_path / "f").read_bytes())
    assert written[0] == written[1]


def test_blocks_of_two_tensors_may_interleave(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "f", [("a", "U8", (4,)), ("b", "U8", (4,))], {}) as out:
        for i in range(4):
            out.write("a", np.array([i], np.uint8))
            out.write("b", bytes([i + 10]))
    with SafetensorsFile(tmp_path / "f") as file:
        assert file.raw("a") == bytes([0, 1, 2, 3])
        assert file.raw("b") == bytes([10, 11, 12, 13])


@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(X), np.repeat(X, 2, axis=1)[:, ::2], X[::-1][::-1], np.ascontiguousarray(X)],
    ids=["fortran", "strided", "reversed", "plain"],
)
def test_strides_do_not_matter(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    save(tmp_path / "f", array)
    with SafetensorsFile(tmp_path / "f") as file:
        np.testing.assert_array_equal(file.array("x"), X)


def test_mapped_bytes_pass_through(tmp_path: Path) -> None:
    save(tmp_path / "a")
    with (
        SafetensorsFile(tmp_path / "a") as source,
        StreamingWriter(tmp_path / "b", [source.entry("x").spec], {}) as out,
    ):
        out.write("x", source.raw("x"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_tensors(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "f", [], {}):
        pass
    assert deserialize((tmp_path / "f").read_bytes()) == []


def test_header_says_what_will_be_there(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "f", [ENTRY], {"k": "v"}) as out:
        promised = out.header
        out.write("x", X)
    with SafetensorsFile(tmp_path / "f") as file:
        assert file.header == promised
    assert promised.file_bytes == (tmp_path / "f").stat().st_size


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_follows_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "f")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~umask


class Stop(BaseException):
    """Stands for anything that may end a run, as KeyboardInterrupt does."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, Stop])
def test_failure_in_the_block_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def steps(out: StreamingWriter) -> None:
        out.write("x", X[:2])
        assert len(listing(tmp_path)) == 2
        raise error

    with pytest.raises(error):
        save_by(tmp_path / "f", steps, overwrite=True)
    assert listing(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_failure_at_start_or_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Any
) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    # `open` fails after the temporary file is there, as an interrupt may.
    monkeypatch.setattr("builtins.open" if call == "open" else f"os.{call}", fail)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else Sp24Error
    with pytest.raises(expected) as caught:
        save(tmp_path / "f", overwrite=True)
    monkeypatch.undo()
    assert listing(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"
    if expected is Sp24Error:
        assert str(caught.value).startswith(f"{tmp_path / 'f'}: cannot be written")
        assert str(caught.value).endswith("Input/output error")


def test_full_disk_in_mid_write_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def steps(out: StreamingWriter) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))
        out.write("x", bytes(10**6))

    try:
        with pytest.raises(Sp24Error, match=r"f: tensor 'x': cannot be written: File too large$"):
            save_by(tmp_path / "f", steps, ("x", "U8", (10**6,)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(tmp_path) == []


Usage = collections.namedtuple("Usage", "total used free")


def test_disk_space_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 + 64 + X.nbytes
    asked = []

    def usage(folder: Any, free: int) -> Usage:
        asked.append(str(folder))
        return Usage(10**9, 0, free)

    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: usage(folder, size - 1))
    with pytest.raises(Sp24Error) as caught:
        StreamingWriter(tmp_path / "f", [ENTRY], {})
    assert str(caught.value) == (
        f"{tmp_path / 'f'}: needs {size} bytes, but {tmp_path} has {size - 1} free"
    )
    assert caught.value.exit_code == 1
    assert listing(tmp_path) == []
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: usage(folder, size))
    save(tmp_path / "f")
    assert (tmp_path / "f").stat().st_size == size
    assert asked == [str(tmp_path)] * 2


def test_file_is_synced_before_the_rename_and_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append(f"folder {status.st_ino}" if stat.S_ISDIR(status.st_mode) else "file")
        fsync(descriptor)

    def note_replace(source: str, target: str) -> None:
        events.append("replace")
        assert os.path.dirname(source) == str(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    save(tmp_path / "f")
    assert events == ["file", "replace", f"folder {tmp_path.stat().st_ino}"]


def test_the_disk_takes_data_while_more_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FLUSH_BYTES", 100)
    begun, go_on = threading.Event(), threading.Event()
    flushed: list[str] = []

    def wait(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(60)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fdatasync", wait)
    with StreamingWriter(tmp_path / "f", [("x", "U8", (1000,))], {}) as out:
        out.write("x", bytes(99))
        assert not begun.is_set()
        out.write("x", bytes(1))
        assert begun.wait(60)
        # One at a time, whatever comes meanwhile.
        out.write("x", bytes(700))
        go_on.set()
        out.write("x", bytes(200))
    assert 1 <= len(flushed) <= 2
    assert all(Path(name).parent == tmp_path for name in flushed)
    assert (tmp_path / "f").stat().st_size > 1000


@pytest.mark.parametrize("last", [False, True])
def test_what_the_disk_refuses_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    # The system tells of a failed write once: the sync at the end would find nothing wrong.
    monkeypatch.setattr(writer, "FLUSH_BYTES", 100)
    failed = threading.Event()

    def fail(descriptor: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def steps(out: StreamingWriter) -> None:
        out.write("x", bytes(500))
        assert failed.wait(60)
        if last:
            return
        # The flush is done a moment after it has failed.
        for _ in range(100):
            out.write("x", bytes(1))
            time.sleep(0.01)

    monkeypatch.setattr(os, "fdatasync", fail)
    size = 500 if last else 600
    with pytest.raises(Sp24Error, match=r"cannot be written: Input/output error$"):
        save_by(tmp_path / "f", steps, ("x", "U8", (size,)))
    assert listing(tmp_path) == []


def test_output_is_not_there_before_the_end(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "f", [ENTRY], {}) as out:
        out.write("x", X)
        assert not (tmp_path / "f").exists()
    assert listing(tmp_path) == ["f"]


def test_existing_output_is_refused_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(Sp24Error, match="f: exists already"):
        save(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"old"
    save(tmp_path / "f", overwrite=True)
    assert (tmp_path / "f").read_bytes() != b"old"


def test_output_that_appeared_meanwhile_is_refused(tmp_path: Path) -> None:
    def steps(out: StreamingWriter) -> None:
        out.write("x", X)
        (tmp_path / "f").write_bytes(b"another run's")

    with pytest.raises(Sp24Error, match="f: exists already"):
        save_by(tmp_path / "f", steps)
    assert listing(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"another run's"


@pytest.mark.parametrize("kind", ["same", "dotted", "symlink", "hard link", "input is a link"])
def test_input_is_never_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = tmp_path / "in"
    save(source)
    before = source.read_bytes()
    output, given = tmp_path / "out", source
    if kind == "same":
        output = source
    elif kind == "dotted":
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path / "sub")
        output = Path("../in")
    elif kind == "symlink":
        output.symlink_to("in")
    elif kind == "hard link":
        output.hardlink_to(source)
    else:
        given, output = tmp_path / "link", source
        given.symlink_to("in")
    with pytest.raises(Sp24Error, match=r"is the input .*; choose another output"):
        save(output, overwrite=True, forbid=[tmp_path / "absent", given])
    assert source.read_bytes() == before
    assert not [name for name in listing(tmp_path) if name.endswith(".tmp")]


def test_what_a_killed_process_left_goes_with_the_next_output_of_that_name(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys; from sp24cli.checkpoint.writer import StreamingWriter\n"
        "with StreamingWriter(sys.argv[1], [('x', 'F32', (4, 3))], {}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    for name in ("one", "one", "two"):
        done = subprocess.run([sys.executable, "-c", killed, str(tmp_path / name)], check=False)
        assert done.returncode == -signal.SIGKILL
    # The second run of the first output has removed what that one left.
    left = listing(tmp_path)
    assert len(left) == 2
    assert all(is_leftover(name) for name in left)
    # One that is still being written stays.
    with StreamingWriter(tmp_path / "one", [ENTRY], {}) as out:
        (mine,) = set(listing(tmp_path)) - set(left)
        assert len(listing(tmp_path)) == 2
        save(tmp_path / "one")
        assert mine in listing(tmp_path)
        (tmp_path / "one").unlink()
        out.write("x", X)
    (of_two,) = set(listing(tmp_path)) - {"one"}
    assert of_two in left
    save(tmp_path / "two")
    assert listing(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("change", ["bytes", "growth", "replaced", "gone", "read"])
def test_an_input_that_is_written_to_meanwhile_is_an_error(tmp_path: Path, change: str) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    save(source)

    def steps(out: StreamingWriter) -> None:
        out.write("x", X)
        if change in ("bytes", "growth"):
            with open(source, "r+b") as other:
                other.seek(-1 if change == "bytes" else 0, os.SEEK_END)
                other.write(b"x")
            os.utime(source, ns=(0, 1))  # the clock of the file system may be too coarse
        elif change == "replaced":
            save(tmp_path / "new")
            os.replace(tmp_path / "new", source)
        elif change == "gone":
            source.unlink()
        else:
            assert source.read_bytes()

    if change in ("bytes", "growth"):
        with pytest.raises(Sp24Error, match="in: was written to while it was read"):
            save_by(output, steps, forbid=[source])
        assert listing(tmp_path) == ["in"]
    else:
        save_by(output, steps, forbid=[source])
        assert output.exists()


def test_input_swapped_in_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    save(source)

    def steps(out: StreamingWriter) -> None:
        out.write("x", X)
        output.hardlink_to(source)

    with pytest.raises(Sp24Error, match="is the input"):
        save_by(output, steps, overwrite=True, forbid=[source])
    assert output.samefile(source)


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/f")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert listing(tmp_path / "real") == ["f"]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(Sp24Error) as caught:
        save(tmp_path / "no" / "f")
    path = tmp_path / "no" / "f"
    assert str(caught.value) == f"{path}: the folder {tmp_path / 'no'} does not exist"


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "no").write_bytes(b"")
    with pytest.raises(Sp24Error, match=r"the folder .*no does not exist"):
        save(tmp_path / "no" / "f")


def test_output_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(Sp24Error, match="is a directory"):
        save(tmp_path, overwrite=True)


def test_special_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for overwrite in (False, True):
        with pytest.raises(Sp24Error, match="pipe: is not a regular file"):
            save(tmp_path / "pipe", overwrite=overwrite)


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # whom no mode bits stop

        def refuse(*_: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(Sp24Error) as caught:
            save(tmp_path / "f")
    finally:
        tmp_path.chmod(0o700)
    assert str(caught.value) == (
        f"{tmp_path / 'f'}: cannot be written in {tmp_path}: Permission denied"
    )


def test_longest_name_still_has_a_temporary_file(tmp_path: Path) -> None:
    name = "é" * 127
    save(tmp_path / name)
    assert listing(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("y", X, "tensor 'y': is not among the announced ones"),
        ("x", X.astype(np.float64), "tensor 'x': got float64, announced F32"),
        ("x", X.astype(">f4"), "tensor 'x': got >f4, announced F32"),
        ("x", X.T, "tensor 'x': got shape [3, 4], announced [4, 3]"),
        ("x", X.reshape(-1), "tensor 'x': got shape [12], announced [4, 3]"),
        ("x", np.zeros((5, 3), np.float32), "tensor 'x': got 60 bytes, announced 48"),
        ("x", bytes(49), "tensor 'x': got 49 bytes, announced 48"),
        ("x", X[:3], "tensor 'x': got 36 bytes, announced 48"),
        ("x", b"", "tensor 'x': got 0 bytes, announced 48"),
    ],
)
def test_data_that_do_not_fit(tmp_path: Path, name: str, data: Any, says: str) -> None:
    with (
        pytest.raises(Sp24Error) as caught,
        StreamingWriter(tmp_path / "f", [ENTRY], {}) as out,
    ):
        out.write(name, data)
    assert str(caught.value) == f"{tmp_path / 'f'}: {says}"
    assert listing(tmp_path) == []


def test_rows_beyond_the_last(tmp_path: Path) -> None:
    def steps(out: StreamingWriter) -> None:
        out.write("x", X)
        out.write("x", X[:1])

    with pytest.raises(Sp24Error, match="got 60 bytes, announced 48"):
        save_by(tmp_path / "f", steps)
    assert listing(tmp_path) == []


def test_narrow_types_take_bytes_only(tmp_path: Path) -> None:
    with (
        pytest.raises(Sp24Error, match="got uint8, announced F4"),
        StreamingWriter(tmp_path / "f", [("x", "F4", (2,))], {}) as out,
    ):
        out.write("x", np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    ("entries", "metadata", "says"),
    [
        ([ENTRY, ENTRY], {}, "f: tensor 'x': the name is taken"),
        ([("x", "F5", (1,))], {}, "f: tensor 'x': unknown dtype 'F5'"),
        ([("x", "F64", (2**61,))], {}, "f: tensor 'x': shape [2305843009213693952] is neg"),
        ([], {"k": 1}, "f: __metadata__ 'k' is not a string"),
    ],
)
def test_impossible_entries(tmp_path: Path, entries: Any, metadata: Any, says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        StreamingWriter(tmp_path / "f", entries, metadata)
    assert says in str(caught.value)
    assert listing(tmp_path) == []


def test_write_outside_the_block(tmp_path: Path) -> None:
    out = StreamingWriter(tmp_path / "f", [ENTRY], {})
    with pytest.raises(ValueError, match="f: is not open"):
        out.write("x", X)
    with out:
        out.write("x", X)
    with pytest.raises(Sp24Error, match="announced 48"):
        out.write("x", X)


def test_check_output_alone(tmp_path: Path) -> None:
    check_output(tmp_path / "f", forbid=[tmp_path / "g"])
    with pytest.raises(Sp24Error, match="does not exist"):
        check_output(tmp_path / "no" / "f")
    assert listing(tmp_path) == []
