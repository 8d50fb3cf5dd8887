"""Which kernel multiplies a given problem."""

from __future__ import annotations

from sp24cli.errors import Sp24Error
from sp24cli.kernels.manifest import Entry, load

#: SM cycles a stage takes, by tile N: measured on an H200 where M and N fill it.
_STEP_CYCLES = {256: 640, 128: 464, 64: 384, 16: 300}


def candidates(a_type: str, out_type: str, order: str) -> list[Entry]:
    """Every kernel for these types, in manifest order; `Sp24Error` if there is none."""
    found = [
        e for e in load().entries if (e.a_type, e.out_type, e.order) == (a_type, out_type, order)
    ]
    if not found:
        raise Sp24Error(f"no kernel multiplies {a_type} into {out_type} {order}")
    return found


def cta_tiles(entry: Entry, m: int, n: int) -> int:
    """Tiles of D, counted a CTA each, whole clusters along M."""
    return -(-m // (entry.tile_m * entry.cluster)) * entry.cluster * -(-n // entry.tile_n)


def select(a_type: str, out_type: str, order: str, m: int, n: int, sm_count: int) -> Entry:
    """The kernel whose rounds of tiles over the SMs take the fewest cycles by K.

    A tile wider than N multiplies padding, a narrower one reads A once more a column of tiles, and
    tiles that do not fill the last round leave SMs idle.
    """

    def cycles(entry: Entry) -> tuple[int, int]:
        rounds = -(-cta_tiles(entry, m, n) // sm_count)
        return rounds * _STEP_CYCLES[entry.tile_n], entry.tile_n

    return min(candidates(a_type, out_type, order), key=cycles)
