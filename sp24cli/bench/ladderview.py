"""A `LadderResult` as text, CSV, Markdown, picture and page. Nothing here prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from sp24cli.bench.ladder import LadderResult, RungRow
from sp24cli.bench.page import STYLE, bullets, table_row
from sp24cli.bench.plot import BLUE, GREY, ORANGE, YELLOW, drawn, require
from sp24cli.bench.report import (
    COLUMNS,
    align,
    measured_on,
    number,
    pipes,
    plain,
    significant,
    throttle,
)
from sp24cli.errors import Sp24Error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = (
    "rung", "burst", "last", "base", "sust.", "last", "base", "log", "log step", "cycles", "sust.",
    "of peak", "MHz", "changed",
)  # fmt: skip

LEGEND = (
    "burst and sust.(ained) are dense-equivalent TFLOPS (2MNK/t); 'last' is the gain over the main "
    "rung before, 'base' over the lowest. log: TFLOPS, and gain over its own step before, on an "
    "H800 PCIe with FP16 accumulation. cycles: what an SM spends on 128 x 256 of D by 128 bytes "
    "along K, by the clock in the burst and while sustained (the tensor cores alone: 512). "
    "Share of peak and MHz are of the sustained figure; + marks a side rung, on which no other "
    "builds."
)

_FIGURES = ("burst", "sustained")


def gain(result: LadderResult, rung: RungRow, figure: str, *, base: bool) -> float | None:
    """The time of the rung before (or of the lowest) over that of ``rung``; None for the lowest."""
    before = result.before(rung)
    if base and before is not None:
        before = result.rows[0]
    if before is None:
        return None
    return float(getattr(before.row, figure).us / getattr(rung.row, figure).us)


def name(rung: RungRow) -> str:
    """Number and label, a side rung marked."""
    return f"{rung.number:2d}{'+' if rung.side else ' '}{rung.label}"


def cells(result: LadderResult, rung: RungRow) -> tuple[str, ...]:
    """One rung under `HEAD`."""
    burst, sustained = rung.row.burst, rung.row.sustained
    columns: list[str] = []
    for figure in _FIGURES:
        last, base = (gain(result, rung, figure, base=b) for b in (False, True))
        columns += [
            significant(getattr(rung.row, figure).tflops),
            "" if last is None else f"{last - 1:+.1%}",
            "" if base is None else f"x{base:.2f}",
        ]
    return (
        name(rung),
        *columns,
        number(rung.log_tflops, 0),
        "" if rung.log_step is None else f"{rung.log_step:+.1%}",
        number(result.cycles(burst), 0),
        number(result.cycles(sustained), 0),
        f"{sustained.peak_share:.0%}",
        number(sustained.sm_mhz, 0),
        rung.changed,
    )


def head(result: LadderResult) -> list[str]:
    """The problem and how its products were verified."""
    which = "rungs with figures" if result.failures else "every rung"
    bits = (
        "with the bits of the last"
        if result.alike
        else "with one another's bits; the last sums in an order of its own"
    )
    return [
        f"{result.shape} {result.type} -> {result.out} {result.order}: the ladder of {result.type}",
        f"{which} verified in every element ({result.reference}), {bits}",
        f"A: {result.weight}; B: {result.activations}; {result.slots} copies of the inputs in turn",
    ]


def doubts(result: LadderResult) -> list[str]:
    """What a reader must know before trusting a figure, a line a rung; then what held which rungs
    back."""
    lines = []
    for rung in result.rows:
        parts = [f"{f} {text}" for f in _FIGURES for text in getattr(rung.row, f).doubts]
        if parts:
            lines.append(f"{rung.label}: {'; '.join(parts)}")
    reasons = sorted({reason for rung in result.rows for reason in throttle(rung.row)})
    for reason in reasons:
        held = [rung.number for rung in result.rows if reason in throttle(rung.row)]
        lines.append(f"throttled ({reason}): rungs {_ranges(held)}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, those that follow one another as in 5-16."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append("-".join(str(n) for n in dict.fromkeys((found[0], found[-1]))))
    return ", ".join(parts)


def failures(result: LadderResult) -> list[str]:
    """A line for each rung that gave no figures."""
    return [f"no figures: {failure.message}" for failure in result.failures]


def table(result: LadderResult) -> str:
    """What the command prints."""
    rows = [HEAD, *(cells(result, rung) for rung in result.rows)]
    return "\n".join(
        [
            *measured_on(result.environment, result.settings),
            "",
            *head(result),
            *align(rows),
            *(f"  {line}" for line in doubts(result)),
            "",
            *failures(result),
            LEGEND,
        ]
    )


def markdown(result: LadderResult) -> str:
    """The same as Markdown."""
    title, *rest = head(result)
    lines = ["# sp24 bench --ladder " + result.type, ""]
    lines += [f"- {line}" for line in measured_on(result.environment, result.settings)]
    lines += ["", f"## {title}", "", *(f"{line}  " for line in rest), ""]
    lines += [pipes(HEAD), "| --- |" + " ---: |" * (len(HEAD) - 2) + " --- |"]
    lines += [pipes(cells(result, rung)) for rung in result.rows]
    lines += ["", *(f"- {line}" for line in [*doubts(result), *failures(result)]), LEGEND]
    return "\n".join(lines) + "\n"


def comma_separated(result: LadderResult) -> str:
    """One line a rung and figure, with every number in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    e, shape = result.environment, result.shape
    writer.writerow(
        ("date", "gpu", "m", "n", "k", "type", "out", "order", "number", "rung", "side", "kernel",
         "figure", "cycles", *COLUMNS, "log_tflops", "log_step", "throttle", "doubts")
    )  # fmt: skip
    for rung in result.rows:
        for figure_name in _FIGURES:
            figure = getattr(rung.row, figure_name)
            writer.writerow(
                (
                    e.date, e.gpu, shape.m, shape.n, shape.k, result.type, result.out,
                    result.order, rung.number, rung.label, rung.side, rung.row.role.detail,
                    figure_name, plain(result.cycles(figure)),
                    *(plain(getattr(figure, column)) for column in COLUMNS),
                    plain(rung.log_tflops), plain(rung.log_step), " ".join(figure.throttle),
                    "; ".join(figure.doubts),
                )
            )  # fmt: skip
    return text.getvalue()


