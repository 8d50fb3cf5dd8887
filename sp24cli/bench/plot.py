"""A result as pictures: bars beside the peers, and a roofline. Needs matplotlib (sp24[plot])."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sp24cli.bench.rates import moved_bytes, peak_tflops
from sp24cli.bench.result import BenchResult, CaseResult, Row
from sp24cli.errors import Sp24Error
from sp24cli.optypes import OPERANDS
from sp24cli.pruning.pattern import pattern_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIGURES = ("burst", "sustained")
#: Two colours of one lightness are told apart by hue alone: these differ in both, also in grey
#: and for eyes that see no red (Okabe and Ito).
BLUE, ORANGE, YELLOW, GREY = "#0072B2", "#D55E00", "#E69F00", "#999999"


@dataclass(frozen=True)
class _Product:
    label: str
    color: str
    marker: str
    pick: Callable[[CaseResult, str], Row | None]


_PRODUCTS = (
    _Product("sp24", BLUE, "o", lambda case, figure: case.best("sp24", figure)),
    _Product(
        "cuSPARSELt, fastest of all ids",
        ORANGE,
        "s",
        lambda case, figure: case.best("cusparselt", figure),
    ),
    _Product(
        "cuSPARSELt, default",
        YELLOW,
        "^",
        lambda case, figure: case.best("cusparselt", figure, default=True),
    ),
    _Product("cuBLASLt, dense", GREY, "D", lambda case, figure: case.best("cublaslt", figure)),
)


def require() -> None:
    """`Sp24Error` in one line if matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise Sp24Error(f"a plot needs matplotlib ({error}): pip install 'sp24[plot]'") from None


def picture(result: BenchResult, kind: str) -> bytes:
    """The plots of a result as the bytes of an ``svg`` or ``png`` file, the same for the same
    result."""
    require()
    if not result.cases:
        raise Sp24Error("a plot needs a case with figures")
    return drawn(lambda: _draw(result), kind)


def drawn(draw: Callable[[], Figure], kind: str) -> bytes:
    """What ``draw`` makes, in the style of all plots, as the bytes of a file."""
    import matplotlib

    style: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
        "font.size": 9,
        "svg.hashsalt": "sp24",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    target = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = draw()
        figure.savefig(
            target, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
        )
    return target.getvalue()


def _draw(result: BenchResult) -> Figure:
    from matplotlib.figure import Figure

    cases = result.cases
    width = min(max(9.0, 2.5 + 1.25 * len(cases)), 100.0)
    figure = Figure(figsize=(width, 13.5), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(3, 1, height_ratios=(1, 1, 1.35))
    drawn = [p for p in _PRODUCTS if any(p.pick(case, "burst") for case in cases)]
    top = 1.22 * max(
        getattr(row, f).tflops for case in cases for row in case.rows for f in _FIGURES
    )
    for plot, name in zip(axes, _FIGURES, strict=False):
        _bars(plot, result, drawn, name, top)
    _roofline(axes[-1], result, [p for p in drawn if p.label != "cuSPARSELt, default"])
    axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.08), ncols=len(drawn), frameon=False)
    e = result.environment
    figure.suptitle(
        f"sp24 bench on {e.gpu}, {e.date}, kernels {e.fatbin_sha256[:12]}", x=0.01, ha="left"
    )
    return figure


def _types(result: BenchResult) -> list[str]:
    return sorted({case.type for case in result.cases})


def _tick(result: BenchResult, i: int, case: CaseResult) -> str:
    several = f"\n{case.type}" if len(_types(result)) > 1 else ""
    shape = case.shape
    return f"({i})\n{shape.m}×{shape.n}\n×{shape.k}{several}"


def _bars(
    plot: Axes, result: BenchResult, drawn: Sequence[_Product], name: str, top: float
) -> None:
    each = 0.8 / len(drawn)
    for place, product in enumerate(drawn):
        plot.bar(0, 0, color=product.color, label=product.label)
        for i, case in enumerate(result.cases):
            row = product.pick(case, name)
            if row is None:
                continue
            figure = getattr(row, name)
            at = i + (place - (len(drawn) - 1) / 2) * each
            plot.bar(at, figure.tflops, 0.92 * each, color=product.color)
            plot.annotate(
                f"{figure.tflops:.0f}",
                (at, figure.tflops),
                xytext=(0, 2),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7.5,
            )
    plot.set_title(f"{name}, {' and '.join(_types(result))}", loc="left")
    plot.set_ylabel("TFLOPS, dense-equivalent")
    plot.set_ylim(0, top)
    plot.set_xlim(-0.6, len(result.cases) - 0.4)
    plot.set_xticks(
        range(len(result.cases)),
        [_tick(result, i, case) for i, case in enumerate(result.cases, 1)],
    )
    plot.tick_params(axis="x", length=0)
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)


