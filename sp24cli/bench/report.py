"""A `BenchResult` as text: the table, CSV and Markdown. Nothing here prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from sp24cli.bench.ceiling import memory_bounds, memory_floor_us, shares
from sp24cli.bench.result import BenchResult, CaseResult, Environment, Figure, Row
from sp24cli.bench.statistics import Settings
from sp24cli.kernels.manifest import Manifest

HEAD = (
    "", "burst us", "TFLOPS", "sust. us", "TFLOPS", "GB/s", "of peak", "MHz", "W", "mJ", "TFLOPS/W",
    "sp24 is", "doubts",
)  # fmt: skip

#: Said once under every table, since the words are easily misread.
LEGEND = (
    "TFLOPS are dense-equivalent (2MNK/t). GB/s, share of peak (tensor cores at the highest "
    "clock), MHz, W and mJ (of one product) are of the sustained figure. 'sp24 is': the peer's "
    "time over sp24's, burst / sustained; * marks the fastest cuSPARSELt algorithms."
)

#: By where clocks come from.
_CLOCKS = {
    "counted": "MHz and cycles are those that the SMs counted",
    "nvml": "MHz and cycles are by NVML's clock, at the power cap up to a third above the SMs'",
}

#: Said as well where a ceiling was measured.
CEILING_LEGEND = (
    "Of ceiling, burst / sustained: the rate over that of sparse wgmmas alone or, marked 'copy', "
    "the time of the packed weight at the rate of a copy over the product's."
)


def head(result: BenchResult) -> tuple[str, ...]:
    """The heads of `cells`."""
    return (*HEAD[:7], *(["of ceiling"] * _has_ceiling(result)), *HEAD[7:])


def legend(result: BenchResult) -> str:
    return f"{LEGEND} {CEILING_LEGEND}" if _has_ceiling(result) else LEGEND


def _has_ceiling(result: BenchResult) -> bool:
    environment = result.environment
    return environment.copy_tbps is not None or bool(environment.wgmma)


def table(result: BenchResult, more: Sequence[str] = ()) -> str:
    """What the command prints: conditions, a table for each case, the summary, ``more`` lines."""
    lines = [*conditions(result), ""]
    for case in result.cases:
        lines += case_head(result, case)
        lines += align([head(result), *(cells(result, case, row) for row in case.rows)])
        lines += [f"  {label}: {reason}" for label, reason in skipped(case)]
        lines.append("")
    lines += [*failures(result), legend(result), *summary(result)]
    return "\n".join([*lines, *(["", *more] if more else [])])


def markdown(result: BenchResult, more: Sequence[str] = ()) -> str:
    """The same as Markdown, for a README or a results folder; ``more`` lines as they are."""
    lines = ["# sp24 bench", "", *(f"- {line}" for line in conditions(result)), ""]
    for case in result.cases:
        lines += [f"## {case.name.replace('->', '→')}", ""]
        lines += [f"{line}  " for line in case_head(result, case)[1:]]
        heads = head(result)
        lines += ["", pipes(heads), "| --- |" + " ---: |" * (len(heads) - 2) + " --- |"]
        lines += [pipes(cells(result, case, row)) for row in case.rows]
        lines += ["", *(f"- {label}: {reason}" for label, reason in skipped(case)), ""]
    lines += [f"- {line}" for line in failures(result)]
    lines += [legend(result), "", *(f"- {line}" for line in summary(result))]
    if more:
        lines += ["", "```text", *more, "```"]
    return "\n".join(lines) + "\n"


COLUMNS = (
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
         "figure", *COLUMNS, "throttle", "doubts")
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
                        *(plain(getattr(figure, column)) for column in COLUMNS),
                        " ".join(figure.throttle),
                        "; ".join(figure.doubts),
                    )
                )
    return text.getvalue()


def kernel_list(kernels: Manifest) -> str:
    """The GEMM kernels of the package, one a line."""
    head = ("kernel", "A", "B", "sum", "out", "order", "sums", "tile", "cluster", "split", "stages",
            "blocks", "threads", "shared", "registers")  # fmt: skip
    rows = [
        (
            e.name,
            e.a_type,
            e.b_type,
            e.accumulate,
            e.out_type,
            e.order,
            e.summation,
            f"{e.tile_m}x{e.tile_n}x{e.tile_k}",
            str(e.cluster),
            str(e.split),
            str(e.stages),
            str(e.stage_blocks),
            str(e.threads),
            str(e.smem_bytes),
            str(e.registers),
        )
        for e in kernels.entries
    ]
    return "\n".join([*align([head, *rows], left=7), f"fatbins {kernels.sha256}"])


def conditions(result: BenchResult) -> list[str]:
    """Where, with what and how it was measured."""
    return [*measured_on(result.environment, result.settings), *result.notes]


def measured_on(e: Environment, s: Settings) -> list[str]:
    """The machine and the way of measuring, a line each."""
    commit = f", commit {e.commit}" if e.commit else ""
    peers = "".join(f"; {name} {state}" for name, state in e.peers.items())
    return [
        f"{e.gpu}, {e.sm_count} SMs, up to {e.clock_mhz_max:.0f} MHz, driver {e.driver}; {e.date}",
        f"sp24 {e.sp24}{commit}, kernels {e.fatbin_sha256[:12]}{peers}",
        f"burst: median over the first {s.burst_ms:.0f} ms after {s.idle_ms:.0f} ms idle; "
        f"sustained: median from {s.sustained_from_ms:.0f} to {s.sustained_to_ms:.0f} ms of "
        f"running; {s.rounds} interleaved rounds of CUDA graphs",
        *([] if e.copy_tbps is None else [f"copying memory: {e.copy_tbps:.2f} TB/s, read + write"]),
        *_alone(e),
        *([_CLOCKS[e.clock]] if e.clock in _CLOCKS else []),
        *([] if e.unread is None else [e.unread]),
    ]


def _alone(environment: Environment) -> list[str]:
    """A line for each type that the tensor cores were timed with alone."""
    sources = {"ss": "A from shared memory", "rs": "A from registers"}
    return [
        f"sparse wgmmas alone, {of_type}: "
        + ", ".join(
            f"{sources.get(c.source, c.source)} {significant(c.burst_tflops)} burst / "
            f"{significant(c.sustained_tflops)} sustained"
            + (f" at {c.sm_mhz:.0f} MHz" if c.sm_mhz is not None else "")
            for c in environment.wgmma
            if c.type == of_type
        )
        + " TFLOPS"
        for of_type in dict.fromkeys(c.type for c in environment.wgmma)
    ]


def summary(result: BenchResult) -> list[str]:
    """Ours against each peer over all cases: geometric mean and least, burst and sustained."""
    lines = []
    for text, family, default in (
        ("its own fast sums", "sp24 fast", None),
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
            parts.append(f"{row.role.label} {significant(row.sustained.us)} us")
    return f"{case.shape} {case.type}: {', '.join(parts)} (sustained)"


def failures(result: BenchResult) -> list[str]:
    """A line for each case that gave no figures."""
    return [f"{failure.shape} has no figures: {failure.message}" for failure in result.failures]


def case_head(result: BenchResult, case: CaseResult) -> list[str]:
    """The problem, the kernel and how it was verified, the data; for a problem bound by memory how
    near to a plain copy it came."""
    worst = case.checks[0]
    share = f", largest error {worst.max_error / worst.bound:.0%} of bound" if worst.bound else ""
    size = f"{case.input_bytes / 1e6:.1f} MB of inputs"
    rotation = f"{case.slots} copies of {size} in turn" if case.slots > 1 else size
    if not case.past_l2:
        rotation += ", which still fit the L2"
    kernel = next(row.role.detail for row in case.rows if row.role.family == "sp24")
    by = "" if case.chosen_by is None else f" (by {case.chosen_by})"
    return [
        case.name,
        f"kernel {kernel}{by}; verified: {case.reference}{share}",
        f"A: {case.weight}; B: {case.activations}; {rotation}",
        *_against_copy(result, case),
    ]


def _against_copy(result: BenchResult, case: CaseResult) -> list[str]:
    e, ours = result.environment, case.best("sp24", "burst")
    if e.copy_tbps is None or ours is None or not memory_bounds(e, case):
        return []
    floor = memory_floor_us(case.shape, case.type, e.copy_tbps)
    return [
        f"bound by memory: the packed weight at the rate of a copy takes {significant(floor)} us, "
        f"{floor / ours.burst.us:.0%} of burst, {floor / ours.sustained.us:.0%} of sustained"
    ]


def cells(result: BenchResult, case: CaseResult, row: Row) -> tuple[str, ...]:
    """One row under `head`."""
    best = row is case.best("cusparselt", "burst") or row is case.best("cusparselt", "sustained")
    burst, sustained = row.burst, row.sustained
    ours = row.role.family.startswith("sp24")
    label = row.role.label if ours else f"{row.role.label}{' *' * best}"
    if row.role.family == "cusparselt" and row.role.default:
        label = f"{row.role.label} ({row.role.detail.split(' of ')[0]}){' *' * best}"
    return (
        label,
        significant(burst.us),
        significant(burst.tflops),
        significant(sustained.us),
        significant(sustained.tflops),
        f"{sustained.gbps:.0f}",
        f"{sustained.peak_share:.0%}",
        *([_of_ceiling(result, case, row)] * _has_ceiling(result)),
        number(sustained.sm_mhz, 0),
        number(sustained.power_w, 0),
        number(None if sustained.joules is None else 1e3 * sustained.joules, 1),
        number(sustained.tflops_per_watt, 2),
        _against(case, row),
        _doubts(row),
    )


def _of_ceiling(result: BenchResult, case: CaseResult, row: Row) -> str:
    found = shares(result.environment, case, row)
    if found is None:
        return ""
    by, burst, sustained = found
    return f"{'copy ' * (by == 'copy')}{burst:.0%} / {sustained:.0%}"


def _against(case: CaseResult, row: Row) -> str:
    ours = case.best("sp24", "burst")
    if ours is None or row.role.family == "sp24":
        return ""
    return f"x{row.burst.us / ours.burst.us:.2f} / x{row.sustained.us / ours.sustained.us:.2f}"


def _doubts(row: Row) -> str:
    parts = [f"burst {text}" for text in row.burst.doubts]
    parts += [f"sustained {text}" for text in row.sustained.doubts]
    if reasons := throttle(row):
        parts.append(f"throttled: {' '.join(reasons)}")
    return "; ".join(parts)


def throttle(row: Row) -> tuple[str, ...]:
    """What held the chip back in either figure."""
    return tuple(dict.fromkeys((*row.burst.throttle, *row.sustained.throttle)))


def skipped(case: CaseResult) -> Iterable[tuple[str, str]]:
    """(what was left out, why), many of one reason as one."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in case.skipped:
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


def pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def significant(value: float) -> str:
    """Four significant digits, never an exponent."""
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plain(value: float | int | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
