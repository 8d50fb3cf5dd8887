"""``sp24 bench``."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from sp24cli.checkpoint.header import label
from sp24cli.cli import climb, console
from sp24cli.cli.options import quiet_option, seed_option, workers_option
from sp24cli.cli.sidefile import check_side_file
from sp24cli.errors import Interrupted, Sp24Error, VerificationError

if TYPE_CHECKING:
    from sp24cli.bench.ladder import LadderPlan, LadderResult
    from sp24cli.bench.plan import BenchPlan
    from sp24cli.bench.rates import Shape
    from sp24cli.bench.result import BenchResult, Failure, Progress
    from sp24cli.gpu.device import Device
    from sp24cli.scaling import ScaleKind

#: The suites of bench/problem.py; the first is what is timed when nothing is named.
SUITES = ("llm", "select30", "grid", "fit", "fit-few")

#: Endings of --plot.
PLOTS = ("svg", "png", "html")

#: Options, by their parameters, that stand beside --from, beside --ladder, and not beside --tune.
_RENDERING = {
    "from_file", "baseline", "plot_file", "json_file", "csv_file", "md_file", "force", "quiet",
}  # fmt: skip
_CLIMBING = {
    "ladder", "rungs", "shapes", "rounds", "noise_limit", "seed", "json_file", "csv_file",
    "md_file", "plot_file", "force", "workers", "quiet",
}  # fmt: skip
_NOT_TUNING = {
    "baseline", "plot_file", "csv_file", "md_file", "ceiling", "kernel", "peers", "rounds",
    "noise_limit",
}  # fmt: skip


def _shape(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
    from sp24cli.bench.problem import parse_shape

    try:
        return tuple(parse_shape(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    from sp24cli.bench.problem import parse_counts

    if value is None:
        return ()
    try:
        return parse_counts(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):  # FloatRange lets NaN pass
        raise click.BadParameter(f"{value} is not a finite number")
    return value


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
    type=click.Choice(SUITES),
    help="Time the shapes of large language models (llm; the default when nothing is named), "
    "30 made from the seed to check the choice of kernels (select30), or those that the table of "
    "kernels is made from (grid, fit, fit-few).",
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
    type=click.Choice(["e4m3", "e5m2", "f16", "bf16", "s8", "tf32"]),
    help="Operand type of random weights, and of the activations.  [default: e4m3]",
)
@click.option(
    "--b-type",
    type=click.Choice(["e4m3", "e5m2", "bf16", "f16"]),
    help="Type of the activations, where it is the other FP8 type, or bf16 or f16 beside e4m3, "
    "which is then widened to it.",
)
@click.option(
    "--out",
    type=click.Choice(["bf16", "f16", "f32", "s32"]),
    help="Output type; s32 of s8 alone, without scales.  [default: f16 for f16, f32 for tf32, s32 "
    "for s8, else bf16]",
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
    type=click.Choice(["tensor", "vector", "block", "mx"]),
    help="Scale of random 8-bit weights; peers know tensor only. Block, of e4m3, is 128x128, with "
    "activations scaled by token and 128 of K. Mx, and blocks of fewer than 64 columns, are for "
    "activations of 16 bits.  [default: tensor]",
)
@click.option(
    "--block",
    metavar="ROWSxCOLUMNS",
    help="The block of --scale block, as in 32x32.  [default: 128x128]",
)
@click.option(
    "--accumulate",
    type=click.Choice(["fast", "precise", "f16"]),
    default="fast",
    show_default=True,
    help="Sums of the tensor cores alone, or those of e4m3 promoted to float32 every 256 of K, or "
    "those of f16 kept in f16, of eleven bits; either is timed beside the fast ones. Block scales "
    "are promoted every 128 in any case.",
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
    help="Also time cuBLASLt and cuSPARSELt where they are installed (sp24[peers]), or at the "
    "paths in SP24_CUBLASLT and SP24_CUSPARSELT. cuBLASLt gives the float64 reference either way.",
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
    callback=_finite,
    help="Median deviation above which a figure is marked doubtful.",
)
@seed_option(24, "Seed of the random data.")
@click.option(
    "--ceiling",
    is_flag=True,
    help="Measure the copy bandwidth and the sparse tensor cores alone too, and give every product "
    "as a share of what bounds it.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Time every kernel that applies, quickly, and keep the choice for this GPU in the cache "
    "folder instead. --json FILE writes the times.",
)
@click.option(
    "--baseline",
    metavar="FILE",
    help="Compare with an earlier result (of --json): what moved, and if by more than the noise.",
)
@click.option(
    "--from",
    "from_file",
    metavar="FILE",
    help="Show an earlier result (of --json) instead of measuring. No GPU.",
)
@click.option(
    "--ladder",
    type=click.Choice(["e4m3", "f16"]),
    help="Climb the ladder of this operand type instead: kernels that differ in one thing each, "
    "from a plain one to the one that sp24 chooses, at --shape.  [default shape: 4096x8192x8192]",
)
@click.option(
    "--rung",
    "rungs",
    metavar="NAME",
    multiple=True,
    help="Time this rung of the ladder (a name, number or kernel) and the last. Repeatable.",
)
@click.option(
    "--explain", metavar="RUNG", help="Say what a rung changes and why that helps. No GPU."
)
@click.option("--list", "list_kernels", is_flag=True, help="List the kernels and stop. No GPU.")
@_file_option("json", "everything that was measured, as JSON")
@_file_option("csv", "one line a candidate and figure, as CSV")
@_file_option("md", "the tables as Markdown")
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    help="Draw bars beside the peers and a roofline: .svg, .png, or .html with the tables "
    "(needs sp24[plot]).",
)
@click.option("--force", is_flag=True, help="Replace files of results that exist.")
@workers_option
@quiet_option
@click.pass_context
def bench(
    context: click.Context,
    packed: str | None,
    shapes: tuple[Shape, ...],
    suite: str | None,
    counts: tuple[int, ...],
    type_name: str | None,
    b_type: str | None,
    out: str | None,
    order: str,
    scale: ScaleKind | None,
    block: str | None,
    accumulate: str,
    activations: str | None,
    kernel: str | None,
    peers: bool,
    rounds: int,
    noise_limit: float,
    seed: int,
    ceiling: bool,
    tune: bool,
    baseline: str | None,
    from_file: str | None,
    ladder: str | None,
    rungs: tuple[str, ...],
    explain: str | None,
    list_kernels: bool,
    json_file: str | None,
    csv_file: str | None,
    md_file: str | None,
    plot_file: str | None,
    force: bool,
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
        _refuse(context, "--list", _given(context) - {"list_kernels", "quiet"})
        from sp24cli.bench.report import kernel_list

        console.out(kernel_list(manifest.load()))
        return
    if explain is not None:
        _refuse(context, "--explain", _given(context) - {"explain", "ladder"})
        console.out(climb.explanation(explain, ladder))
        return
    if from_file is not None:
        _refuse(context, "--from", _given(context) - _RENDERING)
    if tune:
        _refuse(context, "--tune", _given(context) & _NOT_TUNING)
    if ladder is not None:
        _refuse(context, "--ladder", _given(context) - _CLIMBING)
    elif rungs:
        raise click.UsageError("--rung is for --ladder")
    _check_usage(packed, shapes, suite, counts, type_name, scale, kernel)
    if block is not None and scale != "block":
        raise click.UsageError("--block is for --scale block")
    if packed is None:
        _check_types(type_name or "e4m3", b_type, accumulate, out, order, scale, block, kernel)
    targets = _targets(json_file, csv_file, md_file, plot_file)
    _check_targets(targets, [from_file, baseline, packed, activations], overwrite=force)

    from sp24cli.bench.ladder import LadderResult
    from sp24cli.bench.reading import read_any, read_result

    earlier = None if baseline is None else read_result(baseline)
    if from_file is not None:
        shown = read_any(from_file)
        if not isinstance(shown, LadderResult):
            _write(shown, targets, earlier)
        elif earlier is not None:
            raise click.UsageError("--baseline does not go with the result of a ladder")
        else:
            _deliver(targets, climb.renderers(shown))
        return

    from sp24cli.bench.plan import BenchPlan, plan_file, plan_shapes
    from sp24cli.bench.statistics import Settings
    from sp24cli.gpu.device import Device
    from sp24cli.ops.stream import default_workers

    if ladder is not None:
        settings = Settings(rounds=rounds, noise_limit=noise_limit / 100, seed=seed)
        climbing = climb.plan(ladder, rungs, shapes, settings, workers or default_workers())
        found = _climb(climbing, Device.open(), quiet)
        _deliver(targets, climb.renderers(found))
        _raise_worst(found.failures)
        return
    device = Device.open()
    threads = workers or default_workers()
    notes: tuple[str, ...] = ()
    if packed is not None:
        cases, notes = plan_file(
            packed,
            counts,
            b_type=b_type,
            accumulate=accumulate,
            out=out,
            activations=activations,
            seed=seed,
            workers=threads,
        )
    else:
        cases = plan_shapes(
            _shapes(shapes, suite, seed),
            type_name or "e4m3",
            b_type=b_type,
            accumulate=accumulate,
            out=out,
            scale=scale or "tensor",
            block=block,
            activations=activations,
            seed=seed,
            workers=threads,
        )
    settings = Settings(rounds=rounds, noise_limit=noise_limit / 100, seed=seed)
    plan = BenchPlan(cases, order, kernel, peers, settings, threads, notes, ceiling, accumulate)
    if tune:
        failures = _tune(plan, device, targets, quiet)
    else:
        result = _run(plan, device, quiet)
        _write(result, targets, earlier)
        failures = result.failures
    _raise_worst(failures)


def _raise_worst(failures: tuple[Failure, ...]) -> None:
    if failures:
        worst = max(failures, key=lambda failure: failure.exit_code)
        kinds = {kind.exit_code: kind for kind in (VerificationError, Interrupted)}
        raise kinds.get(worst.exit_code, Sp24Error)(worst.message)


def _climb(plan: LadderPlan, device: Device, quiet: bool) -> LadderResult:
    from sp24cli.bench.ladder import run
    from sp24cli.gpu.telemetry import Telemetry

    with _progress(quiet) as progress:
        return run(
            plan,
            device,
            telemetry=Telemetry(device),
            progress=progress,
            finished=lambda line: console.log(line, quiet=quiet),
        )


def _run(plan: BenchPlan, device: Device, quiet: bool) -> BenchResult:
    from sp24cli.bench import report
    from sp24cli.bench.run import run
    from sp24cli.gpu.telemetry import Telemetry

    with _progress(quiet) as progress:
        return run(
            plan,
            device,
            telemetry=Telemetry(device),
            progress=progress,
            finished=lambda case: console.log(report.one_line(case), quiet=quiet),
        )


def _tune(
    plan: BenchPlan, device: Device, targets: list[tuple[str, str]], quiet: bool
) -> tuple[Failure, ...]:
    """Time the kernels, show and keep what was found."""
    from sp24cli.bench import tune
    from sp24cli.errors import BadInputError
    from sp24cli.kernels import choices

    with _progress(quiet) as progress:
        result = tune.tune(plan, device, progress=progress)
    text = choices.to_text([result.table])

    def keep() -> None:
        path = choices.cache_path(device.uuid, result.fatbins)
        if path is None:
            console.log("sp24: warning: no cache folder is known; nothing kept", quiet=quiet)
            return
        try:
            kept = choices.read_cache(path)
        except BadInputError as error:
            console.log(f"sp24: warning: replaced: {error}", quiet=quiet)
            kept = None
        table = result.table if kept is None else kept.merged(result.table.measured)
        choices.write_cache(path, table)
        console.log(f"kept the choices for {len(result.cases)} problems in {path}", quiet=quiet)

    _each(
        lambda: _deliver(targets, lambda kind: (text if kind else tune.table(result)).encode()),
        *([keep] if result.cases else []),
    )
    return result.failures


def _given(context: click.Context) -> set[str]:
    """The parameters that the command line names."""
    named = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is named}


def _refuse(context: click.Context, option: str, names: set[str]) -> None:
    """A usage error that says which of the given parameters do not go with ``option``."""
    parameters = [p for p in context.command.params if p.name in names]
    if parameters:
        words = [p.opts[0] if isinstance(p, click.Option) else "PACKED" for p in parameters]
        raise click.UsageError(f"{option} does not go with {', '.join(words)}")


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


def _check_types(
    type_name: str,
    b_type: str | None,
    accumulate: str,
    out: str | None,
    order: str,
    scale: ScaleKind | None,
    block: str | None,
    kernel: str | None,
) -> None:
    """A usage error for operands, scales, sums, an output or a kernel that do not go together."""
    from sp24cli.bench.plan import check_kernels, random_scale, types_of
    from sp24cli.gpu.select import outputs
    from sp24cli.optypes import operand_type

    if scale is not None and not operand_type(type_name).scaled:
        raise click.UsageError(f"--type {type_name} has no scale; leave out --scale")
    try:
        spec = random_scale(type_name, scale or "tensor", block)
        types = types_of(type_name, spec, b_type, accumulate)
        known = outputs(types.name)
        if out is not None and out not in known:
            raise click.UsageError(
                f"--out {out}: {types.name} is multiplied into {', '.join(known)} only"
            )
        check_kernels(types, spec, accumulate, out, order, kernel)
    except Sp24Error as fault:
        raise click.UsageError(str(fault)) from None


def _shapes(shapes: tuple[Shape, ...], name: str | None, seed: int) -> tuple[Shape, ...]:
    from sp24cli.bench.problem import suite

    if name is None and not shapes:
        name = SUITES[0]
    return (*shapes, *(suite(name, seed) if name else ()))


def _targets(
    json_file: str | None, csv_file: str | None, md_file: str | None, plot_file: str | None
) -> list[tuple[str, str]]:
    """(format, FILE) of what is to be written; at most one may go to stdout."""
    named = [("json", json_file), ("csv", csv_file), ("md", md_file)]
    targets = [(kind, file) for kind, file in named if file is not None]
    if sum(file == "-" for _, file in targets) > 1:
        raise click.UsageError("only one of --json, --csv and --md can go to stdout")
    for kind, file in [*targets, *([] if plot_file is None else [("plot", plot_file)])]:
        if Path(file).is_dir():
            raise click.UsageError(f"--{kind} {file!r}: is a folder")
    if plot_file is not None:
        kind = Path(plot_file).suffix.removeprefix(".").lower()
        if kind not in PLOTS:
            raise click.UsageError(f"--plot {plot_file}: ends in none of {', '.join(PLOTS)}")
        from sp24cli.bench.plot import require

        require()  # now, not after minutes of measuring
        targets.append((kind, plot_file))
    return targets


def _check_targets(
    targets: list[tuple[str, str]], inputs: Sequence[str | None], *, overwrite: bool
) -> None:
    """`Sp24Error`, before minutes of measuring, for a file that may not be written."""
    given = [Path(each) for each in inputs if each is not None]
    files = [Path(file) for _, file in targets if file != "-"]
    for i, file in enumerate(files):
        if any(os.path.realpath(file) == os.path.realpath(other) for other in files[:i]):
            raise click.UsageError(f"{label(file)}: two results cannot go to one file")
        if file.parent.is_dir():  # else it is made
            check_side_file(file, given, None, overwrite=overwrite)


def _write(
    result: BenchResult, targets: list[tuple[str, str]], earlier: BenchResult | None = None
) -> None:
    """Write the files, and to stdout the table or what was sent there instead."""
    from sp24cli.bench import baseline, report

    more = [] if earlier is None else baseline.lines(baseline.compare(earlier, result))

    def content(kind: str) -> bytes:
        if kind == "json":
            return (json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode()
        if kind == "csv":
            return report.comma_separated(result).encode()
        if kind == "md":
            return report.markdown(result, more).encode()
        if kind == "html":
            from sp24cli.bench.page import page

            return page(result, more).encode()
        from sp24cli.bench.plot import picture

        return picture(result, kind)

    if not result.cases:
        # The failures say why there is nothing to draw.
        targets = [target for target in targets if target[0] not in PLOTS]
    _deliver(
        targets, lambda kind: report.table(result, more).encode() if not kind else content(kind)
    )


def _deliver(targets: list[tuple[str, str]], content: Callable[[str], bytes]) -> None:
    """Write ``content`` of every target's format, and to stdout the table ("") or what was sent
    there instead."""
    printed = [kind for kind, file in targets if file == "-"] or [""]
    # Stdout first: should a file not be writable, the numbers are not lost.
    _each(
        lambda: console.out(content(printed[0]).decode().removesuffix("\n")),
        *(
            partial(lambda kind, file: _replace(Path(file), content(kind)), kind, file)
            for kind, file in targets
            if file != "-"
        ),
    )


def _each(*steps: Callable[[], None]) -> None:
    """Take every step, though one before it has failed: what was measured took minutes. Then the
    first `OSError`, that of a stdout whose reader has left after the others."""
    faults: list[OSError] = []
    for step in steps:
        try:
            step()
        except OSError as fault:
            faults.append(fault)
    if faults:
        raise min(faults, key=lambda fault: isinstance(fault, BrokenPipeError))


def _replace(path: Path, content: bytes) -> None:
    """Write ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
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
