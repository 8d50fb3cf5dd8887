"""A `BenchResult` as text: the table, CSV and Markdown. Nothing here prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from sp24cli.bench.result import BenchResult, CaseResult, Figure, Row
from sp24cli.kernels.manifest import Manifest

_HEAD = (
    "", "burst us", "TFLOPS", "sust. us", "TFLOPS", "GB/s", "of peak", "MHz", "W", "TFLOPS/W",
    "sp24 is", "doubts",
)  # fmt: skip

#: Said once under every table, since the words are easily misread.
LEGEND = (
    "TFLOPS are dense-equivalent (2MNK/t). GB/s, share of peak (tensor cores at the highest "
    "clock), MHz and W are of the sustained figure. 'sp24 is': the peer's time over sp24's, "
    "burst / sustained; * marks the fastest cuSPARSELt algorithms."
)


def table(result: BenchResult) -> str:
    """What the command prints: conditions, a table for each case, the summary."""
    lines = [*conditions(result), ""]
    for case in result.cases:
        lines += _case_head(case)
        lines += align([_HEAD, *(_cells(case, row) for row in case.rows)])
        lines += [f"  {label}: {reason}" for label, reason in _short(case.skipped)]
        lines.append("")
    lines += [*_failures(result), LEGEND, *summary(result)]
    return "\n".join(lines)


def markdown(result: BenchResult) -> str:
    """The same as Markdown, for a README or a results folder."""
    lines = ["# sp24 bench", "", *(f"- {line}" for line in conditions(result)), ""]
    for case in result.cases:
        lines += [f"## {case.shape} {case.type} → {case.out} {case.order}", ""]
        lines += [f"{line}  " for line in _case_head(case)[1:]]
        lines += ["", _pipes(_HEAD), "| --- |" + " ---: |" * (len(_HEAD) - 2) + " --- |"]
        lines += [_pipes(_cells(case, row)) for row in case.rows]
        lines += ["", *(f"- {label}: {reason}" for label, reason in _short(case.skipped)), ""]
    lines += [f"- {line}" for line in _failures(result)]
    lines += [LEGEND, "", *(f"- {line}" for line in summary(result))]
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "us", "p5", "p95", "noise", "drift", "samples", "tflops", "gbps", "peak_share", "sm_mhz",
    "mem_mhz", "power_w", "limit_w", "temp_c", "joules", "tflops_per_watt",
)  # fmt: skip


def comma_separated(result: BenchResult) -> str:
    """One line a candidate and figure, with every number in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    environment = result.environment
    writer.writerow(
        ("date", "gpu", "m", "n", "k", "type", "out", "order", "candidate", "detail", "verified",
         "figure", *_COLUMNS, "throttle", "doubts")
    )  # fmt: skip
    for case in result.cases:
        for row in case.rows:
            for name in ("burst", "sustained"):
                figure: Figure = getattr(row, name)
                writer.writerow(
                    (
                        environment.date,
                        environment.gpu,
                        case.shape.m,
                        case.shape.n,
                        case.shape.k,
                        case.type,
                        case.out,
                        row.role.order,
                        row.role.label,
                        row.role.detail,
                        row.check.passed,
                        name,
                        *(_plain(getattr(figure, column)) for column in _COLUMNS),
                        " ".join(figure.throttle),
                        "; ".join(figure.doubts),
                    )
                )
    return text.getvalue()


def kernel_list(kernels: Manifest) -> str:
    """The GEMM kernels of the package, one a line."""
    head = ("kernel", "A", "B", "out", "order", "tile", "cluster", "stages", "threads", "shared",
            "registers")  # fmt: skip
    rows = [
        (
            e.name,
            e.a_type,
            e.b_type,
            e.out_type,
            e.order,
            f"{e.tile_m}x{e.tile_n}x{e.tile_k}",
            str(e.cluster),
            str(e.stages),
            str(e.threads),
            str(e.smem_bytes),
            str(e.registers),
        )
        for e in kernels.entries
    ]
    return "\n".join([*align([head, *rows], left=6), f"fatbins {kernels.sha256}"])


