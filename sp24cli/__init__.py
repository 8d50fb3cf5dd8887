"""sp24: 2:4 sparse weights in FP8 and 16-bit types for Hopper GPUs.

`load`, `unpack`, `upload`, `quantize_tokens` and `matmul` are the Python API; the commands are in
`sp24cli.cli`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sp24cli.api import load, matmul, quantize_tokens, unpack, upload

__all__ = ["load", "matmul", "quantize_tokens", "unpack", "upload"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Late, so that asking for the version or the help loads no numpy.
    if name in __all__:
        from sp24cli import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
