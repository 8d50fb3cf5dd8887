"""``python -m sp24cli.peers``: which peers load here, and a small checked product for each plan."""

from __future__ import annotations

import sys

import click

from sp24cli.errors import Sp24Error
from sp24cli.peers.selfcheck import PeerCheck, check, libraries


def main() -> int:
    """Print one line a library and one a product; 1 if one was wrong or a library failed, 5
    with no GPU."""
    loaded = []
    for library in libraries():
        if isinstance(library, str):
            click.echo(library)
        else:
            click.echo(f"{library.name} {library.version} from {library.path}")
            loaded.append(library)
    try:
        from sp24cli.gpu.device import Device

        device = Device.open()
    except (ImportError, Sp24Error) as error:
        click.echo(f"no product was run: {error}")
        return 5
    wrong = 0
    for library in loaded:
        try:
            for result in check(device, library):
                click.echo(_line(result))
                wrong += result.error is not None and not result.passed
        except Sp24Error as error:
            click.echo(f"{library.name}: {error}")
            wrong += 1
    return 1 if wrong else 0


def _line(result: PeerCheck) -> str:
    p = result.problem
    what = f"{result.peer:20s} {p.operand:>4s} -> {p.out:4s} {p.order}  "
    if result.error is None:
        return f"{what}refused: {result.reason}"
    return f"{what}relative error {result.error:.1e}{'' if result.passed else '  WRONG'}"


if __name__ == "__main__":
    sys.exit(main())