def _intensity(case: CaseResult, row: Row) -> float:
    """Dense-equivalent flops for each byte of A, B and D moved once."""
    types = OPERANDS[case.type]
    moved = moved_bytes(case.shape, types, case.out, sparse=row.role.sparse)
    return case.shape.flops / moved


def _roofline(plot: Axes, result: BenchResult, drawn: Sequence[_Product]) -> None:
    points: list[tuple[float, float]] = []
    # Ours last, so that it lies on top where points meet.
    for order, product in enumerate(reversed(drawn)):
        style: dict[str, Any] = {
            "color": product.color,
            "marker": product.marker,
            "markersize": 6,
            "linestyle": "none",
            "zorder": 3 + order,
        }
        for case in result.cases:
            burst, sustained = (product.pick(case, figure) for figure in _FIGURES)
            if burst is None or sustained is None:
                continue
            x = _intensity(case, burst)
            ys = burst.burst.tflops, sustained.sustained.tflops
            points += [(x, y) for y in ys]
            plot.plot([x, x], ys, color=product.color, linewidth=1, zorder=2)
            plot.plot(x, ys[0], **style)
            plot.plot(x, ys[1], markerfacecolor="white", **style)
        # The legend is read backwards.
        plot.plot([], [], label="sustained", markerfacecolor="white", **style)
        plot.plot([], [], label=f"{product.label}: burst", **style)
    for i, case in enumerate(result.cases, 1):
        ours = case.best("sp24", "burst")
        if ours is not None:
            highest = max(
                row.burst.tflops for row in case.rows if row.role.sparse == ours.role.sparse
            )
            plot.annotate(
                f"({i})",
                (_intensity(case, ours), highest),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                zorder=9,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
            )
    _limits(plot, result, points)
    plot.set_title("roofline; numbers as above", loc="left")
    plot.set_xlabel("dense-equivalent flops a byte of A, B and D (each moved once)")
    plot.set_ylabel("TFLOPS, dense-equivalent")
    plot.grid(which="both", alpha=0.2)
    plot.legend(loc="lower right", fontsize=8, ncols=len(drawn), reverse=True)


def _limits(plot: Axes, result: BenchResult, points: Sequence[tuple[float, float]]) -> None:
    """The axes, the peaks of the tensor cores, and the line of the copy bandwidth if known."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    e = result.environment
    peaks: dict[float, list[str]] = {}
    for name in _types(result):
        optype = OPERANDS[name].multiplied
        pattern = str(pattern_of(optype))
        for sparse in (True, False):
            peak = peak_tflops(
                optype,
                sparse=sparse,
                sm_count=e.sm_count,
                clock_khz=round(e.clock_mhz_max * 1000),
            )
            peaks.setdefault(peak, []).append(f"{name} {pattern if sparse else 'dense'}")
    top = max(peaks)
    left, right = 0.6 * min(x for x, _ in points), 1.8 * max(x for x, _ in points)
    left = min(left, right / 30)  # few shapes must not lie under the words on the left
    bottom = 0.5 * min(y for _, y in points)
    if e.copy_tbps is not None:
        ridge = top / e.copy_tbps
        left = min(left, 0.4 * ridge)
        plot.plot([left, ridge], [left * e.copy_tbps, top], color="black", linewidth=1)
        x = max(left, bottom / e.copy_tbps) ** 0.6 * ridge**0.4
        plot.annotate(
            f"copying memory: {e.copy_tbps:.2f} TB/s",
            (x, x * e.copy_tbps),
            xytext=(-6, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    for peak, kinds in peaks.items():
        plot.axhline(peak, color="black", linewidth=1, linestyle="-" if peak == top else ":")
        plot.annotate(
            f"tensor cores, {' and '.join(kinds)}, at {e.clock_mhz_max:.0f} MHz: {peak:.0f} TFLOPS",
            (left, peak),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
        )
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.set_xlim(left, right)
    plot.set_ylim(min(bottom, top / 10), 1.6 * top)
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
