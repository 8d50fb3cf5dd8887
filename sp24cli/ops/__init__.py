"""Operations on whole files: each takes paths and a plan, and returns a frozen report."""

from sp24cli.ops.inspect import InspectReport, inspect_file
from sp24cli.ops.prune import PruneReport, prune_file
from sp24cli.ops.quantize import QuantizeReport, quantize_file
from sp24cli.ops.unpack import UnpackReport, unpack_file

__all__ = [
    "InspectReport",
    "PruneReport",
    "QuantizeReport",
    "UnpackReport",
    "inspect_file",
    "prune_file",
    "quantize_file",
    "unpack_file",
]
