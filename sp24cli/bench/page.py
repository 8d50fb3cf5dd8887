"""A result as one page of HTML that needs nothing beside it: plots, tables, comparison."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sp24cli.bench import report
from sp24cli.bench.plot import picture
from sp24cli.bench.result import BenchResult

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 78rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
svg { width: 100%; height: auto; }
p, ul { margin: .3rem 0; } .small { color: #555; font-size: .87rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
tr.ours { font-weight: 600; }
pre { font-size: .87rem; overflow-x: auto; }
"""


def page(result: BenchResult, more: Sequence[str] = ()) -> str:
    """The page; ``more`` lines (a comparison) stand before the tables, as they are."""
    title = f"sp24 bench on {result.environment.gpu}, {result.environment.date}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        "<h1>sp24 bench</h1>",
        bullets(report.conditions(result)),
        bullets([*report.summary(result), *report.failures(result)]),
        _svg(result),
    ]
    if more:
        parts.append(f"<h2>Against an earlier run</h2><pre>{escape(chr(10).join(more))}</pre>")
    for case in result.cases:
        head, *rest = report.case_head(result, case)
        parts.append(f"<h2>{escape(head)}</h2>")
        parts += [f'<p class="small">{escape(line)}</p>' for line in rest]
        parts.append('<div class="wide"><table>')
        parts.append(table_row("th", report.head(result), ""))
        for row in case.rows:
            kind = ' class="ours"' if row.role.family == "sp24" else ""
            parts.append(table_row("td", report.cells(result, case, row), kind))
        parts.append("</table></div>")
        parts += [
            f'<p class="small">{escape(label)}: {escape(reason)}</p>'
            for label, reason in report.skipped(case)
        ]
    parts.append(f'<p class="small">{escape(report.legend(result))}</p></body></html>')
    return "\n".join(parts) + "\n"


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table_row(cell: str, texts: Sequence[str], attributes: str) -> str:
    inner = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts)
    return f"<tr{attributes}>{inner}</tr>"


def _svg(result: BenchResult) -> str:
    """The picture as an element: without the XML head, which HTML does not take."""
    text = picture(result, "svg").decode()
    return text[text.index("<svg") :]
