"""Operations on whole files and checkpoints: each takes paths and a plan, and returns a frozen
report."""

from sp24cli.ops.checkpoint import (
    prune_checkpoint,
    quantize_checkpoint,
    unpack_checkpoint,
)
from sp24cli.ops.inspect import InspectReport, inspect_file
from sp24cli.ops.prune import PruneReport, prune_file
from sp24cli.ops.quantize import QuantizeReport, quantize_file
from sp24cli.ops.shards import Done
from sp24cli.ops.unpack import UnpackReport, unpack_file

__all__ = [
    "Done",
    "InspectReport",
    "PruneReport",
    "QuantizeReport",
    "UnpackReport",
    "inspect_file",
    "prune_checkpoint",
    "prune_file",
    "quantize_checkpoint",
    "quantize_file",
    "unpack_checkpoint",
    "unpack_file",
]
