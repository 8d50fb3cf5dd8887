"""What to time: shapes with random weights, or the weights of a packed file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt

from sp24cli.activations import Tokens, quantize_tokens
from sp24cli.bench.problem import load_activations, random_tokens, random_weight
from sp24cli.bench.rates import Shape, a_bytes, b_bytes, d_bytes
from sp24cli.bench.statistics import Settings
from sp24cli.checkpoint.packedfile import PackedFile
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.fragments import weight_scales
from sp24cli.gpu.select import candidates, needs_widening, summation
from sp24cli.ops.plan import tensor_label
from sp24cli.optypes import OPERANDS, Operands, OperandType, operand_type, operands
from sp24cli.packed import PackedMatrix, check_parts
from sp24cli.pruning import permute
from sp24cli.scaling import ScaleKind, ScaleSpec
from sp24cli.smoothing import divide

Array = npt.NDArray[Any]

#: The output type of an A type when none is asked for, where it is not bf16.
_DEFAULT_OUT = {"f16": "f16", "s8": "s32", "tf32": "f32"}

#: The block of random weights with block scales, and the columns that a scale of the activations
#: covers beside a weight with block scales.
BLOCK = (128, 128)
SCALE_K = 128

#: Tokens at which the weights of a file are timed when nothing else is said.
DEFAULT_TOKENS = (16, 128, 4096)


@dataclass(frozen=True)
class Case:
    """One problem to time. ``type`` names its operands (see `optypes.OPERANDS`), ``load`` gives
    them, ``weight`` and ``activations`` say in words where they come from, ``normal`` whether both
    are random normal values whose sums may be held to what such sums come to."""

    shape: Shape
    type: str
    out: str
    weight: str
    activations: str
    normal: bool
    load: Callable[[], tuple[PackedMatrix, Tokens]] = field(compare=False, repr=False)

    @property
    def operands(self) -> Operands:
        return OPERANDS[self.type]

    @property
    def input_bytes(self) -> int:
        """What one product reads: packed A and B."""
        return a_bytes(self.shape, self.operands.a, sparse=True) + b_bytes(
            self.shape, self.operands.b
        )

    @property
    def output_bytes(self) -> int:
        return d_bytes(self.shape, self.out)


@dataclass(frozen=True)
class BenchPlan:
    """What to time and how. ``kernel`` names a manifest entry, None leaves the choice to sp24;
    ``ceiling`` measures what the chip can do beside it; ``accumulate`` is "fast", "precise"
    (FP8 sums promoted) or "f16" (f16 summed in f16)."""

    cases: tuple[Case, ...]
    order: str
    kernel: str | None = None
    peers: bool = True
    settings: Settings = field(default_factory=Settings)
    workers: int = 1
    notes: tuple[str, ...] = ()
    ceiling: bool = False
    accumulate: str = "fast"


def plan_shapes(
    shapes: Sequence[Shape],
    type_name: str,
    *,
    b_type: str | None = None,
    accumulate: str = "fast",
    out: str | None = None,
    scale: ScaleKind = "tensor",
    block: str | None = None,
    activations: str | None = None,
    seed: int = 24,
    workers: int = 1,
) -> tuple[Case, ...]:
    """Random weights of these shapes, of ``type_name`` and, if another, activations of ``b_type``;
    `BadInputError` where `optypes.operands` has no such. Cases that follow one another share a
    weight of the same M and K. Given activations must have the K of every shape and at least its
    N rows. ``scale`` "block" is of ``block``, written ROWSxCOLUMNS, or `BLOCK` for the weight and,
    for activations of 8 bits, of a row and `SCALE_K` columns; ``accumulate`` is as for
    `BenchPlan`. `BadInputError` for a block that is none, `Sp24Error` for one that no kernel has
    with these types."""
    spec = random_scale(type_name, scale, block)
    types = types_of(type_name, spec, b_type, accumulate)
    optype = types.a
    scale_k = SCALE_K if spec.kind == "block" and not types.widened else 0
    given = None if activations is None else load_activations(activations)
    if given is not None:
        for shape in shapes:
            _check_rows(activations or "", given, shape.n, shape.k)
    last: dict[tuple[int, int], PackedMatrix] = {}

    def case(shape: Shape) -> Case:
        def load() -> tuple[PackedMatrix, Tokens]:
            key = (shape.m, shape.k)
            if key not in last:
                last.clear()
                last[key] = random_weight(shape.m, shape.k, optype, spec, seed, workers)
            if given is not None:
                return last[key], quantize_tokens(given[: shape.n], types.b, workers, scale_k)
            return last[key], random_tokens(shape.n, shape.k, types.b, seed, workers, scale_k)

        return Case(
            shape,
            types.name,
            out or _default_out(types),
            f"random normal, seed {seed}, pruned by magnitude",
            activations or f"random normal, seed {seed}",
            given is None and types.accumulate != "f16",
            load,
        )

    return tuple(case(shape) for shape in shapes)


def plan_file(
    path: str,
    counts: Sequence[int],
    *,
    b_type: str | None = None,
    accumulate: str = "fast",
    out: str | None = None,
    activations: str | None = None,
    seed: int = 24,
    workers: int = 1,
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The packed weights of a file, at each number of tokens, and notes on what is left out.

    Of weights that share shape, type and scale kind the first stands for all. With given
    activations only weights of their K are timed, on all rows where ``counts`` is empty.
    """
    given = None if activations is None else load_activations(activations)
    notes: list[str] = []
    chosen: dict[tuple[Any, ...], list[str]] = {}
    with PackedFile(path) as packed_file:
        for name, info in packed_file.packed.items():
            if given is not None and info.shape[1] != given.shape[1]:
                continue
            try:
                types_of(info.type, info.scale, b_type, accumulate)
            except BadInputError:
                raise
            except Sp24Error as error:
                notes.append(f"{name}: not timed: {error}")
                continue
            kind = (info.shape, info.type, info.scale, info.permuted, info.smooth is not None)
            chosen.setdefault(kind, []).append(name)
    if not chosen:
        fits = "" if given is None else f" with K = {given.shape[1]}, as the activations have,"
        raise BadInputError(f"{path}: no packed weight{fits} that the kernels take")
    cases = []
    for ((m, k), type_name, spec, permuted, smooth), names in chosen.items():
        if permuted:
            notes.append(f"{names[0]}: sp24's time includes reordering the activations' columns")
        if smooth:
            which = "are taken as" if given is None else "were"
            notes.append(f"{names[0]}: activations {which} divided by its factors")
        if len(names) > 1:
            notes.append(f"{names[0]} ({m}x{k}) stands for {len(names)} weights of its shape")
        types = types_of(type_name, spec, b_type, accumulate)
        for n in counts or ((given.shape[0],) if given is not None else DEFAULT_TOKENS):
            if given is not None:
                _check_rows(activations or "", given, n, k)
            load = _file_loader(path, names[0], n, types.b, given, seed, workers)
            source = activations or f"random normal, seed {seed}"
            written = out or _default_out(types)
            weight = f"{path}: {names[0]}"
            cases.append(Case(Shape(m, n, k), types.name, written, weight, source, False, load))
    return tuple(cases), tuple(notes)


