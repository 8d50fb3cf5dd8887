"""A GPU made of host memory, its conversion kernels NumPy, for the tests of what drives them."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli import layout, metadata
from sp24cli.activations import quantize_tokens
from sp24cli.bits import NUMBER_TYPES, magnitude_values, magnitudes, widen
from sp24cli.errors import BadInputError
from sp24cli.kernels import manifest
from sp24cli.optypes import OPERAND_TYPES, operand_type
from sp24cli.packed import PackedMatrix, PackInfo, pack_rows
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, prune_magnitude
from sp24cli.pruning.wanda import prune_wanda
from sp24cli.scaling import ScaleSpec, amax, expand, make_scales, scale_values, scales_from_amax
from sp24cli.sparsity import (
    PATCH_COLUMNS,
    PATCH_ROWS,
    find_nonfinite,
    patch_energies,
    prune_24,
)
from tests.cpu.patchsums import sum_patches

CUDA = Path(__file__).parents[2] / "cuda"
_TARGETS = ("e4m3", "e5m2", "s8", "f16", "bf16")
PRUNERS = tuple(
    f"prune_{score}_{pattern}" for score in ("magnitude", "wanda") for pattern in ("24", "nm")
)
_SIZES = {"uint64_t": 8, "int64_t": 8, "int32_t": 4, "uint32_t": 4}


def argument_layout(header: str, name: str) -> manifest.ArgumentLayout:
    """A parameter struct as its list of fields in a header says."""
    text = (CUDA / "include" / "sp24" / header).read_text()
    body = re.search(rf"#define {name}\(X\)(.*?)\n\n", text, re.DOTALL)
    assert body is not None, name
    fields, end = [], 0
    for kind, field in re.findall(r"X\((\w+), (\w+)\)", body[1]):
        size = _SIZES[kind]
        fields.append((field, kind, -(-end // size) * size))
        end = fields[-1][2] + size
    largest = max(_SIZES[kind] for _, kind, _ in fields)
    return manifest.ArgumentLayout(0, -(-end // largest) * largest, tuple(fields))


def made_manifest() -> manifest.Manifest:
    """What the built manifest says of the conversions, from the sources alone."""

    def entry(kind: str, source: str = "", a_type: str = "") -> manifest.ConversionEntry:
        own = {"smooth_tokens": "tokens"} | {k: k for k in ("scales", "tokens", "gather")}
        args = own.get(kind, "convert")
        name = "_".join(part for part in (kind, a_type, source) if part)
        return manifest.ConversionEntry(
            name, kind, "quantize", a_type, source, 256, 98304 * (kind == "gather"), 32, 0, args
        )

    entries = [entry("gather", bits) for bits in ("8", "16", "32")]
    entries += [entry("scales", "", a_type) for a_type in ("e4m3", "e5m2", "s8")]
    for source in ("bf16", "f16", "f32"):
        entries += [entry(kind, source) for kind in (*PRUNERS, "amax")]
        for kind in ("tokens", "smooth_tokens"):
            entries += [entry(kind, source, a_type) for a_type in ("e4m3", "e5m2", "s8")]
        entries += [entry("quantize", source, a_type) for a_type in _TARGETS]
    args = {
        "convert": argument_layout("convert.cuh", "SP24_CONVERT_ARGS"),
        "band_counts": argument_layout("convert.cuh", "SP24_BAND_COUNTS"),
        "scales": argument_layout("convert.cuh", "SP24_SCALES_ARGS"),
        "tokens": argument_layout("activations.cuh", "SP24_TOKENS_ARGS"),
        "gather": argument_layout("activations.cuh", "SP24_GATHER_ARGS"),
    }
    loaded = manifest.load()
    return replace(loaded, conversion_entries=tuple(entries), args=loaded.args | args)


def memory(address: int, dtype, shape):
    """An array over what lies at an address."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(raw), np.uint8).view(dtype).reshape(shape)


