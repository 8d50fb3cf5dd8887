"""Stacked experts: a tensor [E, M, K] of E matrices, taken apart and put together again.

Expert e of ``NAME`` is the matrix ``NAME.<e>``. Packed, it has parts of its own
(``NAME.<e>_values``, ...), and the file's ``__metadata__`` says under `STACKS_KEY` how many
experts each stack has, so that unpacking gives ``NAME`` again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sp24cli.checkpoint.header import Header, TensorEntry, TensorSpec, load_object, quote
from sp24cli.errors import BadInputError

STACKS_KEY = "sp24.stacks"
#: Parts of an expert that are stacked again where its matrix is.
_STACKED_PARTS = ("", "_scale")


def expert_name(name: str, expert: int) -> str:
    return f"{name}.{expert}"


def expert_names(name: str, experts: int) -> list[str]:
    """The names of all experts of a stack, in order."""
    return [expert_name(name, expert) for expert in range(experts)]


def split(header: Header, names: Iterable[str], where: str) -> Header:
    """``header`` with the experts of these stacks [E, M, K] in the place of each.

    Raises:
        BadInputError: beginning with ``where``: an expert's name is taken.
    """
    wanted = set(names)
    entries: list[TensorEntry] = []
    for entry in header.entries:
        if entry.name not in wanted:
            entries.append(entry)
            continue
        experts, *shape = entry.shape
        size = entry.nbytes // experts
        for number, name in enumerate(expert_names(entry.name, experts)):
            if name in header.by_name:
                raise BadInputError(
                    f"{where}: tensor {quote(entry.name)}: cannot be taken apart: the file has a "
                    f"tensor {quote(name)} already"
                )
            begin = entry.begin + number * size
            entries.append(TensorEntry(name, entry.dtype, tuple(shape), begin, begin + size))
    return replace(header, entries=tuple(entries))


def join(
    specs: Iterable[TensorSpec], stacks: Mapping[str, int]
) -> tuple[list[TensorSpec], dict[str, str]]:
    """``specs`` with each stack in the place of its experts, and the stack's name by expert's."""
    renamed: dict[str, str] = {}
    for stack, experts in stacks.items():
        for part in _STACKED_PARTS:
            for name in expert_names(stack, experts):
                renamed[name + part] = stack + part
    joined: dict[str, TensorSpec] = {}
    counts = {stack + part: experts for stack, experts in stacks.items() for part in _STACKED_PARTS}
    for name, dtype, shape in specs:
        target = renamed.get(name)
        if target is None:
            joined[name] = (name, dtype, shape)
        else:
            joined[target] = (target, dtype, (counts[target], *shape))
    return list(joined.values()), {n: t for n, t in renamed.items() if t in joined}


def to_metadata(stacks: Mapping[str, int]) -> dict[str, str]:
    """What ``__metadata__`` says of them; nothing where there are none."""
    if not stacks:
        return {}
    return {STACKS_KEY: json.dumps(dict(stacks), sort_keys=True, separators=(",", ":"))}


def from_metadata(
    metadata: Mapping[str, str], packed: Mapping[str, Any], where: str
) -> dict[str, int]:
    """The stacks that a packed file speaks of; ``packed`` describes its packed tensors.

    Raises:
        BadInputError: beginning with ``where``: experts that are not there, or not alike.
    """
    if STACKS_KEY not in metadata:
        return {}
    stacks = load_object(metadata[STACKS_KEY], f"{where}: {STACKS_KEY}")
    for name, experts in stacks.items():
        this = f"{where}: tensor {quote(name)}"
        if type(experts) is not int or not 0 < experts <= len(packed):
            raise BadInputError(f"{this}: cannot be a stack of {experts!r} experts")
        alike = set()
        for expert in expert_names(name, experts):
            if expert not in packed:
                raise BadInputError(f"{this}: its expert {quote(expert)} is missing")
            info = packed[expert]
            alike.add((info.shape, info.source_dtype, info.type, info.scale))
        if len(alike) != 1:
            raise BadInputError(f"{this}: its experts differ in shape, dtype or scale")
        if name in packed:
            raise BadInputError(f"{this}: is packed both whole and by expert")
    return stacks
