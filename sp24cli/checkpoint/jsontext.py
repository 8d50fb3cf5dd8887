"""JSON that goes from one file to another: its numbers stay as they were written.

Read as Python's, an integer of many digits would become a float, and a fraction lose digits or
become infinite, which is no JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """A number as the JSON spells it."""

    text: str

    def __str__(self) -> str:
        return self.text


def dump(value: Any, *, ascii_only: bool = True) -> str:
    """``value``, in which there may be a `Number`, as JSON two spaces deep."""
    return _dump(value, ascii_only, "\n")


def _dump(value: Any, ascii_only: bool, line: str) -> str:
    if isinstance(value, Number):
        return value.text
    if not (isinstance(value, (dict, list)) and value):
        return json.dumps(value, ensure_ascii=ascii_only)
    deeper = line + "  "
    # No comprehensions: what was nested as deep as a reader can go must not be too deep here.
    items = []
    for key in value:
        if isinstance(value, dict):
            name = json.dumps(key, ensure_ascii=ascii_only)
            items.append(f"{name}: {_dump(value[key], ascii_only, deeper)}")
        else:
            items.append(_dump(key, ascii_only, deeper))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + deeper + f",{deeper}".join(items) + line + closing
