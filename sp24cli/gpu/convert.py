"""Pruning by magnitude or wanda and packing on the GPU, to the bytes and the report of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sp24cli import metadata, scaling
from sp24cli.bits import NUMBER_TYPES
from sp24cli.calibration import AMAX
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.gpu.arguments import pack_struct, struct_dtype
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import enqueue_turn
from sp24cli.gpu.rows import MOST_LANES, Lane, stream_rows
from sp24cli.kernels import manifest
from sp24cli.layout import image_shape
from sp24cli.ops.choose import Losses
from sp24cli.ops.pack import Arrangement, Band, pack_band, pack_ranges
from sp24cli.ops.plan import not_finite, tensor_label
from sp24cli.ops.stream import prune_ranges
from sp24cli.packed import PackedMatrix, PackInfo, QuantStats
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import GROUP, PATCH_COLUMNS, PATCH_ROWS, find_nonfinite, fold_halves

Array = npt.NDArray[Any]

#: The kernels' name of each source type, by safetensors dtype.
_SOURCES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}

#: Elements of a batch: many of the bands of `ops.stream`, so that starting a copy and four kernels
#: does not show beside the copy.
BATCH_ELEMENTS = 1 << 23

#: As a float32's bits, what is not finite.
_NONFINITE = 0x7F80_0000
_NONE, _TENSOR = ScaleSpec("none"), ScaleSpec("tensor")

#: Of `Sum` in convert.cuh.
_SUMS = _ALL, _KEPT, _ERROR, _OUTPUT, _LOST = range(5)

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Batch:
    """Rows of a tensor on their way: ``band_rows`` is that of the bands they consist of."""

    rows: int
    columns: int
    band_rows: int

    @property
    def patches(self) -> tuple[int, int]:
        return -(-self.rows // PATCH_ROWS), -(-self.columns // PATCH_COLUMNS)

    @property
    def bands(self) -> list[slice]:
        starts = range(0, self.rows, self.band_rows)
        return [slice(start, min(start + self.band_rows, self.rows)) for start in starts]


class Converter:
    """The `ops.engine.Engine` of a GPU. One operation at a time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = device.name
        self._manifest = manifest.load()
        self._counts = struct_dtype(self._manifest.args["band_counts"])
        self._lanes: list[Lane] = []

    def prunes(self, entry: TensorEntry, pattern: Pattern = TWO_OF_FOUR) -> bool:
        # Whatever the pattern, rows are read by four.
        return entry.dtype in _SOURCES and entry.shape[1] % GROUP == 0

    def packs(self, info: PackInfo, arrange: Arrangement | None = None) -> bool:
        source = _SOURCES.get(info.source_dtype, "")
        known = self._manifest.conversion
        if info.calibration != AMAX or info.smooth is not None or info.permuted:
            return False
        if arrange is not None and arrange.norms is None:
            return False
        return known("quantize", source, info.type) is not None and (
            not info.optype.scaled or known("scales", "", info.type) is not None
        )

    def prune(
        self,
        file: SafetensorsFile,
        name: str,
        *,
        norms: Array | None = None,
        pattern: Pattern = TWO_OF_FOUR,
        workers: int,
    ) -> Iterator[tuple[Array, Sequence[Losses]]]:
        entry = file.entry(name)
        dtype = NUMBER_TYPES[entry.dtype].dtype
        ranges = prune_ranges(entry.shape)

        def work(
            lane: Lane, source: int, start: int, stop: int
        ) -> Callable[[], tuple[Array, Sequence[Losses]]]:
            batch = _batch_of(entry.shape, ranges, start, stop)
            result = self._prune(lane, batch, entry.dtype, source, norms, pattern)
            pruned = lane.download(result, (batch.rows, batch.columns), dtype)
            sums, counts = self._results(lane, batch)

            def losses() -> tuple[Array, Sequence[Losses]]:
                for i, rows in enumerate(batch.bands):
                    if counts[i]["amax"] >= _NONFINITE:
                        _refuse_nonfinite(file, name, start + rows.start, start + rows.stop)
                which = [_KEPT, _ALL] if norms is None else [_KEPT, _ALL, _LOST, _OUTPUT]
                by_band = zip(*_energies(batch, sums[which]).tolist(), strict=True)
                return pruned, [Losses(*energies) for energies in by_band]

            return losses

        return self._stream(file, name, ranges, work, workers)

    def scale(
        self,
        file: SafetensorsFile,
        name: str,
        info: PackInfo,
        *,
        workers: int,
        arrange: Arrangement | None = None,
    ) -> Array | None:
        if info.scale.kind != "tensor":
            return None
        ranges = prune_ranges(info.shape)
        norms = None if arrange is None else arrange.norms

        def work(lane: Lane, source: int, start: int, stop: int) -> Callable[[], Array]:
            batch = _batch_of(info.shape, ranges, start, stop)
            if norms is not None:
                self._prune(lane, batch, info.source_dtype, source, norms)
            self._amax(lane, batch, info.source_dtype, _TENSOR, source)
            found = lane.download("scale", (1,), np.float32)
            return lambda: found.copy()

        found = list(self._stream(file, name, ranges, work, workers))
        largest = scaling.join_amax(found, info.scale)
        return scaling.scales_from_amax(largest, info.optype.max_finite)

    def pack(
        self,
        file: SafetensorsFile,
        name: str,
        info: PackInfo,
        scale: Array | None,
        *,
        prune: bool,
        workers: int,
        arrange: Arrangement | None = None,
    ) -> Iterator[Band]:
        ranges = pack_ranges(info)
        optype = info.optype
        norms = None if arrange is None else arrange.norms

        def work(lane: Lane, source: int, start: int, stop: int) -> Callable[[], Band]:
            batch = _batch_of(info.shape, ranges, start, stop)
            shape = (batch.rows, batch.columns)
            spec = info.scale
            if norms is not None:
                # What it leaves is 2:4, and what comes is as if it had been given.
                self._prune(lane, batch, info.source_dtype, source, norms)
                dense_sums, dense_counts = self._results(lane, batch, of="dense ")
            own = scale is None and spec.kind != "none"
            if own:
                self._scales(lane, info, self._amax(lane, batch, info.source_dtype, spec, source))
            elif scale is not None:
                host = lane.host("scale", scale.shape, scale.dtype)
                np.copyto(host, scale)
                self.device.copy_in(lane.memory("scale", host.nbytes), host, lane.stream)
            self.launch(
                lane,
                "quantize",
                batch,
                info.source_dtype,
                info.type,
                spec=spec,
                source=source,
                values=lane.memory("values", batch.rows * batch.columns // 2 * optype.itemsize),
                meta=lane.memory("meta", batch.rows * metadata.meta_bytes(batch.columns)),
                scale=0 if spec.kind == "none" else lane.memory("scale", 0),
                prune=int(prune and norms is None),
                saturate=int(info.overflow == "satfinite"),
            )
            parts = replace(info, shape=shape, permuted=False).parts()
            if info.layout == "sm90":
                image = lane.memory("blocks", math.prod(image_shape(*shape, optype)))
                values, meta = lane.memory("values", 0), lane.memory("meta", 0)
                enqueue_turn(self.device, optype, shape, values, meta, image, lane.stream)
            memories = {"scale": "powers"} if spec.kind == "mx" else {}
            arrays = {
                part: lane.download(memories.get(part, part), size, dtype)
                for part, (dtype, size) in parts.items()
                if part != "scale" or own
            }
            if scale is not None:
                arrays["scale"] = scale
            sums, counts = self._results(lane, batch)
            if norms is None:
                dense_sums, dense_counts = sums, counts

            def band() -> Band:
                signals, errors = _energies(batch, sums[[_KEPT, _ERROR]]).tolist()
                energies = _energies(batch, dense_sums[[_ALL]])[0].tolist() if prune else ()
                stats = []
                for i, rows in enumerate(batch.bands):
                    count = counts[i]
                    if dense_counts[i]["amax"] >= _NONFINITE or count["crowded"]:
                        # The CPU names the place.
                        there = slice(start + rows.start, start + rows.stop)
                        pack_band(file, name, info, scale, there, prune=prune, arrange=arrange)
                    stats.append(_stats(info, count, signals[i], errors[i]))
                packed = PackedMatrix(
                    replace(info, shape=shape, permuted=False),
                    *(arrays.get(part) for part in ("values", "meta", "blocks", "scale")),
                )
                return Band(start, stop, packed, tuple(stats), tuple(energies))

            return band

        return self._stream(file, name, ranges, work, workers)

    def check(
        self,
        file: SafetensorsFile,
        name: str,
        look: Callable[[int, int], object],
        *,
        find_violations: bool,
        workers: int,
    ) -> Iterator[int]:
        entry = file.entry(name)
        ranges = prune_ranges(entry.shape)

        def work(lane: Lane, source: int, start: int, stop: int) -> Callable[[], int]:
            batch = _batch_of(entry.shape, ranges, start, stop)
            # What needs no scale finds the same faults.
            self.launch(
                lane,
                "quantize",
                batch,
                entry.dtype,
                "bf16",
                source=source,
                values=lane.memory("values", batch.rows * batch.columns),
                meta=lane.memory("meta", batch.rows * metadata.meta_bytes(batch.columns)),
            )
            _, counts = self._results(lane, batch)

            def size() -> int:
                for i, rows in enumerate(batch.bands):
                    crowded = find_violations and counts[i]["crowded"]
                    if counts[i]["amax"] >= _NONFINITE or crowded:
                        look(start + rows.start, start + rows.stop)
                return batch.rows * entry.nbytes // entry.shape[0]

            return size

        return self._stream(file, name, ranges, work, workers)

    def _stream(
        self,
        file: SafetensorsFile,
        name: str,
        ranges: list[tuple[int, int]],
        work: Callable[[Lane, int, int, int], Callable[[], _Result]],
        workers: int,
    ) -> Iterator[_Result]:
        """`stream_rows` of batches of ``ranges``, as many at once as there are ``workers``."""
        start, stop = ranges[0]
        band = (stop - start) * file.entry(name).shape[1]
        count = max(1, BATCH_ELEMENTS // band)
        batches = [
            (part[0][0], part[-1][1])
            for part in (ranges[i : i + count] for i in range(0, len(ranges), count))
        ]
        lanes = max(2, min(workers, MOST_LANES))
        while len(self._lanes) < lanes:
            self._lanes.append(Lane(self.device))
        return stream_rows(self._lanes[:lanes], file, name, batches, work)

    def launch(
        self,
        lane: Lane,
        kind: str,
        batch: Batch,
        dtype: str,
        a_type: str = "",
        *,
        spec: ScaleSpec = _NONE,
        **given: int,
    ) -> None:
        """Enqueue one of the kernels that walk the patches of a batch; ``given`` are those of its
        arguments that are not zero."""
        entry = self._manifest.conversion(kind, _SOURCES[dtype], a_type)
        assert entry is not None
        rows, columns = batch.rows, batch.columns
        down, across = batch.patches
        counts_bytes = len(batch.bands) * self._counts.itemsize
        counts = lane.memory("counts", counts_bytes)
        self.device.clear(counts, counts_bytes, lane.stream)
        block_rows, block_columns = spec.block or (1 if spec.kind == "vector" else rows, columns)
        # A larger block is no other.
        block_rows, block_columns = min(block_rows, rows), min(block_columns, columns)
        values = {
            "dense": 0,
            "values": 0,
            "meta": 0,
            "scale": 0,
            "amax": 0,
            "sums": lane.memory("sums", len(_SUMS) * down * across * 8),
            "counts": counts,
            "rows": rows,
            "k": columns,
            "band_rows": batch.band_rows,
            "block_rows": block_rows,
            "block_columns": block_columns,
            "scale_columns": -(-columns // block_columns),
            "prune": 0,
            "saturate": 1,
            "norms": 0,
            "kept": 0,
            "group": 0,
        }
        grid = -(-down * across // (entry.threads // 32))
        args = pack_struct(self._manifest.args[entry.args], values | given)
        self.device.launch(self.device.kernel(entry), grid, [args], lane.stream)

    def _prune(
        self,
        lane: Lane,
        batch: Batch,
        dtype: str,
        source: int,
        norms: Array | None,
        pattern: Pattern = TWO_OF_FOUR,
    ) -> str:
        """Enqueue pruning the lane's memory "source", which lies at ``source``; the name of the
        memory with the result, itself for 2:4."""
        # Every thread writes what it alone has read.
        result, dense, kind = "source", source, "24"
        if pattern != TWO_OF_FOUR:
            # It reads the neighbours, too.
            result, kind = "dense", "nm"
            itemsize = NUMBER_TYPES[dtype].dtype.itemsize
            dense = lane.memory(result, batch.rows * batch.columns * itemsize)
        score, weights = "magnitude", 0
        if norms is not None:
            score = "wanda"
            host = lane.host("norms", norms.shape, norms.dtype)
            np.copyto(host, norms)
            weights = lane.memory("norms", host.nbytes)
            self.device.copy_in(weights, host, lane.stream)
        self.launch(
            lane,
            f"prune_{score}_{kind}",
            batch,
            dtype,
            source=source,
            dense=dense,
            norms=weights,
            kept=pattern.kept,
            group=pattern.group,
        )
        return result

    def _amax(self, lane: Lane, batch: Batch, dtype: str, spec: ScaleSpec, source: int) -> int:
        """Enqueue the search for the largest magnitudes under the scales, into the lane's memory
        "scale"; their number."""
        count = math.prod(spec.shape(batch.rows, batch.columns))
        found = lane.memory("scale", 4 * count)
        self.device.clear(found, 4 * count, lane.stream)
        self.launch(lane, "amax", batch, dtype, spec=spec, source=source, amax=found)
        return count

    def _scales(self, lane: Lane, info: PackInfo, count: int) -> None:
        """Enqueue making scales of what `_amax` has found; those of kind ``mx`` go into the memory
        "powers", too, as they are stored."""
        entry = self._manifest.conversion("scales", "", info.type)
        assert entry is not None
        memory = lane.memory("scale", 4 * count)
        args = pack_struct(
            self._manifest.args[entry.args],
            {
                "amax": memory,
                "scale": memory,
                "powers": lane.memory("powers", count) if info.scale.kind == "mx" else 0,
                "count": count,
                "max_finite": int(info.optype.max_finite),
            },
        )
        grid = -(-count // entry.threads)
        self.device.launch(self.device.kernel(entry), grid, [args], lane.stream)

    def _results(self, lane: Lane, batch: Batch, *, of: str = "") -> tuple[Array, Array]:
        """Enqueue the download of sums and counts: by name of the sum, and by band. Those of
        kernels that follow on each other have a name, ``of``, each."""
        shape = (len(_SUMS), *batch.patches)
        sums = lane.download("sums", shape, np.float64, host=f"{of}sums")
        bands = len(batch.bands)
        counts = lane.download("counts", (bands,), self._counts, host=f"{of}counts")
        return sums, counts


def _batch_of(
    shape: tuple[int, ...], ranges: Sequence[tuple[int, int]], start: int, stop: int
) -> Batch:
    """Rows [start, stop) of a matrix that is cut into bands at ``ranges``, all but the last of
    one size."""
    return Batch(stop - start, shape[1], ranges[0][1] - ranges[0][0])


def _energies(batch: Batch, sums: Array) -> Array:
    """What ``sums`` [n, *patches] come to in each band, float64 [n, bands], added up as
    `sparsity.fold` does."""
    count, bands = len(sums), len(batch.bands)
    patches = -(-batch.band_rows // PATCH_ROWS) * batch.patches[1]
    padded = np.zeros((count, bands * patches))
    padded[:, : sums[0].size] = sums.reshape(count, -1)
    by_band = np.zeros((count, bands, 1 << max(0, patches - 1).bit_length()))
    by_band[..., :patches] = padded.reshape(count, bands, patches)
    # Of what is refused the sums may be anything.
    with np.errstate(over="ignore", invalid="ignore"):
        return fold_halves(by_band)


def _stats(info: PackInfo, count: Array, signal: float, error: float) -> QuantStats:
    overflows = count["clipped"] and info.overflow == "nan"
    return QuantStats(
        kept=int(count["kept"]),
        clipped=int(count["clipped"]),
        underflowed=int(count["underflowed"]),
        amax=float(count["amax"].view(np.float32)),
        error_energy=math.inf if overflows else error,
        signal_energy=signal,
    )


def _refuse_nonfinite(file: SafetensorsFile, name: str, start: int, stop: int) -> None:
    dense = file.array(name, slice(start, stop))
    if (place := find_nonfinite(dense)) is not None:
        raise not_finite(tensor_label(file, name), dense, start, place)
