"""What `inspect_file` says of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.ops import inspect_file, quantize_file, stream
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from tests.cpu.modelfile import DTYPES, naive_prune, normal, save


def test_which_tensors_are_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    late = naive_prune(normal(1, (300, 16)))
    late[299, 12:16] = 1
    negative_zero = np.array([[1, -0.0, 2, -0.0]], np.float32)
    source = save(
        tmp_path / "in",
        {
            "yes.weight": naive_prune(normal(1, (300, 16), "BF16")),
            "late.weight": late,
            "negative_zero": negative_zero,
            "fp8": naive_prune(normal(2, (8, 8))).astype(DTYPES["F8_E4M3"]),
            "int8": np.array([[-128, 0, 127, 1]], np.int8),
            "odd": np.zeros((4, 6), np.float32),
            "bias": np.zeros(4, np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "index": np.zeros((4, 4), np.int64),
        },
        {"who": "me"},
    )
    report = inspect_file(source)
    assert {t.name: t.sparsity for t in report.tensors} == {
        "yes.weight": "yes",
        "late.weight": "no",
        "negative_zero": "yes",
        "fp8": "yes",
        "int8": "no",
        "odd": "",
        "bias": "",
        "empty": "",
        "index": "",
    }
    assert report.metadata == {"who": "me"}
    assert report.bytes == source.stat().st_size
    assert not report.packed


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_packed_tensors(tmp_path: Path, layout: str) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (70, 20), "BF16"), "b": normal(2, (3,))})
    quantize_file(
        source,
        tmp_path / "out",
        optype=OPERAND_TYPES["e4m3"],
        spec=ScaleSpec("block", (32, 8)),
        layout=layout,
        prune=True,
    )
    report = inspect_file(tmp_path / "out")
    (packed,) = report.packed
    assert packed.name == "a.weight"
    assert (packed.shape, packed.source_dtype, packed.type) == ((70, 20), "BF16", "e4m3")
    assert (packed.scale, packed.scale_shape) == ("block 32x8", (3, 3))
    assert (packed.layout, packed.pruned, packed.overflow) == (layout, "magnitude", "satfinite")
    parts = 70 * 10 + 70 * 3 if layout == "row" else 2 * 1 * 5120
    assert packed.bytes == parts + 9 * 4
    assert packed.dense_bytes == 70 * 20 * 2
    assert [t.name for t in report.tensors] == ["b"]
    assert report.metadata == {"format": "pt"}


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a": normal(1, (4,))}, {"sp24.version": "99"})
    with pytest.raises(BadInputError, match="99"):
        inspect_file(source)
