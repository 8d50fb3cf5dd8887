"""What a config.json must say of weights in the formats of compressed-tensors.

Source: compressed-tensors 0.14 (``quantization/quant_scheme.py``: FP8_DYNAMIC, FP8_BLOCK;
``config/sparse_24_bitmask.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.errors import BadInputError
from sp24cli.scaling import ScaleSpec

#: A linear layer of nearly every language model, whose weight may be that of the embedding and
#: so in no file: it must be named to be left alone.
_OUTPUT_HEAD = "lm_head"
_STRATEGIES = {"tensor": "tensor", "vector": "channel", "block": "block"}


def quantization_config(
    specs: Iterable[ScaleSpec],
    packed: Iterable[str],
    ignored: Iterable[str],
    *,
    bitmask: bool,
) -> dict[str, Any]:
    """The ``quantization_config`` of a file.

    ``specs`` are the scales of its ``packed`` weights, "none" for those that are not FP8;
    ``ignored`` are the `layers` of its other tensors, to be left alone. With ``bitmask`` the
    packed weights lie as sparse-24-bitmask. Activations are quantized as the model runs: by
    token, or by the columns of a block where weights are by block.

    Raises:
        BadInputError: more than one kind of scale, which one config group cannot say.
    """
    kinds = sorted(set(specs), key=str)
    if len(kinds) > 1:
        names = ", ".join(kind.kind for kind in kinds)
        raise BadInputError(f"weights with several kinds of scale ({names}) need several groups")
    spec = kinds[0] if kinds else ScaleSpec("none")
    ignore = _with_head(packed, ignored)
    config: dict[str, Any] = {"quant_method": "compressed-tensors"}
    if spec.kind != "none":
        config |= {
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": _group(spec)},
            "ignore": ignore,
        }
    if bitmask:
        config["sparsity_config"] = {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
            "ignore": ignore,
        }
    return config


def _group(spec: ScaleSpec) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "dynamic": False, "strategy": _STRATEGIES[spec.kind]}
    activations: dict[str, Any] = {**common, "dynamic": True, "strategy": "token"}
    if spec.block is not None:
        weights["block_structure"] = list(spec.block)
        activations |= {"strategy": "group", "group_size": spec.block[1]}
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations}


def layers(entries: Iterable[TensorEntry]) -> list[str]:
    """The layers whose weight is a matrix among ``entries``."""
    return [
        entry.name.removesuffix(WEIGHT_SUFFIX)
        for entry in entries
        if entry.name.endswith(WEIGHT_SUFFIX) and len(entry.shape) == 2
    ]


def _with_head(packed: Iterable[str], ignored: Iterable[str]) -> list[str]:
    names = set(ignored)
    if _OUTPUT_HEAD + WEIGHT_SUFFIX not in packed:
        names.add(_OUTPUT_HEAD)
    return sorted(names)
