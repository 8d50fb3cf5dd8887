"""Which tensors of a checkpoint are taken, and in words why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from sp24cli.checkpoint.header import DTYPES, TensorEntry
from sp24cli.sparsity import GROUP

#: Dtypes that hold weights as they were trained.
DENSE_DTYPES = ("F64", "F32", "F16", "BF16")
#: What marks, anywhere in a name in any case, a tensor that sparsity or FP8 would harm.
SKIPPED_WORDS = (
    "lm_head",
    "embed",
    "norm",
    "router",
    "mlp.gate.",
    "ffn.gate.",
    "moe.gate.",
    "shared_expert_gate",
    "conv1d",
    "rotary",
)
#: The same as a whole part of a name: embeddings of GPT-2.
SKIPPED_PARTS = ("wte", "wpe")
#: The same as a whole name: embeddings and heads as T5, DeepSeek and Llama themselves call them.
SKIPPED_NAMES = ("shared.weight", "head.weight", "output.weight")
WEIGHT_SUFFIX = ".weight"
#: What the name of stacked experts has, in any case, and the least K that is no convolution's.
EXPERT_WORD = "expert"
LEAST_EXPERT_COLUMNS = 16


@dataclass(frozen=True)
class Selection:
    """Globs over whole tensor names, case-sensitive; ``*`` crosses dots.

    Without ``include`` all tensors are candidates and the defaults skip by name; with it only
    what it matches is, whatever it is called. ``exclude`` wins over both. What a tensor is
    (rank, dtype, size) is judged always. With ``experts``, stacks of them [E, M, K] are
    candidates, too: 3-D, and "expert" in the name unless ``include`` matches it.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    experts: bool = False

    def decide(self, name: str, entry: TensorEntry, group: int = GROUP) -> str | None:
        """None where the tensor is taken, else the reason, in a few words, why it is not.

        K must be a multiple of ``group``.
        """
        for glob in self.exclude:
            if fnmatchcase(name, glob):
                return f"excluded by {glob!r}"
        if self.include and not any(fnmatchcase(name, glob) for glob in self.include):
            return "not included"
        if self.experts and len(entry.shape) == 3:
            return self._decide_stack(name, entry, group)
        return (
            _by_rank_and_dtype(entry)
            or (None if self.include else _by_name(name))
            or _by_size(entry, group)
        )

    def _decide_stack(self, name: str, entry: TensorEntry, group: int) -> str | None:
        if reason := _by_dtype(entry):
            return reason
        if not self.include:
            if EXPERT_WORD not in name.lower():
                return f"3-D, and its name has no {EXPERT_WORD!r}"
            if reason := _by_word(name):
                return reason
        if 0 not in entry.shape and entry.shape[2] < LEAST_EXPERT_COLUMNS:
            return f"3-D with K = {entry.shape[2]}, a convolution's shape"
        return _by_size(entry, group)


def _by_rank_and_dtype(entry: TensorEntry) -> str | None:
    rank = len(entry.shape)
    if rank == 3:
        return "3-D (stacked experts or a convolution)"
    if rank != 2:
        return f"{rank}-D"
    return _by_dtype(entry)


def _by_dtype(entry: TensorEntry) -> str | None:
    if entry.dtype in DENSE_DTYPES:
        return None
    narrow = DTYPES[entry.dtype].bits <= 8 and entry.dtype != "BOOL"
    return f"already quantized ({entry.dtype})" if narrow else f"not a float ({entry.dtype})"


def _by_name(name: str) -> str | None:
    if not name.endswith(WEIGHT_SUFFIX):
        return f"name does not end in {WEIGHT_SUFFIX!r}"
    return _by_word(name)


def _by_word(name: str) -> str | None:
    lower = name.lower()
    if lower in SKIPPED_NAMES:
        return f"name is {name!r}"
    for part in SKIPPED_PARTS:
        if part in lower.split("."):
            return f"name has {part!r}"
    for word in SKIPPED_WORDS:
        if word in lower:
            return f"name has {word!r}"
    return None


def _by_size(entry: TensorEntry, group: int) -> str | None:
    if 0 in entry.shape:
        return "empty"
    k = entry.shape[-1]
    return f"K = {k} is not a multiple of {group}" if k % group else None
