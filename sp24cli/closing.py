"""A context manager made of a `close` method."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing:
    """Base of what gives itself to a ``with`` and is closed at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
