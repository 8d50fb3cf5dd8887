"""What ``sp24 bench --ladder`` and ``--explain`` take and give."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sp24cli.bench.ladder import LadderPlan, LadderResult
    from sp24cli.bench.rates import Shape
    from sp24cli.bench.statistics import Settings


def explanation(name: str, ladder: str | None) -> str:
    """The text on a rung; a usage error that lists the rungs for one that does not exist."""
    from sp24cli.bench.rungs import LADDERS, NOTES, explain
    from sp24cli.kernels import manifest

    text = explain(manifest.load().rungs, name, ladder)
    if text is None:
        known = [
            f"{of}: {', '.join(label for kind, label in NOTES if kind == of)}"
            for of in LADDERS
            if ladder in (None, of)
        ]
        raise click.UsageError(f"no rung is called {name!r}: there are {'; '.join(known)}")
    return text


def plan(
    ladder: str,
    rungs: tuple[str, ...],
    shapes: tuple[Shape, ...],
    settings: Settings,
    workers: int,
) -> LadderPlan:
    """The plan of a climb; usage errors for more than one shape or an unknown rung."""
    from sp24cli.bench.ladder import SHAPE, plan_ladder
    from sp24cli.kernels import manifest

    if len(shapes) > 1:
        raise click.UsageError("--ladder takes one --shape")
    try:
        return plan_ladder(
            ladder,
            manifest.load().rungs,
            rungs,
            shape=shapes[0] if shapes else SHAPE,
            settings=settings,
            workers=workers,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def renderers(result: LadderResult) -> Callable[[str], bytes]:
    """The result in a format by its name; the table for the empty one."""
    from sp24cli.bench import ladderview

    def content(kind: str) -> bytes:
        if kind == "json":
            return (json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode()
        if kind == "csv":
            return ladderview.comma_separated(result).encode()
        if kind == "md":
            return ladderview.markdown(result).encode()
        if kind == "html":
            return ladderview.page(result).encode()
        if kind:
            return ladderview.picture(result, kind)
        return ladderview.table(result).encode()

    return content