def picture(result: LadderResult, kind: str) -> bytes:
    """The ladder drawn, as the bytes of an ``svg`` or ``png`` file."""
    require()
    if not result.rows:
        raise Sp24Error("a plot needs a rung with figures")
    return drawn(lambda: _draw(result), kind)


def page(result: LadderResult) -> str:
    """The picture and the table as one page that needs nothing beside it."""
    title, *rest = head(result)
    svg = picture(result, "svg").decode()
    rows = [
        table_row("td", cells(result, rung), ' class="ours"' if rung is result.rows[-1] else "")
        for rung in result.rows
    ]
    return (
        "\n".join(
            [
                "<!DOCTYPE html>",
                '<html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
                f"<h1>{escape(title)}</h1>",
                bullets([*measured_on(result.environment, result.settings), *rest]),
                svg[svg.index("<svg") :],
                '<div class="wide"><table>',
                table_row("th", HEAD, ""),
                *rows,
                "</table></div>",
                bullets([*doubts(result), *failures(result)]),
                f'<p class="small">{escape(LEGEND)}</p></body></html>',
            ]
        )
        + "\n"
    )


def _draw(result: LadderResult) -> Figure:
    from matplotlib.figure import Figure

    width = min(max(8.0, 2.0 + 0.62 * len(result.rows)), 40.0)
    figure = Figure(figsize=(width, 8.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    _bars(upper, result)
    _climb(lower, result, result.rows)
    lower.set_xticks(
        range(len(result.rows)),
        [f"{r.number}{'+' if r.side else ''} {r.label}" for r in result.rows],
        rotation=40,
        ha="right",
    )
    figure.suptitle(
        f"The ladder of {result.type} at {result.shape} on {result.environment.gpu}, "
        f"{result.environment.date}",
        x=0.01,
        ha="left",
    )
    return figure


def _bars(plot: Axes, result: LadderResult) -> None:
    for place, (figure_name, color) in enumerate(zip(_FIGURES, (BLUE, YELLOW), strict=True)):
        heights = [getattr(r.row, figure_name).tflops for r in result.rows]
        at = [i + (place - 0.5) * 0.4 for i in range(len(heights))]
        bars = plot.bar(at, heights, 0.38, color=color, label=figure_name)
        plot.bar_label(bars, [f"{h:.0f}" for h in heights], rotation=90, padding=2, fontsize=7)
        for bar, rung in zip(bars, result.rows, strict=True):
            if rung.side:
                bar.set_alpha(0.45)
    top = max(max(r.row.burst.tflops, r.row.sustained.tflops) for r in result.rows)
    plot.set_ylim(0, 1.16 * top)
    plot.set_ylabel("TFLOPS, dense-equivalent")
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)
    plot.legend(loc="upper left", frameon=False)


def _climb(plot: Axes, result: LadderResult, rows: Sequence[RungRow]) -> None:
    """Each rung over the lowest, and the log's steps over its own."""
    main = [(i, r) for i, r in enumerate(rows) if not r.side]
    for figure_name, color, marker in (("burst", BLUE, "o"), ("sustained", YELLOW, "s")):
        base = getattr(rows[0].row, figure_name).us
        plot.plot(
            [i for i, _ in main],
            [base / getattr(r.row, figure_name).us for _, r in main],
            color=color,
            marker=marker,
            markersize=4,
            label=f"sp24, {figure_name}",
        )
    logged = [(i, r.log_tflops) for i, r in main if r.log_tflops is not None]
    if logged and logged[0][0] == 0:
        plot.plot(
            [i for i, _ in logged],
            [tflops / logged[0][1] for _, tflops in logged],
            color=ORANGE,
            marker="^",
            markersize=5,
            linestyle="--",
            label="the log, H800 PCIe",
        )
    plot.axhline(1.0, color=GREY, linewidth=1)
    plot.set_ylabel("× the lowest rung")
    plot.grid(axis="y", alpha=0.3)
    plot.legend(loc="upper left", frameon=False)
