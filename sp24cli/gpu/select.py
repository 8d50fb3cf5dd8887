"""Which kernel multiplies a given problem."""

from __future__ import annotations

from sp24cli.errors import Sp24Error
from sp24cli.kernels.manifest import Entry, load


def candidates(a_type: str, out_type: str, order: str) -> list[Entry]:
    """Every kernel for these types, in manifest order; `Sp24Error` if there is none."""
    found = [
        e
        for e in load().entries
        if (e.a_type, e.out_type, e.order) == (a_type, out_type, order)
    ]
    if not found:
        raise Sp24Error(f"no kernel multiplies {a_type} into {out_type} {order}")
    return found


def select(a_type: str, out_type: str, order: str, n: int) -> Entry:
    """The kernel with the smallest tile that takes ``n`` rows of B at once, or else the largest.

    A tile wider than N multiplies padding; one narrower reads A once more for every tile.
    """
    found = sorted(candidates(a_type, out_type, order), key=lambda e: e.tile_n)
    return next((e for e in found if e.tile_n >= n), found[-1])
