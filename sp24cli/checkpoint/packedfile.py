"""Packed tensors in a safetensors file: how they are named, described and found.

``X.weight`` becomes ``X.weight_values`` and ``X.weight_meta`` (layout ``row``) or
``X.weight_blocks`` (layout ``sm90``), with ``X.weight_scale`` where the type is scaled, and
``X.weight_perm`` or ``X.weight_smooth`` where its columns were moved or multiplied. The file's
``__metadata__`` says of each what it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from sp24cli.checkpoint import stacks
from sp24cli.checkpoint.header import (
    DTYPE_NAMES,
    PathLike,
    TensorEntry,
    TensorSpec,
    label,
    load_object,
    quote,
)
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError
from sp24cli.packed import PackedMatrix, PackInfo

VERSION = "1"
VERSION_KEY = "sp24.version"
TENSORS_KEY = "sp24.tensors"
_OWN_KEYS = "sp24."


def part_entries(name: str, info: PackInfo) -> list[TensorSpec]:
    """Name, dtype and shape of the tensors that a packed ``name`` consists of."""
    return [
        (f"{name}_{part}", DTYPE_NAMES[dtype], shape)
        for part, (dtype, shape) in info.parts().items()
    ]


def merge_metadata(
    user: Mapping[str, str], infos: Mapping[str, PackInfo], experts: Mapping[str, int] | None = None
) -> dict[str, str]:
    """The ``__metadata__`` of a packed file: the user's keys, ``format`` (which transformers
    asks for) where there is none, the description of every packed tensor, and of the stacks
    whose ``experts`` are among them how many these are."""
    described = {name: info.to_json() for name, info in infos.items()}
    return {
        "format": "pt",
        **user_metadata(user),
        VERSION_KEY: VERSION,
        TENSORS_KEY: json.dumps(described, sort_keys=True, separators=(",", ":")),
        **stacks.to_metadata(experts or {}),
    }


def user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` without the keys of sp24."""
    return {key: value for key, value in metadata.items() if not key.startswith(_OWN_KEYS)}


def is_packed(metadata: Mapping[str, str]) -> bool:
    """Whether a file with this ``__metadata__`` says that sp24 packed it."""
    return VERSION_KEY in metadata or TENSORS_KEY in metadata


class PackedFile(Closing):
    """An open packed file, or a whole checkpoint of them (a folder or its index).

    Attributes:
        packed: the description of each packed tensor, by the name of the dense one; the experts
            of a stack in order.
        stacks: the number of experts of each stack that was packed by expert (see `stacks`).
        others: the tensors that passed through, in the order of their bytes.
        metadata: the user's ``__metadata__``.
        file: the safetensors file beneath.

    Raises:
        BadInputError: not a safetensors file, not packed by sp24, of a version, layout or type
            that this sp24 does not know, or a part that is missing or not as described.
    """

    def __init__(self, path: PathLike) -> None:
        self.file = open_tensors(path)
        try:
            self._where = label(path)
            self.packed, self.stacks = self._read_infos()
            self._parts = {name: part_entries(name, info) for name, info in self.packed.items()}
            self._check_parts()
        except BaseException:
            self.file.close()
            raise
        taken = {part for parts in self._parts.values() for part, _, _ in parts}
        self.others: tuple[TensorEntry, ...] = tuple(
            entry for entry in self.file.header.entries if entry.name not in taken
        )
        self.metadata: dict[str, str] = user_metadata(self.file.metadata)

    def close(self) -> None:
        """Let go of the file; arrays that are still alive stay valid."""
        self.file.close()

    def load(self, name: str) -> PackedMatrix:
        """The packed tensor ``name``; its arrays are views of the file.

        Raises:
            BadInputError: the file has no such packed tensor.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            part.removeprefix(f"{name}_"): self.file.array(part) for part in self._part_names(name)
        }
        return PackedMatrix(
            info=self.packed[name],
            values=arrays.get("values"),
            meta=arrays.get("meta"),
            blocks=arrays.get("blocks"),
            scale=arrays.get("scale"),
            perm=arrays.get("perm"),
            smooth=arrays.get("smooth"),
            where=self._label(name),
        )

    def drop_cache(self, name: str) -> None:
        """Give back the memory of the pages of a packed tensor read so far."""
        for part in self._part_names(name):
            self.file.drop_cache(part)

    def _label(self, name: str) -> str:
        return f"{self._where}: tensor {quote(name)}"

    def _part_names(self, name: str) -> list[str]:
        if name not in self._parts:
            raise BadInputError(f"{self._where}: has no packed tensor {quote(name)}")
        return [part for part, _, _ in self._parts[name]]

    def _read_infos(self) -> tuple[dict[str, PackInfo], dict[str, int]]:
        packed: dict[str, PackInfo] = {}
        found: dict[str, int] = {}
        for file in self.file.parts():
            infos = _read_infos(file)
            experts = stacks.from_metadata(file.metadata, infos, label(file.path))
            # The description is sorted by name, where expert 10 comes before expert 2.
            for stack, count in experts.items():
                infos |= {name: infos.pop(name) for name in stacks.expert_names(stack, count)}
            packed |= infos
            found |= experts
        return packed, found

    def _check_parts(self) -> None:
        by_name = self.file.header.by_name
        for name, parts in self._parts.items():
            where = self._label(name)
            if name in by_name:
                raise BadInputError(f"{where}: is in the file both packed and dense")
            for part, dtype, shape in parts:
                entry = by_name.get(part)
                if entry is None:
                    raise BadInputError(f"{where}: its part {quote(part)} is missing")
                if entry.dtype != dtype or entry.shape != shape:
                    raise BadInputError(
                        f"{where}: its part {quote(part)} is {entry.dtype} {list(entry.shape)},"
                        f" not {dtype} {list(shape)}"
                    )


def _read_infos(file: SafetensorsFile) -> dict[str, PackInfo]:
    """What one file says of the packed tensors in it."""
    where, metadata = label(file.path), file.metadata
    if VERSION_KEY not in metadata:
        raise BadInputError(f"{where}: is not a packed file (no {VERSION_KEY})")
    version = metadata[VERSION_KEY]
    if version != VERSION:
        raise BadInputError(
            f"{where}: {VERSION_KEY} {quote(version)} is unknown (known: {VERSION!r})"
        )
    if TENSORS_KEY not in metadata:
        raise BadInputError(f"{where}: has no {TENSORS_KEY}")
    infos: dict[str, PackInfo] = {}
    for name, described in load_object(metadata[TENSORS_KEY], f"{where}: {TENSORS_KEY}").items():
        try:
            infos[name] = PackInfo.from_json(described)
        except BadInputError as error:
            raise BadInputError(f"{where}: tensor {quote(name)}: {error}") from error
    return infos
