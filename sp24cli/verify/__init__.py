"""Verification: plans in, frozen results out. `verify_file` is the way in."""

from sp24cli.verify.file import verify_file
from sp24cli.verify.result import Agreement, Check, NumericsResult, TensorVerdict, VerifyReport

__all__ = [
    "Agreement",
    "Check",
    "NumericsResult",
    "TensorVerdict",
    "VerifyReport",
    "verify_file",
]