def _file_loader(
    path: str,
    name: str,
    n: int,
    b_type: OperandType,
    given: Array | None,
    seed: int,
    workers: int,
) -> Callable[[], tuple[PackedMatrix, Tokens]]:
    def load() -> tuple[PackedMatrix, Tokens]:
        with PackedFile(path) as packed_file:
            packed = packed_file.load(name)
            if (fault := check_parts(packed)) is not None:
                raise BadInputError(f"{tensor_label(packed_file.file, name)}: {fault}")
        by_block = packed.info.scale.kind == "block" and b_type.scaled
        scale_k = SCALE_K if by_block else 0
        if given is None:
            return packed, random_tokens(n, packed.shape[1], b_type, seed, workers, scale_k)
        rows = given[:n]
        # The factors are in the original's order, and scales count columns as they are stored.
        if packed.smooth is not None:
            rows = divide(rows, packed.smooth)
        if packed.perm is not None:
            rows = permute.apply(rows, packed.perm)
        return packed, quantize_tokens(rows, b_type, workers, scale_k)

    return load


def random_scale(type_name: str, kind: ScaleKind, block: str | None = None) -> ScaleSpec:
    """The scales of random weights; `BadInputError` for a block that is none."""
    if not operand_type(type_name).scaled:
        return ScaleSpec("none")
    if kind == "block" and block is None:
        return ScaleSpec(kind, BLOCK)
    return ScaleSpec.parse(kind, block)


def types_of(
    type_name: str, scale: ScaleSpec, b_type: str | None = None, accumulate: str = "fast"
) -> Operands:
    """The operands of a weight of type ``type_name`` with such scales and of activations of
    ``b_type``: by default the weight's type, or bf16 where it must be widened for its scales.

    `BadInputError` for types that do not go together, `Sp24Error` where no kernel of these types
    applies the scales.
    """
    wide = needs_widening(type_name, scale)
    b_type = b_type or (wide[0] if wide else None)
    types = operands(type_name, b_type, "f16" if accumulate == "f16" else None)
    if types.widened:
        weight_scales(scale)
    elif wide:
        rows, columns = cast(tuple[int, int], scale.block)
        raise Sp24Error(
            f"{type_name} with scales of {rows}x{columns} is multiplied by activations of "
            f"{' or '.join(wide)}, not of {types.b.name}"
        )
    return types


def check_kernels(
    types: Operands,
    scale: ScaleSpec,
    accumulate: str,
    out: str | None,
    order: str,
    kernel: str | None = None,
) -> None:
    """`Sp24Error` where no kernel multiplies random operands of these types and scales so, or the
    one called ``kernel`` does not."""
    out = out or _default_out(types)
    wide = weight_scales(scale) if types.widened else None
    block = scale.block if wide is None else None
    how = summation(accumulate, block, scale.kind == "vector", SCALE_K if block else 0, wide)
    found = candidates(types.name, out, order, how, able=kernel is not None)
    if kernel is not None and kernel not in {entry.name for entry in found}:
        raise Sp24Error(f"{kernel} does not multiply {types.name} into {out} {order} ({how} sums)")


def _default_out(types: Operands) -> str:
    return _DEFAULT_OUT.get(types.multiplied.name, "bf16")


def _check_rows(where: str, given: Array, n: int, k: int) -> None:
    if given.shape[1] != k:
        raise BadInputError(f"{where}: activations have K = {given.shape[1]}, not {k}")
    if given.shape[0] < n:
        raise BadInputError(f"{where}: activations have {given.shape[0]} rows, not {n}")
