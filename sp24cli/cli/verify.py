"""``sp24 verify``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.cli import console
from sp24cli.cli.options import (
    PATH,
    json_option,
    quiet_option,
    seed_option,
    source_argument,
    workers_option,
)
from sp24cli.errors import VerificationError
from sp24cli.ops.engine import DeviceChoice
from sp24cli.verify import NumericsResult, TensorVerdict, VerifyReport, verify_file


@click.command()
@source_argument("PACKED")
@click.option(
    "--against",
    metavar="DENSE",
    type=PATH,
    help="The file or folder that PACKED was made from, before or after pruning (after sparsegpt: "
    "the pruned one).",
)
@click.option(
    "--amax-history",
    metavar="FILE",
    type=PATH,
    help="With --against: the history that scales were taken from, to prove these too.",
)
@click.option(
    "--smooth",
    metavar="FILE",
    type=PATH,
    help="With --against: the amax of the activations that columns were smoothed by, to prove "
    "the factors too.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the products run; auto takes a Hopper GPU when there is one.",
)
@seed_option(0, "Of the activations.")
@workers_option
@json_option
@quiet_option
def verify(
    source: Path,
    against: Path | None,
    amax_history: Path | None,
    smooth: Path | None,
    device: DeviceChoice,
    seed: int,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove PACKED right: structure, agreement with DENSE bit for bit, and numerics.

    Numerics multiplies every weight by random activations and by the identity and compares
    each element with float64 under a derived bound: on a GPU by the kernels, on the CPU by
    decoding what they would read. The error printed is that of the whole product; of e4m3 on a
    GPU, with fast and with precise sums into float32. The product of a weight with smoothed columns
    is compared with that of the original as well, its activations divided and then quantized.
    Exits 3 and names the first wrong place where it differs.

    PACKED and DENSE are safetensors files or whole checkpoints, folders of shards with an index.
    """
    if against is None and (amax_history is not None or smooth is not None):
        raise click.UsageError("--amax-history and --smooth go with --against only")
    with console.progress("verify", quiet=quiet) as progress:
        report = verify_file(
            source,
            against,
            history=amax_history,
            activations=smooth,
            device=device,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    if as_json:
        console.out_json(report.to_json())
    else:
        _print(report)
    if report.failure is not None:
        raise VerificationError(f"{source}: {report.failure}")


def _print(report: VerifyReport) -> None:
    console.table(
        (
            "tensor",
            "shape",
            "type",
            "scale",
            "layout",
            "structure",
            "agreement",
            "of bound",
            "error",
        ),
        [_row(verdict) for verdict in report.tensors],
    )
    console.out()
    for note in _notes(report):
        console.out(note)
    right = sum(verdict.passed for verdict in report.tensors)
    console.out(f"{right} of {len(report.tensors)} packed tensors are right")
    if report.passed_through is not None:
        wrong = len(report.faults)
        console.out(
            f"{report.passed_through} tensors passed through, "
            + ("all the same" if not wrong else f"{wrong} wrong or missing")
        )


def _row(verdict: TensorVerdict) -> tuple[str, ...]:
    agreement = "-"
    if verdict.agreement is not None:
        agreement = "ok" if verdict.agreement.passed else "WRONG"
    return (
        verdict.name,
        console.shape(verdict.shape),
        verdict.type,
        verdict.scale,
        verdict.layout,
        "ok" if verdict.structure is None else "WRONG",
        agreement,
        *_numerics(verdict.numerics),
    )


def _numerics(result: NumericsResult | None) -> tuple[str, str]:
    """The largest error in terms of its bound, and the relative error of the product, by summation
    where there are several."""
    if result is None:
        return "not run", "-"
    if not result.passed:
        return "WRONG", "-"
    share = max((c.max_error / c.bound for c in result.checks if c.bound), default=0.0)
    errors = ", ".join(f"{summation} {error:.1e}" for summation, error in result.errors.items())
    return f"{100 * share:.2g} %", errors or f"{result.error:.1e}"


def _notes(report: VerifyReport) -> list[str]:
    """What the user should know of how it was checked, each remark once."""
    notes = []
    if report.device_note:
        notes.append(f"numerics ran on the CPU: {report.device_note}")
    else:
        notes.append(f"numerics ran on {'the CPU' if report.device == 'cpu' else report.device}")
    remarks = {v.numerics.note: 0 for v in report.tensors if v.numerics and v.numerics.note}
    remarks |= {v.agreement.note: 0 for v in report.tensors if v.agreement and v.agreement.note}
    return notes + list(remarks)
