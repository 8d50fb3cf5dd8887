"""Errors a user can meet. Each carries the exit code that the command line documents."""

from __future__ import annotations


class Sp24Error(Exception):
    """Something went wrong while running. The message is one line fit for the user."""

    exit_code = 1


class UsageError(Sp24Error):
    """An option that goes with no part of the input."""

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
