"""sp24: 2:4 sparse weights in FP8 and 16-bit types for Hopper GPUs.

`load`, `unpack`, `upload`, `quantize_tokens` and `matmul` are the Python API, `ops` has operations
on whole files, `errors` what all of them raise; the commands are in `sp24cli.cli`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sp24cli import errors, fp8, ops, verify
    from sp24cli.api import load, quantize_tokens, unpack, upload
    from sp24cli.errors import (
        BadInputError,
        Interrupted,
        NoGpuError,
        Sp24Error,
        UsageError,
        VerificationError,
    )
    from sp24cli.gpu.matmul import matmul

__all__ = [
    "BadInputError",
    "Interrupted",
    "NoGpuError",
    "Sp24Error",
    "UsageError",
    "VerificationError",
    "errors",
    "fp8",
    "load",
    "matmul",
    "ops",
    "quantize_tokens",
    "unpack",
    "upload",
    "verify",
]
__version__ = "0.1.0"

_MODULES = ("errors", "fp8", "ops", "verify")
#: Where a name is that is neither a module nor an error.
_HOMES = {
    **dict.fromkeys(("load", "quantize_tokens", "unpack", "upload"), "sp24cli.api"),
    "matmul": "sp24cli.gpu.matmul",
}


def __getattr__(name: str) -> Any:
    # Late, so that asking for the version or the help loads no numpy.
    if name in _MODULES:
        return import_module(f"sp24cli.{name}")
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "sp24cli.errors")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
