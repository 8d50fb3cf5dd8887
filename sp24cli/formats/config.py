"""What a config.json must say of weights in the formats of compressed-tensors.

Source: compressed-tensors 0.14 (``quantization/quant_scheme.py``: FP8_DYNAMIC, FP8_BLOCK;
``config/sparse_24_bitmask.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.scaling import ScaleSpec

#: A linear layer of nearly every language model, whose weight may be that of the embedding and
#: so in no file: it must be named to be left alone.
_OUTPUT_HEAD = "lm_head"
_STRATEGIES = {"tensor": "tensor", "vector": "channel", "block": "block"}


def quantization_config(
    spec: ScaleSpec,
    packed: Iterable[str],
    ignored: Iterable[str],
    dense: Iterable[str],
    *,
    bitmask: bool,
) -> dict[str, Any]:
    """The ``quantization_config`` of a file.

    ``spec`` is the scale of its ``packed`` weights and of the ``dense`` ones, FP8 that is not
    2:4; "none" where they are not FP8. ``ignored`` are the `layers` of its other tensors, to be
    left alone. With ``bitmask`` the packed weights lie as sparse-24-bitmask. Activations are
    quantized as the model runs: by token, or by the columns of a block where weights are by block.
    """
    packed, ignored, dense = set(packed), set(ignored), set(dense)
    config: dict[str, Any] = {"quant_method": "compressed-tensors"}
    if spec.kind != "none":
        config |= {
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": _group(spec)},
            "ignore": _with_head(packed | dense, ignored),
        }
    if bitmask:
        config["sparsity_config"] = {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
            "ignore": _with_head(packed, ignored | {layer(name) for name in dense}),
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
        layer(entry.name)
        for entry in entries
        if entry.name.endswith(WEIGHT_SUFFIX) and len(entry.shape) == 2
    ]


def layer(weight: str) -> str:
    return weight.removesuffix(WEIGHT_SUFFIX)


def _with_head(named: set[str], ignored: set[str]) -> list[str]:
    head = set() if _OUTPUT_HEAD + WEIGHT_SUFFIX in named else {_OUTPUT_HEAD}
    return sorted(ignored | head)
