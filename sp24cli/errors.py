"""Errors a user can meet. Each carries the exit code that the command line documents."""

from __future__ import annotations

from collections.abc import Iterable


class Sp24Error(Exception):
    """Something went wrong while running. The message is one line fit for the user."""

    exit_code = 1


class UsageError(Sp24Error):
    """An option that is not known, or goes with no part of the input."""

    exit_code = 2


class VerificationError(Sp24Error):
    """A packed tensor, or a product of it, is not what it must be."""

    exit_code = 3


class BadInputError(Sp24Error):
    """An input file or tensor cannot be used; the message names file, tensor and place."""

    exit_code = 4


class NoGpuError(Sp24Error):
    """No usable Hopper GPU, driver or kernel; the message says which is missing."""

    exit_code = 5


class Interrupted(Sp24Error):
    """The user stopped it. 128 and the number of the signal, as shells have it."""

    exit_code = 130


def check_known(what: str, value: object, names: Iterable[str]) -> None:
    """`UsageError` unless an option's ``value`` is one of ``names``."""
    names = tuple(names)
    if value not in names:
        raise UsageError(f"unknown {what} {value!r} (known: {', '.join(names)})")
