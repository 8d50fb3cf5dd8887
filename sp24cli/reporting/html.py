"""A report as one page of HTML that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from sp24cli import __version__
from sp24cli.ops.histogram import LEAST, MOST
from sp24cli.reporting.columns import Column, columns, visible
from sp24cli.reporting.layers import Layer, Summary
from sp24cli.reporting.markdown import CAVEAT, histogram_meaning

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --dim: #5d6873; --line: #d9dfe5; --page: #fff;
  --bar: #3a6ea5; --soft: #e8eef5; --doubt: #a33b00; --doubt-soft: #fdf0e7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ed; --dim: #98a3ae; --line: #38424c;
  --page: #14181c; --bar: #7fb0e0; --soft: #222b34; --doubt: #ffa878; --doubt-soft: #33241b; } }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1.5rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, dl { max-width: 62rem; }
.verdict { font-size: 1.15rem; }
.facts, figcaption, .note { color: var(--dim); }
.caveat { border-left: 3px solid var(--bar); padding: .4rem .9rem; background: var(--soft); }
.charts { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1rem 0; }
figure { margin: 0; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; position: sticky; top: 0; background: var(--page); }
th.text, td.text { text-align: left; }
td.words { white-space: normal; min-width: 14rem; text-align: left; color: var(--doubt); }
tr.doubt td { background: var(--doubt-soft); }
code { font: 13px/1.4 ui-monospace, monospace; }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin-left: 1.2rem; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .bars { fill: var(--bar); }
svg .axis { stroke: var(--line); fill: none; }
"""
_CHART = (320, 110)
_SPARK = (92, 22)
_BINS = 24


def as_html(summary: Summary) -> str:
    """The page, of the same bytes for the same run."""
    title = f"sp24 {summary.operation}: {visible(summary.source)}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            *_body(summary),
            f'<p class="note">sp24 {__version__}</p>',
            "</body></html>",
            "",
        ]
    )


def _body(summary: Summary) -> Iterator[str]:
    output = "dry run, nothing written" if summary.output is None else visible(summary.output)
    facts = [("output", output), *summary.facts]
    yield f'<p class="verdict">{escape(summary.verdict)}</p>'
    yield f'<p class="facts">{escape(" · ".join(f"{k}: {v}" for k, v in facts))}</p>'
    yield f'<p class="caveat">{escape(CAVEAT)}</p>'
    if summary.layers:
        yield from _charts(summary.layers)
        yield "<h2>Layers, the worst first</h2>"
        yield from _table(summary, columns(summary))
        yield "<h2>What the columns say</h2><dl>"
        for column in columns(summary):
            yield f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>"
        if any(layer.histogram for layer in summary.layers):
            yield f"<dt>histogram</dt><dd>{escape(histogram_meaning())}</dd>"
        yield "</dl>"
    if summary.skipped:
        yield "<h2>Left as they are</h2>"
        yield '<div class="table"><table><tr><th class="text">tensor</th>'
        yield '<th class="text">dtype</th><th>shape</th><th class="text">because</th></tr>'
        for item in summary.skipped:
            yield (
                f'<tr><td class="text"><code>{escape(visible(item.name))}</code></td>'
                f'<td class="text">{item.dtype}</td><td>{_shape(item.shape)}</td>'
                f'<td class="text">{escape(visible(item.reason))}</td></tr>'
            )
        yield "</table></div>"


def _charts(layers: Sequence[Layer]) -> Iterator[str]:
    yield '<div class="charts">'
    change = [100 * x.error for x in layers]
    yield from _distribution(change, "%", "change of the layers")
    kept = [100 * x.kept_energy for x in layers if x.kept_energy is not None]
    yield from _distribution(kept, "%", "energy that pruning kept in the layers")
    noise = [x.snr_db for x in layers if x.snr_db is not None]
    yield from _distribution(noise, "dB", "signal to noise of the layers")
    histograms = [x.histogram for x in layers if x.histogram]
    total = [sum(counts) for counts in zip(*histograms, strict=True)]
    if total:
        labels = (f"2^{LEAST}", f"2^{MOST}")
        yield _figure(total, labels, "all kept values: |value| / scale by powers of two")
    yield "</div>"


def _distribution(values: Sequence[float], unit: str, caption: str) -> Iterator[str]:
    """The chart of the finite ``values``, if there are any."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return
    low, high = min(values), max(values)
    counts = [0] * (_BINS if high > low else 1)
    for value in values:
        place = int((value - low) / (high - low) * len(counts)) if high > low else 0
        counts[min(place, len(counts) - 1)] += 1
    labels = (f"{low:.1f} {unit}", f"{high:.1f} {unit}" if high > low else "")
    yield _figure(counts, labels, caption)


def _figure(counts: Sequence[int], labels: tuple[str, str], caption: str) -> str:
    width, height = _CHART
    base = height - 16
    left, right = (escape(label) for label in labels)
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(caption)}">'
        f'<path class="bars" fill="#3a6ea5" d="{_bars(counts, width, base)}"/>'
        f'<path class="axis" d="M0 {base}.5H{width}"/>'
        f'<text x="0" y="{height - 3}">{left}</text>'
        f'<text x="{width}" y="{height - 3}" text-anchor="end">{right}</text></svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _bars(counts: Sequence[int], width: int, height: int) -> str:
    """The outline of a bar chart; what counts something is at least one unit high."""
    most = max(counts, default=0)
    step = width / max(1, len(counts))
    gap = min(1.0, step / 5)
    parts = []
    for i, count in enumerate(counts):
        if count:
            top = height - max(1.0, height * count / most)
            left, right = step * i, step * (i + 1) - gap
            parts.append(f"M{left:.1f} {height}V{top:.1f}H{right:.1f}V{height}Z")
    return "".join(parts)


def _table(summary: Summary, shown: Sequence[Column]) -> Iterator[str]:
    histogram = any(layer.histogram for layer in summary.layers)
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in shown)
    spark = '<th class="text">histogram</th>' if histogram else ""
    yield (
        '<div class="table"><table><tr><th class="text">layer</th><th class="text">dtype</th>'
        f'<th>shape</th>{titles}{spark}<th class="text">doubt</th></tr>'
    )
    width, height = _SPARK
    for layer in summary.layers:
        cells = "".join(f"<td>{escape(column.text(layer))}</td>" for column in shown)
        if histogram:
            chart = (
                f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
                '<path class="bars" fill="#3a6ea5" '
                f'd="{_bars(layer.histogram, width, height)}"/></svg>'
            )
            cells += f"<td>{chart if layer.histogram else ''}</td>"
        yield (
            f"<tr{' class=doubt' if layer.doubts else ''}>"
            f'<td class="text"><code>{escape(visible(layer.name))}</code></td>'
            f'<td class="text">{escape(layer.dtype)}</td><td>{_shape(layer.shape)}</td>{cells}'
            f'<td class="words">{escape("; ".join(layer.doubts))}</td></tr>'
        )
    yield "</table></div>"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"