class Memory:
    """Bytes at an address; what was not written shows as such."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self._raw = np.full(nbytes + 16, 0xA5, np.uint8)
        start = -self._raw.ctypes.data % 16
        self.array = self._raw[start : start + nbytes]
        self.ptr = self._raw.ctypes.data + start

    def free(self):
        pass


class ConvertDevice:
    """As sp24cli.gpu.device.Device. ``launches`` are the kernels' names in order, ``threads`` those
    that have made it current."""

    name, ordinal, sm_count, stream = "Simulated H200", 0, 132, 0

    def __init__(self):
        self.launches, self.threads, self.streams = [], set(), 0
        self.vectors = []  # of launches for tokens, whether they write whole vectors

    def make_current(self):
        self.threads.add(threading.get_ident())

    @property
    def current(self):
        self.make_current()
        return nullcontext()

    def alloc(self, nbytes):
        return Memory(nbytes)

    pinned = alloc

    def new_stream(self):
        self.streams += 1
        return self.streams

    def wait(self, stream):
        assert 1 <= stream <= self.streams

    def copy_in(self, dst, host, stream):
        assert host.flags.c_contiguous
        memory(dst, np.uint8, host.nbytes)[:] = host.reshape(-1).view(np.uint8)

    def copy_out(self, host, src, stream):
        assert host.flags.c_contiguous
        host.reshape(-1).view(np.uint8)[:] = memory(src, np.uint8, host.nbytes)

    def clear(self, ptr, nbytes, stream):
        memory(ptr, np.uint8, nbytes)[:] = 0

    def upload(self, array):
        buffer = Memory(array.nbytes)
        buffer.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return buffer

    def download(self, buffer, dtype, shape):
        return memory(buffer.ptr, dtype, shape).copy()

    def kernel(self, entry):
        return SimpleNamespace(entry=entry)

    def launch(self, kernel, grid, parameters, stream, overlap=False):
        entry = kernel.entry
        self.launches.append(entry.name)
        args = SimpleNamespace(**{n: int(parameters[0][n]) for n in parameters[0].dtype.names})
        if isinstance(entry, manifest.PackEntry):
            _turn(operand_type(entry.a_type), args)
        elif entry.kind == "scales":
            found = memory(args.amax, np.float32, args.count)
            if args.powers:
                made = make_scales(found, args.max_finite, ScaleSpec.parse("mx"))
                memory(args.powers, np.uint8, args.count)[:] = made.view(np.uint8)
                made = scale_values(made)
            else:
                made = scales_from_amax(found, args.max_finite)
            memory(args.scale, np.float32, args.count)[:] = made
        elif entry.kind in ("tokens", "smooth_tokens"):
            self.vectors.append(bool(args.vector))
            _tokens(entry, NUMBER_TYPES[entry.source.upper()], args, grid)
        elif entry.kind == "gather":
            _gather(int(entry.source) // 8, args, grid)
        else:
            assert threading.get_ident() in self.threads, "no context is current in this thread"
            patches = -(-args.rows // PATCH_ROWS) * -(-args.k // PATCH_COLUMNS)
            assert grid == -(-patches // (entry.threads // 32))
            source = NUMBER_TYPES[entry.source.upper()]
            work = {"amax": _amax, "quantize": _quantize}.get(entry.kind, _prune)
            work(entry, source, args)


def _tokens(entry, source, args, rows):
    assert not args.vector or (
        args.x % 16 == args.ldx * source.dtype.itemsize % 16 == args.smooth % 16 == args.k % 8 == 0
        and args.codes % 8 == 0
    )
    assert bool(args.smooth) == (entry.kind == "smooth_tokens")
    smooth = memory(args.smooth, np.float32, args.k) if args.smooth else None
    flat = memory(args.x, source.dtype, (rows - 1) * args.ldx + args.k)
    strides = (args.ldx * flat.itemsize, flat.itemsize)
    x = np.lib.stride_tricks.as_strided(flat, (rows, args.k), strides)
    tokens = quantize_tokens(x, operand_type(entry.a_type), 1, smooth=smooth)
    memory(args.codes, np.uint8, x.shape)[:] = tokens.codes.view(np.uint8)
    memory(args.scale, np.float32, rows)[:] = tokens.scale


def _gather(itemsize, args, grid):
    rows = max(args.cta_rows, 1)
    assert grid == -(-args.rows // rows) * args.column_blocks
    assert args.column_blocks == 1 or not args.cta_rows
    assert args.cta_rows * (-(-args.k * itemsize // 16) * 16) <= 98304
    assert not args.vector or args.x % 16 == args.x_pitch % 16 == 0
    assert args.out % 16 == args.out_pitch % 16 == 0 and args.out_pitch >= args.k * itemsize
    order = memory(args.order, np.int32, args.k)
    for row in range(args.rows):
        x = memory(args.x + row * args.x_pitch, f"u{itemsize}", args.k)
        out = memory(args.out + row * args.out_pitch, np.uint8, args.out_pitch)
        out[:] = 0
        out[: args.k * itemsize].view(x.dtype)[:] = x[order]


def _turn(optype, args):
    values = memory(args.values, optype.dtype, (args.m, args.k // 2))
    meta = memory(args.meta, np.uint8, (args.m, metadata.meta_bytes(args.k)))
    image = layout.to_sm90(values, meta, args.k, optype)
    memory(args.image, np.uint8, image.shape)[:] = image


def _sums(args):
    return memory(
        args.sums, np.float64, (5, -(-args.rows // PATCH_ROWS), -(-args.k // PATCH_COLUMNS))
    )


def _put_amax(dense, source, args, counts):
    for i, start in enumerate(range(0, args.rows, args.band_rows)):
        bits = dense[start : start + args.band_rows].view(source.unsigned)
        top = magnitude_values(magnitudes(bits, source).max(keepdims=True), source)
        counts[i]["amax"] = max(counts[i]["amax"], top.reshape(-1).view(np.uint32)[0])


def _counts(args):
    fields = argument_layout("convert.cuh", "SP24_BAND_COUNTS").fields
    dtype = np.dtype([(name, np.uint32) for name, _, _ in fields])
    return memory(args.counts, dtype, -(-args.rows // args.band_rows))


def _prune(entry, source, args):
    assert entry.kind in PRUNERS
    _, score, pattern = entry.kind.split("_")
    assert pattern == "24" or args.dense != args.source, "neighbours are read where they lie"
    wanted = TWO_OF_FOUR if pattern == "24" else Pattern(args.kept, args.group)
    dense = memory(args.source, source.dtype, (args.rows, args.k)).copy()
    sums = _sums(args)
    if score == "magnitude":
        pruned = prune_magnitude(dense, wanted)
    else:
        assert args.norms % 16 == 0
        norms = memory(args.norms, np.float64, args.k)
        with np.errstate(invalid="ignore"):
            pruned = prune_wanda(dense, norms, wanted)
            lost = widen(dense).astype(np.float64) - widen(pruned)
        sums[3], sums[4] = patch_energies(dense, norms), patch_energies(lost, norms)
    memory(args.dense, source.dtype, dense.shape)[:] = pruned
    sums[0], sums[1] = patch_energies(dense), patch_energies(pruned)
    _put_amax(dense, source, args, _counts(args))


def _spec(args):
    if args.scale_columns == 1 and args.block_columns == args.k:
        return ScaleSpec("vector" if args.block_rows == 1 else "tensor")
    return ScaleSpec("block", (args.block_rows, args.block_columns))


def _amax(entry, source, args):
    dense = memory(args.source, source.dtype, (args.rows, args.k))
    found = amax(dense, _spec(args)).view(np.uint32)
    target = memory(args.amax, np.uint32, found.shape)
    np.maximum(target, found, out=target)


def _quantize(entry, source, args):
    dense = memory(args.source, source.dtype, (args.rows, args.k))
    counts, sums = _counts(args), _sums(args)
    sums[0] = patch_energies(dense)
    _put_amax(dense, source, args, counts)
    if args.prune:
        dense = prune_24(dense)
    bits = magnitudes(np.ascontiguousarray(dense).view(source.unsigned), source)
    crowded = ((bits != 0).reshape(args.rows, -1, 4).sum(axis=2) > 2).sum(axis=1)
    for i, start in enumerate(range(0, args.rows, args.band_rows)):
        counts[i]["crowded"] += crowded[start : start + args.band_rows].sum()
    if crowded.any() or find_nonfinite(dense) is not None:
        return
    optype = OPERAND_TYPES[entry.a_type]
    spec = _spec(args) if args.scale else ScaleSpec("none")
    overflow = "satfinite" if args.saturate else "nan"
    shape = (args.rows, args.k)
    if not args.scale and optype.scaled:
        raise AssertionError("no scale")
    info = PackInfo(shape, source.name, optype.name, spec, "given", "row", overflow)
    scale = memory(args.scale, np.float32, spec.shape(*shape)) if args.scale else None
    for i, start in enumerate(range(0, args.rows, args.band_rows)):
        rows = slice(start, min(start + args.band_rows, args.rows))
        band = replace(info, shape=(rows.stop - rows.start, args.k))
        first = start // spec.row_step
        part = scale if scale is None or spec.kind == "tensor" else scale[first:][: band_rows(band)]
        into = PackedMatrix.empty(band, part)
        stats = pack_rows(dense[rows], into)
        for name in ("kept", "clipped", "underflowed"):
            counts[i][name] += getattr(stats, name)
        memory(args.values, optype.dtype, (args.rows, args.k // 2))[rows] = into.values
        memory(args.meta, np.uint8, (args.rows, metadata.meta_bytes(args.k)))[rows] = into.meta
        places = metadata.kept_places(into.meta, args.k)
        kept = widen(dense[rows].reshape(-1)[places]).astype(np.float64)
        error = widen(into.values).astype(np.float64)
        error *= expand(part, spec, slice(0, len(kept)), slice(0, args.k)).astype(np.float64)
        error -= kept
        patches = slice(rows.start // PATCH_ROWS, -(-rows.stop // PATCH_ROWS))
        sums[1, patches] = sum_patches(kept, PATCH_COLUMNS // 2)
        sums[2, patches] = sum_patches(error, PATCH_COLUMNS // 2)


def band_rows(info):
    """Rows of scales that a band has."""
    return info.scale.shape(*info.shape)[0]


def refusal_of_both(run: Callable[..., object], engine: Any) -> str:
    """What ``run`` refuses with, on the CPU and by ``engine`` alike."""
    messages = []
    for how in ({}, {"engine": engine}):
        with pytest.raises(BadInputError) as fault:
            run(**how)
        messages.append(str(fault.value))
    assert messages[0] == messages[1]
    return messages[0]
