"""``sp24 bench``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from sp24cli.cli import console
from sp24cli.cli.options import quiet_option, workers_option
from sp24cli.errors import Sp24Error, VerificationError

if TYPE_CHECKING:
    from sp24cli.bench.rates import Shape
    from sp24cli.bench.result import BenchResult, Progress

#: What is timed when nothing is named.
DEFAULT_SUITE = "llm"


def _shape(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
    from sp24cli.bench.problem import parse_shape

    try:
        return tuple(parse_shape(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return ()
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of token counts, as in 16,128,4096")
    return tuple(int(part) for part in parts)


def _file_option(name: str, what: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}", f"{name}_file", metavar="FILE", help=f"Write {what} ('-': to stdout)."
    )


@click.command()
@click.argument("packed", required=False, metavar="[PACKED]")
@click.option(
    "--shape",
    "shapes",
    metavar="MxNxK",
    multiple=True,
    callback=_shape,
    help="Time a random weight MxK on N tokens. Repeatable.",
)
@click.option(
    "--suite",
    type=click.Choice([DEFAULT_SUITE]),
    help="Time the shapes of large language models; the default when nothing is named.",
)
@click.option(
    "--n",
    "counts",
    metavar="N,N,...",
    callback=_counts,
    help="Tokens for the weights of PACKED.  [default: 16,128,4096]",
)
@click.option(
    "--type",
    "type_name",
    type=click.Choice(["e4m3", "f16", "bf16"]),
    help="Operand type of random weights.  [default: e4m3]",
)
@click.option(
    "--out",
    type=click.Choice(["bf16", "f16", "f32"]),
    help="Output type.  [default: f16 for f16, else bf16]",
)
@click.option(
    "--order",
    type=click.Choice(["nm", "mn"]),
    default="nm",
    show_default=True,
    help="D as tokens x features (nm) or features x tokens (mn).",
)
@click.option(
    "--scale",
    type=click.Choice(["tensor", "vector"]),
    help="Scale of random e4m3 weights; peers know tensor only.  [default: tensor]",
)
@click.option(
    "--activations",
    metavar="FILE[:NAME]",
    help="Activations from a safetensors or .npy file instead of random normal ones.",
)
@click.option("--kernel", metavar="NAME", help="Time this kernel instead of the one chosen.")
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Also time cuBLASLt and cuSPARSELt where they are installed.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Interleaved runs of each candidate.",
)
@click.option(
    "--noise-limit",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Median deviation above which a figure is marked doubtful.",
)
@click.option("--seed", type=int, default=24, show_default=True, help="Seed of the random data.")
@click.option("--list", "list_kernels", is_flag=True, help="List the kernels and stop. No GPU.")
@_file_option("json", "everything that was measured, as JSON")
@_file_option("csv", "one line a candidate and figure, as CSV")
@_file_option("md", "the tables as Markdown")
@workers_option
@quiet_option
def bench(
    packed: str | None,
    shapes: tuple[Shape, ...],
    suite: str | None,
    counts: tuple[int, ...],
    type_name: str | None,
    out: str | None,
    order: str,
    scale: str | None,
    activations: str | None,
    kernel: str | None,
    peers: bool,
    rounds: int,
    noise_limit: float,
    seed: int,
    list_kernels: bool,
    json_file: str | None,
    csv_file: str | None,
    md_file: str | None,
    workers: int | None,
    quiet: bool,
) -> None:
    """Verify and time the kernels on this GPU, beside dense and sparse libraries.

    Times the weights of PACKED, random weights of given shapes, or a suite of them. Every product
    is compared with float64 first. Prints microseconds, dense-equivalent TFLOPS, GB/s and the
    share of the chip's peak, burst and sustained, with clock, power and throttling beside them.
    """
    from sp24cli.kernels import manifest

    if list_kernels:
        from sp24cli.bench.report import kernel_list

        console.out(kernel_list(manifest.load()))
        return
    _check_usage(packed, shapes, suite, counts, type_name, scale, kernel)
    targets = _targets(json_file, csv_file, md_file)

    from sp24cli.bench import report
    from sp24cli.bench.plan import BenchPlan, plan_file, plan_shapes
    from sp24cli.bench.run import run
    from sp24cli.bench.statistics import Settings
    from sp24cli.gpu.device import Device
    from sp24cli.ops.stream import default_workers

    device = Device.open()
    from sp24cli.gpu.telemetry import Telemetry

    threads = workers or default_workers()
    notes: tuple[str, ...] = ()
    if packed is not None:
        cases, notes = plan_file(
            packed, counts, out=out, activations=activations, seed=seed, workers=threads
        )
    else:
        cases = plan_shapes(
            _shapes(shapes, suite),
            type_name or "e4m3",
            out=out,
            scale=scale or "tensor",
            activations=activations,
            seed=seed,
            workers=threads,
        )
    settings = Settings(rounds=rounds, noise_limit=noise_limit / 100, seed=seed)
    plan = BenchPlan(cases, order, kernel, peers, settings, threads, notes)
    with _progress(quiet) as progress:
        result = run(
            plan,
            device,
            telemetry=Telemetry(device),
            progress=progress,
            finished=lambda case: console.log(report.one_line(case), quiet=quiet),
        )
    _write(result, targets)
    if result.failures:
        worst = max(result.failures, key=lambda failure: failure.exit_code)
        wrong = worst.exit_code == VerificationError.exit_code
        raise (VerificationError if wrong else Sp24Error)(worst.message)


def _check_usage(
    packed: str | None,
    shapes: tuple[Shape, ...],
    suite: str | None,
    counts: tuple[int, ...],
    type_name: str | None,
    scale: str | None,
    kernel: str | None,
) -> None:
    from sp24cli.kernels import manifest

    if packed is not None and (shapes or suite):
        raise click.UsageError("give PACKED or --shape/--suite, not both")
    if packed is not None and (type_name or scale):
        raise click.UsageError("--type and --scale are for random weights; PACKED has its own")
    if packed is None and counts:
        raise click.UsageError("--n is for PACKED; a shape has its own N")
    if kernel is not None and kernel not in {entry.name for entry in manifest.load().entries}:
        raise click.UsageError(f"no kernel is called {kernel!r} (see sp24 bench --list)")


def _shapes(shapes: tuple[Shape, ...], suite: str | None) -> tuple[Shape, ...]:
    from sp24cli.bench.problem import SUITES

    if suite is None and not shapes:
        suite = DEFAULT_SUITE
    return (*shapes, *(SUITES[suite] if suite else ()))


def _targets(
    json_file: str | None, csv_file: str | None, md_file: str | None
) -> list[tuple[str, str]]:
    """(format, FILE) of what is to be written; at most one may go to stdout."""
    named = (("json", json_file), ("csv", csv_file), ("md", md_file))
    targets = [(kind, file) for kind, file in named if file is not None]
    if sum(file == "-" for _, file in targets) > 1:
        raise click.UsageError("only one of --json, --csv and --md can go to stdout")
    return targets


def _write(result: BenchResult, targets: list[tuple[str, str]]) -> None:
    """Write the files, and to stdout the table or what was sent there instead."""
    from sp24cli.bench import report

    def text(kind: str) -> str:
        if kind == "json":
            return json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n"
        return report.comma_separated(result) if kind == "csv" else report.markdown(result)

    # The table first: should a file not be writable, the numbers are not lost.
    if not any(file == "-" for _, file in targets):
        console.out(report.table(result))
    for kind, file in targets:
        if file == "-":
            console.out(text(kind).rstrip("\n"))
        else:
            _replace(Path(file), text(kind))


def _replace(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are private; a result is as readable as any other new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """On a terminal one line that changes; elsewhere nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with tqdm(bar_format="{desc}", leave=False, file=sys.stderr) as line:
        yield line.set_description_str