def conditions(result: BenchResult) -> list[str]:
    """Where, with what and how it was measured."""
    e, s = result.environment, result.settings
    commit = f", commit {e.commit}" if e.commit else ""
    peers = "; ".join(f"{name} {state}" for name, state in e.peers.items())
    return [
        f"{e.gpu}, {e.sm_count} SMs, up to {e.clock_mhz_max:.0f} MHz, driver {e.driver}; {e.date}",
        f"sp24 {e.sp24}{commit}, kernels {e.fatbin_sha256[:12]}; {peers}",
        f"burst: median over the first {s.burst_ms:.0f} ms after {s.idle_ms:.0f} ms idle; "
        f"sustained: median from {s.sustained_from_ms:.0f} to {s.sustained_to_ms:.0f} ms of "
        f"running; {s.rounds} interleaved rounds of CUDA graphs",
        *result.notes,
    ]


def summary(result: BenchResult) -> list[str]:
    """Ours against each peer over all cases: geometric mean and least, burst and sustained."""
    lines = []
    for text, family, default in (
        ("best cuSPARSELt", "cusparselt", None),
        ("default cuSPARSELt", "cusparselt", True),
        ("cuBLASLt dense", "cublaslt", None),
    ):
        parts = []
        for figure in ("burst", "sustained"):
            found = result.speedups(family, figure, default=default)
            if found is not None:
                mean, least = found
                parts.append(f"{figure} x{mean:.2f} (least x{least:.2f})")
        if parts:
            lines.append(f"sp24 against {text}: {', '.join(parts)}, geometric mean")
    return lines


def one_line(case: CaseResult) -> str:
    """A case as it passes by: ours beside the fastest peer, sustained."""
    parts = []
    for family in ("sp24", "cublaslt", "cusparselt"):
        row = case.best(family, "sustained")
        if row is not None:
            parts.append(f"{row.role.label} {_significant(row.sustained.us)} us")
    return f"{case.shape} {case.type}: {', '.join(parts)} (sustained)"


def _failures(result: BenchResult) -> list[str]:
    return [f"{failure.shape} has no figures: {failure.message}" for failure in result.failures]


def _case_head(case: CaseResult) -> list[str]:
    worst = case.checks[0]
    share = f", largest error {worst.max_error / worst.bound:.0%} of bound" if worst.bound else ""
    size = f"{case.input_bytes / 1e6:.1f} MB of inputs"
    rotation = f"{case.slots} copies of {size} in turn" if case.slots > 1 else size
    if not case.past_l2:
        rotation += ", which still fit the L2"
    kernel = next(row.role.detail for row in case.rows if row.role.family == "sp24")
    return [
        f"{case.shape} {case.type} -> {case.out} {case.order}",
        f"kernel {kernel}; verified: {case.reference}{share}",
        f"A: {case.weight}; B: {case.activations}; {rotation}",
    ]


def _cells(case: CaseResult, row: Row) -> tuple[str, ...]:
    best = row is case.best("cusparselt", "burst") or row is case.best("cusparselt", "sustained")
    burst, sustained = row.burst, row.sustained
    label = row.role.label if row.role.family == "sp24" else f"{row.role.label}{' *' * best}"
    if row.role.family == "cusparselt" and row.role.default:
        label = f"{row.role.label} ({row.role.detail.split(' of ')[0]}){' *' * best}"
    return (
        label,
        _significant(burst.us),
        _significant(burst.tflops),
        _significant(sustained.us),
        _significant(sustained.tflops),
        f"{sustained.gbps:.0f}",
        f"{sustained.peak_share:.0%}",
        _number(sustained.sm_mhz, 0),
        _number(sustained.power_w, 0),
        _number(sustained.tflops_per_watt, 2),
        _against(case, row),
        _doubts(row),
    )


def _against(case: CaseResult, row: Row) -> str:
    ours = case.best("sp24", "burst")
    if ours is None or row.role.family == "sp24":
        return ""
    return f"x{row.burst.us / ours.burst.us:.2f} / x{row.sustained.us / ours.sustained.us:.2f}"


def _doubts(row: Row) -> str:
    parts = [f"burst {text}" for text in row.burst.doubts]
    parts += [f"sustained {text}" for text in row.sustained.doubts]
    reasons = dict.fromkeys((*row.burst.throttle, *row.sustained.throttle))
    if reasons:
        parts.append(f"throttled: {' '.join(reasons)}")
    return "; ".join(parts)


def _short(skipped: Sequence[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Reasons for what was left out, many of one kind as one line."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in skipped:
        by_reason.setdefault(reason, []).append(label)
    for reason, labels in by_reason.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        yield f"{labels[0]}{more}", reason


def align(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Columns of text, the first ``left`` and the last flush left, the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i < left or i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _significant(value: float) -> str:
    """Four significant digits, never an exponent."""
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _plain(value: float | int | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
