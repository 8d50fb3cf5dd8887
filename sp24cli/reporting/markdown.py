"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from sp24cli.ops.histogram import LEAST, MOST
from sp24cli.reporting.columns import columns, visible
from sp24cli.reporting.layers import HIGH_SUBNORMAL, Summary

_BARS = "·▁▂▃▄▅▆▇█"
CAVEAT = (
    "These numbers describe weights, not answers. They show which layers suffered, not whether "
    "the model still does its work: measure that on its own task, with the original beside it. "
    "If it does not, leave out the layers at the top (--exclude), or calibrate (--method)."
)


def as_markdown(summary: Summary) -> str:
    """The report in a few tables, the worst layers first."""
    shown = columns(summary)
    histogram = any(layer.histogram for layer in summary.layers)
    head = ["layer", "shape", *(column.title for column in shown)]
    head += ["histogram"] * histogram + ["doubt"]
    rows = [
        [
            f"`{visible(layer.name)}`",
            "×".join(map(str, layer.shape)),
            *(column.text(layer) for column in shown),
            *([sparkline(layer.histogram)] * histogram),
            "; ".join(layer.doubts),
        ]
        for layer in summary.layers
    ]
    lines = [f"# sp24 {summary.operation}: {visible(summary.source)}", "", summary.verdict, ""]
    lines += [f"- {name}: {visible(value)}" for name, value in summary.facts]
    lines += ["", CAVEAT, "", "## Layers, the worst first", ""]
    lines += _table(head, rows)
    lines += ["", "## What the columns say", ""]
    lines += [f"- **{column.title}**: {column.meaning}" for column in shown]
    if histogram:
        lines.append(f"- **histogram**: {histogram_meaning()}")
    if summary.skipped:
        lines += ["", "## Left as they are", ""]
        lines += _table(
            ["tensor", "dtype", "shape", "because"],
            [
                [f"`{visible(t.name)}`", t.dtype, "×".join(map(str, t.shape)), t.reason]
                for t in summary.skipped
            ],
        )
    return "\n".join(lines) + "\n"


def histogram_meaning() -> str:
    return (
        f"The kept values by powers of two of |value| / scale, from 2^{LEAST} on the left to "
        f"2^{MOST} on the right, where E4M3 ends at 448. Full bars on the right and a slope to "
        "the left are as it should be; the three bars at the left end are values with "
        f"fewer bits, about to become zero: more than {HIGH_SUBNORMAL:.0%} in them is doubtful."
    )


def sparkline(counts: Sequence[int]) -> str:
    """``counts`` as a row of bars; none is empty that counts something."""
    most = max(counts, default=0)
    steps = len(_BARS) - 1
    return "".join(_BARS[-(-steps * count // most) if most else 0] for count in counts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(head), ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
