"""The options that say which values are kept, and the `Choice` they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sp24cli.cli.options import PATH
from sp24cli.errors import BadInputError
from sp24cli.ops.choose import Choice, Method
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern
from sp24cli.pruning.sparsegpt import BLOCK_SIZE, DAMPING

_Command = TypeVar("_Command", bound=Callable[..., Any])


def method_option(*methods: Method) -> Callable[[_Command], _Command]:
    return click.option(
        "--method",
        type=click.Choice(methods),
        default="magnitude",
        show_default=True,
        help="How the values to keep are chosen: by magnitude; by magnitude times the norm of "
        "the input channel (wanda)"
        + (
            "; by the error of the layer's output, with an update of what is kept (sparsegpt)."
            if "sparsegpt" in methods
            else "."
        ),
    )


norms_option = click.option(
    "--activation-norms",
    metavar="FILE",
    type=PATH,
    help="For wanda: a safetensors file (or checkpoint) with the L2 norms of the input channels "
    "[K] under each weight's name.",
)
permute_option = click.option(
    "--permute",
    is_flag=True,
    help="Search for an order of the input channels in which 2:4 keeps more. It is written beside "
    "the weight, as X.weight_perm.",
)


def calibration_options(command: _Command) -> _Command:
    """What `sp24 prune` alone has."""
    for option in (
        click.option(
            "--pattern",
            metavar="N:M",
            default=str(TWO_OF_FOUR),
            show_default=True,
            help="Keep N of every M neighbours. Only 2:4 can be packed, and 1:2 as tf32.",
        ),
        click.option(
            "--block-size",
            type=click.IntRange(min=1),
            metavar="COLUMNS",
            help="For sparsegpt: columns that are worked on at once, a multiple of the pattern's M "
            f"(default: {BLOCK_SIZE}).",
        ),
        click.option(
            "--damping",
            type=float,
            metavar="SHARE",
            help="For sparsegpt: what is added to the Hessian's diagonal, as a share of its mean "
            f"(default: {DAMPING}).",
        ),
        click.option(
            "--hessians",
            metavar="FILE",
            type=PATH,
            help="For sparsegpt: a safetensors file (or checkpoint) with the Hessian X Xᵀ of the "
            "inputs [K, K], times any factor, under each weight's name. Channels that had no input "
            "(0 on its diagonal) are zeroed.",
        ),
    ):
        command = option(command)
    return command


#: With more the Hessian is lost in it to the last bit of float64.
_MOST_DAMPING = 1e16


def make_choice(
    method: Method,
    *,
    norms: Path | None = None,
    hessians: Path | None = None,
    damping: float | None = None,
    block_size: int | None = None,
    permute: bool = False,
    pattern: str = str(TWO_OF_FOUR),
) -> Choice:
    """The choice that the options make; a usage error for those that do not go together."""
    try:
        wanted = Pattern.parse(pattern)
    except BadInputError as fault:
        raise click.UsageError(f"--pattern: {fault}") from fault
    if permute and wanted != TWO_OF_FOUR:
        raise click.UsageError("--permute goes with --pattern 2:4 only")
    for option, needed_by, value in (
        ("--activation-norms", "wanda", norms),
        ("--hessians", "sparsegpt", hessians),
    ):
        if value is None and method == needed_by:
            raise click.UsageError(f"--method {method} needs {option}")
        if value is not None and method != needed_by:
            raise click.UsageError(f"{option} goes with --method {needed_by} only")
    for option, given in (("--damping", damping), ("--block-size", block_size)):
        if given is not None and method != "sparsegpt":
            raise click.UsageError(f"{option} goes with --method sparsegpt only")
    damping = DAMPING if damping is None else damping
    if not 0 <= damping <= _MOST_DAMPING:
        raise click.UsageError(f"--damping {damping:g} is not a share from 0 to {_MOST_DAMPING:g}")
    block_size = _default_block(wanted) if block_size is None else block_size
    if block_size % wanted.group:
        raise click.UsageError(f"--block-size {block_size} is not a multiple of {wanted.group}")
    return Choice(method, wanted, norms or hessians, damping, block_size, permute)


def _default_block(pattern: Pattern) -> int:
    """The default, down to whole groups."""
    return BLOCK_SIZE // pattern.group * pattern.group
