"""The Python API without a GPU."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import sp24cli
from sp24cli import api
from sp24cli.checkpoint.names import Selection
from sp24cli.errors import BadInputError, NoGpuError
from sp24cli.gpu.activations import quantize_tokens
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.quantize import quantize_file
from sp24cli.optypes import operand_type
from sp24cli.packed import pack
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import Array, load, normal, save


@pytest.fixture
def packed_file(tmp_path: Path) -> Path:
    weight = normal(1, (24, 36))
    source = save(tmp_path / "model.safetensors", {"a.weight": weight, "b.bias": weight[0]})
    quantize_file(
        source,
        tmp_path / "packed.safetensors",
        optype=operand_type("f16"),
        spec=ScaleSpec("none"),
        prune=True,
        selection=Selection(),
    )
    return tmp_path / "packed.safetensors"


def test_load_and_unpack(packed_file: Path) -> None:
    every = sp24cli.load(packed_file)
    assert list(every) == ["a.weight"]
    one = sp24cli.load(packed_file, "a.weight")
    want = prune_24(normal(1, (24, 36))).astype(np.float16)
    for name, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f64", np.float64)):
        dense = sp24cli.unpack(one, name)
        assert dense.dtype == dtype
        assert np.array_equal(dense, want.astype(np.float32).astype(dtype))
    with pytest.raises(BadInputError, match="unknown dtype 'f8'"):
        sp24cli.unpack(one, "f8")


def test_a_missing_weight_is_named(packed_file: Path) -> None:
    with pytest.raises(BadInputError, match=r"packed\.safetensors: no packed tensor 'b\.bias'"):
        sp24cli.load(packed_file, "b.bias")


def test_upload_needs_a_gpu(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sp24cli.gpu.device import Device

    def none(ordinal: int = 0, *, current: bool = True) -> Device:
        raise NoGpuError("no usable GPU: none here")

    monkeypatch.setattr(Device, "open", none)
    with pytest.raises(NoGpuError):
        sp24cli.upload(sp24cli.load(packed_file, "a.weight"))


def damaged(tmp_path: Path, part: str, place: tuple[int, ...], value: Array) -> Path:
    """A packed e4m3 file, permuted and smoothed, with ``value`` at ``place`` of a part."""
    save(tmp_path / "in", {"a.weight": normal(3, (70, 36))})
    save(tmp_path / "amax", {"a.weight": np.linspace(1, 9, 36, dtype=np.float32)})
    quantize_file(
        tmp_path / "in",
        tmp_path / "packed",
        optype=operand_type("e4m3"),
        spec=ScaleSpec("vector"),
        prune=True,
        choice=Choice(permute=True),
        calibration=Calibration(activations=tmp_path / "amax"),
    )
    tensors, metadata = load(tmp_path / "packed")
    broken = tensors[f"a.weight_{part}"].copy()
    broken.view(value.dtype)[place] = value
    return save(tmp_path / "broken", tensors | {f"a.weight_{part}": broken}, metadata)


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("take", [sp24cli.unpack, sp24cli.upload])
@pytest.mark.parametrize(
    ("part", "place", "value", "fault"),
    [
        ("perm", (1,), np.int32(99999), "permutation has 99999 at 1, outside 0 to 35"),
        ("meta", (65, 0), np.uint8(0x00), "metadata at row 65, group 0 is no ascending pair"),
        ("values", (1, 0), np.uint8(0x7F), "value at row 1, kept column 0 is not finite"),
        ("scale", (1, 0), np.float32(0), r"scale 0.0 at \[1, 0\] is not positive"),
        ("scale", (1, 0), np.float32(np.inf), r"scale inf at \[1, 0\] is not positive"),
        ("scale", (1, 0), np.float32(np.nan), r"scale nan at \[1, 0\] is not positive"),
        ("smooth", (2,), np.float32(0), r"smooth 0.0 at \[2\] is not positive"),
        ("smooth", (2,), np.float32(np.nan), r"smooth nan at \[2\] is not positive"),
        ("smooth", (2,), np.float32(-1), r"smooth -1.0 at \[2\] is not positive"),
    ],
)
def test_parts_that_cannot_be_right_are_refused(
    tmp_path: Path,
    layout: str,
    take: Callable[..., object],
    part: str,
    place: tuple[int, ...],
    value: Array,
    fault: str,
) -> None:
    """Else a damaged file would give wrong values; without a GPU it is refused as well."""
    weight = sp24cli.load(damaged(tmp_path, part, place, value), "a.weight").to_layout(layout)
    with pytest.raises(BadInputError, match=f"broken: tensor 'a.weight': {fault}"):
        take(weight)


@pytest.mark.parametrize("take", [sp24cli.unpack, sp24cli.upload])
def test_an_order_that_has_a_column_twice_is_refused(
    tmp_path: Path, take: Callable[..., object]
) -> None:
    good = sp24cli.load(damaged(tmp_path, "perm", (), np.int32(0)), "a.weight")
    with pytest.raises(
        BadInputError, match=r"broken: tensor 'a\.weight': permutation has column 0 "
    ):
        take(good)
    with pytest.raises(BadInputError, match="permutation has column 0 twice"):
        good.restore()


def test_faults_of_a_matrix_from_no_file_have_no_place_before_them() -> None:
    packed, _ = pack(prune_24(normal(1, (4, 8))), operand_type("e4m3"), ScaleSpec("tensor"))
    assert packed.scale is not None
    packed.scale[0] = 0
    with pytest.raises(BadInputError, match=r"^scale 0.0 at \[0\] is not positive"):
        sp24cli.unpack(packed)


def test_quantize_tokens_takes_what_that_of_the_gpu_does() -> None:
    """Written out, so that a wrong keyword is found before it runs."""

    def options(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters
        return {name: p.default for name, p in parameters.items() if name not in ("device", "x")}

    assert options(api.quantize_tokens) == options(quantize_tokens)
    kinds = {p.kind for p in inspect.signature(sp24cli.matmul).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_a_bare_import_reaches_all_names_and_loads_none() -> None:
    code = (
        "import sys, sp24cli\n"
        "assert 'numpy' not in sys.modules\n"
        "assert set(sp24cli.__all__) <= set(dir(sp24cli))\n"
        "assert {'load', 'matmul', 'quantize_tokens', 'unpack', 'upload'} <= set(dir(sp24cli))\n"
        "base = sp24cli.Sp24Error\n"
        "assert {e.__name__ for e in [base, *base.__subclasses__()]} <= set(sp24cli.__all__)\n"
        "assert sp24cli.BadInputError is sp24cli.errors.BadInputError\n"
        "assert 'numpy' not in sys.modules\n"
        "assert [getattr(sp24cli, name) for name in sp24cli.__all__]\n"
        "assert sp24cli.fp8.to_tf32 and sp24cli.ops.prune_file and sp24cli.verify.verify_file\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(sp24cli.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sp24cli.nothing  # noqa: B018
