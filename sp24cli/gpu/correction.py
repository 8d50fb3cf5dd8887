"""What measured times say beyond the model: how far it was off for each kernel at problems alike.

A Gaussian process over the logarithm of measured by modelled time, for each shape of kernel (tile,
warpgroups, cluster, parts of K, CTAs an SM; all operand and output types together, since stages are
alike in bytes). Of a problem's kernels it is what sets them apart from one another that counts: a
card that is slower than the model for all of them alike says nothing of which is the fastest, nor
of a kernel that was not timed. Where nothing alike was measured it tends to no correction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.gpu.model import Points, residents, times_us
from sp24cli.kernels.choices import Measured, Problem
from sp24cli.kernels.manifest import Entry, load

Array = npt.NDArray[Any]

#: Over what problems are alike: octaves of cluster rows, of columns of tiles, of steps, of rounds
#: and of the share of the places that are taken; columns of padding by those of a tile; whether
#: more than half of the SMs' room is taken; and octaves of the bytes of all operands by the model's
#: time. These and the next were chosen by cross-validation over what `samples/fit_model.py` reads.
_ALIKE = np.array([1.95, 7.6, 2.9, 2.9, 0.75, 4.3, 1.0, 3.1])

#: Deviations, relative: of a kernel from the model beside others, of the mean of that, and of a
#: measurement, which counts the less the slower the kernel was beside the fastest, by this share.
_SPREAD, _MEAN, _NOISE, _SLOWER = 0.07, 0.021, 0.02, 0.4

#: Kernels that took more than so many times as long as the fastest say nothing of the fast ones.
_TRIM = 2.0


def _key(entry: Entry) -> tuple[object, ...]:
    """The shape of a kernel."""
    return (
        entry.tile_n,
        entry.consumers,
        entry.cluster,
        entry.split,
        residents(entry),
        entry.layout,
        entry.promote_k,
        entry.loop_scales,
    )


def _features(at: Points) -> Array:
    """[points, features] in units of `_ALIKE`."""
    rounds = at.rounds
    found = np.stack(
        [
            np.log2(at.tile_rows),
            np.log2(at.cols),
            np.log2(at.steps),
            np.log2(rounds),
            np.log2(at.tiles / at.places / rounds),
            at.cols - at.n / at.tile_n,
            at.busy > at.slots / 2,
            np.log2((at.a + at.b + at.d) / times_us(at)),
        ],
        axis=1,
    )
    return found / _ALIKE


def _covariance(one: Array, other: Array) -> Array:
    """Matérn's of smoothness 3/2: what sets kernels apart bends sharply in places. (The squared
    exponential left 39 of 530 problems beyond 3 %, where this leaves 34.)"""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None] - 2 * one @ other.T
    far = np.sqrt(3 * np.maximum(squares, 0.0))
    return _SPREAD**2 * (1 + far) * np.exp(-far) + _MEAN**2


class Correction:
    """The correction by some measured problems on ``sm_count`` SMs; kernels that there are no more
    are left out. A shape of kernel is worked out when it is first asked for (milliseconds)."""

    def __init__(self, measured: Iterable[Measured], sm_count: int) -> None:
        self._sm_count = sm_count
        #: By shape of kernel: its features, how far off it was, and the variance of that.
        self._rows: dict[object, tuple[Array, Array, Array]] = {}
        self._solved: dict[object, tuple[Array, Array]] = {}
        timed = list(_timed(measured))
        if not timed:
            return
        at = Points.of(((entry, problem) for entry, problem, *_ in timed), sm_count)
        us, behind = np.array([row[2:4] for row in timed]).T
        noise = 1 + ((behind - 1) / _SLOWER) ** 2
        off = np.log(us / times_us(at))
        of = np.array([row[4] for row in timed])
        mean = np.bincount(of, off / noise) / np.maximum(np.bincount(of, 1 / noise), 1e-9)
        off -= mean[of]
        features = _features(at)
        keys = [_key(row[0]) for row in timed]
        for key in dict.fromkeys(keys):
            rows = [i for i, other in enumerate(keys) if other == key]
            self._rows[key] = features[rows], off[rows], _NOISE**2 * noise[rows]

    def times_us(self, entries: Sequence[Entry], problem: Problem) -> Array:
        """Microseconds of each kernel, by the model and what was measured."""
        at = Points.of(((entry, problem) for entry in entries), self._sm_count)
        return times_us(at) * np.exp(self._offs(entries, _features(at)))

    def _offs(self, entries: Sequence[Entry], features: Array) -> Array:
        offs = np.zeros(len(entries))
        for i, entry in enumerate(entries):
            if _key(entry) in self._rows:
                known, weights = self._weights(_key(entry))
                offs[i] = (_covariance(features[i : i + 1], known) @ weights)[0]
        return offs

    def _weights(self, key: object) -> tuple[Array, Array]:
        """The features of what was measured of a shape of kernel, and what each is worth."""
        if key not in self._solved:
            known, off, noise = self._rows[key]
            covariance = _covariance(known, known) + np.diag(noise)
            self._solved[key] = known, np.linalg.solve(covariance, off)
        return self._solved[key]


def _timed(measured: Iterable[Measured]) -> Iterator[tuple[Entry, Problem, float, float, int]]:
    """Every time that says something: its kernel and problem, microseconds, these by the fastest's,
    and which measurement it is of."""
    by_name = {entry.name: entry for entry in load().entries}
    for i, row in enumerate(measured):
        least = min(row.times.values())
        for name, us in row.times.items():
            entry = by_name.get(name)
            if entry is not None and us < _TRIM * least:
                yield entry, row.problem, us, us / least, i
