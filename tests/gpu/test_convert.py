"""Pruning and packing on the GPU: the files and the reports are those of the CPU, bit for bit."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow
from sp24cli.gpu import convert
from sp24cli.gpu.convert import Converter
from sp24cli.gpu.device import Device
from sp24cli.ops import prune_checkpoint
from sp24cli.ops.choose import Choice
from sp24cli.ops.pack import Band, pack_bands
from sp24cli.ops.prune import prune_file
from sp24cli.ops.quantize import quantize_file
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import PackInfo
from sp24cli.pruning.pattern import Pattern
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from tests.cpu.convertdevice import refusal_of_both
from tests.cpu.modelfile import load, save

Array = npt.NDArray[Any]

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

#: One group; rows and groups that fill neither a patch nor a vector nor a block; whole ones.
SHAPES = [(1, 4), (3, 12), (17, 1028), (64, 256), (130, 260), (65, 4092), (192, 2048), (1000, 36)]

SCALES = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "128x128": ScaleSpec("block", (128, 128)),
    "1x128": ScaleSpec("block", (1, 128)),
    "3x12": ScaleSpec("block", (3, 12)),
    "24x4": ScaleSpec("block", (24, 4)),
    "16x512": ScaleSpec("block", (16, 512)),
    "huge": ScaleSpec("block", (1 << 40, 1 << 40)),
    "mx": ScaleSpec.parse("mx"),
}


@pytest.fixture(scope="module")
def engine(device: Device) -> Converter:
    return Converter(device)


def values(seed: int, shape: tuple[int, int], dtype: str) -> Array:
    """Normal values with ties, both zeros, whole groups and rows of zero, and tiny ones."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    x[random.random(shape) < 0.2] = 0
    x = np.where(random.random(shape) < 0.2, np.copysign(0.5, x), x)
    x = np.where(random.random(shape) < 0.05, x * 1e-6, x)
    x = np.where(random.random(shape) < 0.1, -x, x)
    if shape[0] > 16:
        x[5] = 0
        x[16, :4] = -0.0
    return x.astype(np.float32).astype(DTYPES[dtype])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        dtype: save(
            folder / dtype,
            {f"w{m}x{k}.weight": values(m + k, (m, k), dtype) for m, k in SHAPES}
            | {"norm.weight": np.ones(7, np.float32)},
        )
        for dtype in DTYPES
    }


def assert_same(there: Path, here: Path, by_gpu: Any, by_cpu: Any) -> None:
    assert there.read_bytes() == here.read_bytes()
    assert by_gpu.on_cpu == ()
    mine, theirs = asdict(by_gpu), asdict(by_cpu)
    for name in ("output", "device"):
        assert mine.pop(name) != theirs.pop(name)
    assert mine == theirs


@every_dtype
@pytest.mark.parametrize("workers", [1, 4])
def test_odd_shapes_are_pruned_alike(
    engine: Converter, models: dict[str, Path], tmp_path: Path, dtype: str, workers: int
) -> None:
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(models[dtype], there, engine=engine, workers=workers)
    assert_same(there, here, by_gpu, prune_file(models[dtype], here))


@every_dtype
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("prune", [True, False])
def test_odd_shapes_are_packed_alike(
    engine: Converter,
    models: dict[str, Path],
    tmp_path: Path,
    dtype: str,
    scale: str,
    layout: Any,
    prune: bool,
) -> None:
    compare_packing(engine, models[dtype], tmp_path, "e4m3", SCALES[scale], layout, prune)


@every_dtype
@pytest.mark.parametrize("type_name", ["e5m2", "s8"])
@pytest.mark.parametrize("scale", ["tensor", "vector", "3x12", "mx"])
def test_odd_shapes_become_other_8_bit_operands_alike(
    engine: Converter,
    models: dict[str, Path],
    tmp_path: Path,
    dtype: str,
    type_name: str,
    scale: str,
) -> None:
    compare_packing(engine, models[dtype], tmp_path, type_name, SCALES[scale], "sm90", True)


@every_dtype
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("overflow", ["satfinite", "nan"])
def test_odd_shapes_become_16_bit_operands_alike(
    engine: Converter,
    models: dict[str, Path],
    tmp_path: Path,
    dtype: str,
    type_name: str,
    layout: Any,
    overflow: Overflow,
) -> None:
    compare_packing(
        engine, models[dtype], tmp_path, type_name, ScaleSpec("none"), layout, True, overflow
    )


def compare_packing(
    engine: Converter,
    model: Path,
    folder: Path,
    type_name: str,
    spec: ScaleSpec,
    layout: Any,
    prune: bool,
    overflow: Overflow = "satfinite",
    choice: Choice | None = None,
) -> None:
    there, here = folder / "gpu", folder / "cpu"
    if not prune:
        prune_file(model, folder / "pruned")
        model = folder / "pruned"
    options: dict[str, Any] = {
        "optype": OPERAND_TYPES[type_name],
        "spec": spec,
        "layout": layout,
        "prune": prune,
        "overflow": overflow,
        "choice": choice,
        "histograms": True,
    }
    by_gpu = quantize_file(model, there, engine=engine, workers=3, **options)
    assert_same(there, here, by_gpu, quantize_file(model, here, **options))


@every_dtype
def test_a_tensor_of_many_batches(engine: Converter, tmp_path: Path, dtype: str) -> None:
    shape = (5003, 4096)
    assert shape[0] * shape[1] > 2 * convert.BATCH_ELEMENTS
    model = save(tmp_path / "model", {"a.weight": values(1, shape, dtype)})
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(model, there, engine=engine, workers=4)
    assert_same(there, here, by_gpu, prune_file(model, here))
    for spec in (SCALES["tensor"], SCALES["128x128"]):
        folder = tmp_path / spec.kind
        folder.mkdir()
        compare_packing(engine, model, folder, "e4m3", spec, "sm90", True)


def every_value(dtype: str) -> Array:
    """All finite values of a 16-bit type as lone values at each place of a group: [., 2048]."""
    kind = np.dtype(DTYPES[dtype])
    bits = np.arange(1 << 16, dtype=np.uint16).view(kind)
    bits = bits[np.isfinite(bits.astype(np.float32))]
    groups = np.zeros((len(bits), 4), kind)
    groups[np.arange(len(bits)), np.arange(len(bits)) % 4] = bits
    rows = np.zeros((-(-groups.size // 2048), 2048), kind)
    rows.reshape(-1)[: groups.size] = groups.reshape(-1)
    return rows


def largest_steps() -> Array:
    """float32 around every E4M3 value and every middle of two, and what lies past the end."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    points = np.concatenate([codes, middles, [464, 480, 1e9, 3e38, 2**-10, 2**-11, 1e-40]])
    points = points.astype(np.float32)
    near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    every = np.concatenate([*near, *(-n for n in near)])
    rows = np.zeros((-(-len(every) // 64), 64, 4), np.float32)
    rows.reshape(-1, 4)[: len(every), 1] = every
    return rows.reshape(len(rows), 256)


@pytest.mark.parametrize(
    ("type_name", "overflow"),
    [
        (name, overflow)
        for name in ("e4m3", "e5m2", "s8", "f16", "bf16")
        for overflow in ("satfinite", "nan")
        if (name, overflow) != ("s8", "nan")
    ],
)
@pytest.mark.parametrize(
    ("dtype", "made"),
    [
        ("BF16", lambda: every_value("BF16")),
        ("F16", lambda: every_value("F16")),
        ("F32", largest_steps),
    ],
    ids=["BF16", "F16", "F32"],
)
def test_every_value_gets_the_code_of_the_cpu(
    engine: Converter,
    tmp_path: Path,
    dtype: str,
    made: Any,
    type_name: str,
    overflow: Overflow,
) -> None:
    """Under scales of its own choosing, so that values are clipped and become subnormal too."""
    optype = OPERAND_TYPES[type_name]
    dense = made()
    model = save(tmp_path / "model", {"a.weight": dense})
    spec = ScaleSpec("tensor" if optype.scaled else "none")
    info = PackInfo(dense.shape, dtype, type_name, spec, "given", "row", overflow)
    scales: list[Array | None] = [None]
    if optype.scaled:
        scales = [np.array([s], np.float32) for s in (1, 0.37, 3e-5, 1.7e30, 2**-126)]
    with SafetensorsFile(model) as file:
        for scale in scales:
            got, want = (
                one_band(pack(file, "a.weight", info, scale, prune=False, workers=1))
                for pack in (engine.pack, pack_bands)
            )
            for part in ("values", "meta"):
                mine, theirs = (getattr(b.packed, part).view(np.uint8) for b in (got, want))
                assert np.array_equal(mine, theirs)
            assert got.stats == want.stats


def one_band(bands: Any) -> Band:
    (band,) = bands
    assert isinstance(band, Band)
    return band


@every_dtype
def test_six_patterns_at_every_lane(engine: Converter, tmp_path: Path, dtype: str) -> None:
    """Each index pair stands once at every group of a patch and of the next; all others are lone
    values at each place."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0,), (1,), (2,), (3,), ()]
    rows, groups = 11 * 3, 2 * 256 // 4 + 1
    dense = np.zeros((rows, groups, 4), np.float32)
    for row in range(rows):
        for group in range(groups):
            for place in pairs[(row + group) % 11]:
                dense[row, group, place] = 1 + (row + 3 * group + 7 * place) % 13
    dense = dense.reshape(rows, -1)
    dense[dense == 0] = -0.0
    model = save(tmp_path / "model", {"a.weight": dense.astype(DTYPES[dtype])})
    for prune in (True, False):
        for layout in ("row", "sm90"):
            options: dict[str, Any] = {
                "optype": OPERAND_TYPES["e4m3"],
                "spec": SCALES["vector"],
                "layout": layout,
                "prune": prune,
                "overwrite": True,
            }
            there, here = tmp_path / "gpu", tmp_path / "cpu"
            by_gpu = quantize_file(model, there, engine=engine, **options)
            assert_same(there, here, by_gpu, quantize_file(model, here, **options))


@every_dtype
def test_ties_keep_the_lower_index(engine: Converter, tmp_path: Path, dtype: str) -> None:
    """All groups of values 0, 1, 2 with signs: 625 of them, against the definition."""
    digits = np.array(np.meshgrid(*[[0, 1, -1, 2, -2]] * 4)).reshape(4, -1).T
    model = save(tmp_path / "model", {"a.weight": digits.reshape(25, 100).astype(DTYPES[dtype])})
    prune_file(model, tmp_path / "out", engine=engine)
    with SafetensorsFile(tmp_path / "out") as file:
        got = np.array(file.array("a.weight")).reshape(-1, 4)
    for group, pruned in zip(digits.tolist(), got.astype(int).tolist(), strict=True):
        kept = sorted(range(4), key=lambda i: (-abs(group[i]), i))[:2]
        assert pruned == [group[i] if i in kept else 0 for i in range(4)]
    assert not np.signbit(got.astype(np.float32))[got.astype(np.float32) == 0].any()


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (700, 1027), (4999, 3)])
def test_what_is_not_finite_is_named_alike(
    engine: Converter, tmp_path: Path, dtype: str, bad: float, place: tuple[int, int]
) -> None:
    weight = prune_24(np.random.default_rng(1).standard_normal((5000, 1028)).astype(np.float32))
    weight = weight.astype(DTYPES[dtype])
    weight[place] = bad
    model = save(tmp_path / "model", {"a.weight": weight})
    packing: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": SCALES["tensor"]}
    for run in (
        lambda **how: prune_file(model, tmp_path / "out", **how),
        lambda **how: quantize_file(model, tmp_path / "out", prune=True, **packing, **how),
        lambda **how: quantize_file(model, tmp_path / "out", **packing, **how),
        lambda **how: prune_checkpoint(model, tmp_path / "out", **how),
    ):
        assert f"row {place[0]}, column {place[1]}" in refusal_of_both(run, engine)


@every_dtype
def test_a_crowded_group_is_named_alike(engine: Converter, tmp_path: Path, dtype: str) -> None:
    weight = prune_24(values(2, (3000, 1028), dtype))
    weight[2500, 1024:1028] = 1
    model = save(tmp_path / "model", {"a.weight": weight})
    for how in ({}, {"engine": engine}):
        with pytest.raises(BadInputError, match="at row 2500, group 256 "):
            quantize_file(
                model,
                tmp_path / "out",
                optype=OPERAND_TYPES["e4m3"],
                spec=SCALES["vector"],
                **how,  # type: ignore[arg-type]
            )


def test_checkpoints_are_the_same(engine: Converter, tmp_path: Path) -> None:
    from tests.cpu.checkpoints import contents, write_checkpoint

    source = write_checkpoint(tmp_path / "in")
    prune_checkpoint(source, tmp_path / "gpu", engine=engine)
    prune_checkpoint(source, tmp_path / "cpu")
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


def save_norms(model: Path, norms: Any) -> Choice:
    """A choice by wanda, with what ``norms(K)`` gives for every matrix of ``model``."""
    tensors, _ = load(model)
    made = {name: norms(w.shape[1]) for name, w in tensors.items() if w.ndim == 2}
    return Choice("wanda", calibration=save(model.with_name(f"{model.name}.norms"), made))


def usual_norms(k: int) -> Array:
    """Norms over some orders of magnitude, a tenth of them equal, a tenth zero."""
    random = np.random.default_rng(k)
    norms = np.exp(random.standard_normal(k))
    norms[random.random(k) < 0.1] = 0.5
    norms[random.random(k) < 0.1] = 0
    return norms.astype(np.float32)


@every_dtype
@pytest.mark.parametrize("workers", [1, 4])
def test_odd_shapes_are_pruned_by_wanda_alike(
    engine: Converter, models: dict[str, Path], tmp_path: Path, dtype: str, workers: int
) -> None:
    choice = save_norms(models[dtype], usual_norms)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(models[dtype], there, choice=choice, engine=engine, workers=workers)
    assert_same(there, here, by_gpu, prune_file(models[dtype], here, choice=choice))
    lost = [t.weighted_error for t in by_gpu.tensors]
    assert all(share is not None and 0 < share < 1 for share in lost[1:])
    prune_file(models[dtype], tmp_path / "magnitude")
    assert there.read_bytes() != (tmp_path / "magnitude").read_bytes()


@every_dtype
@pytest.mark.parametrize("scale", ["tensor", "vector", "128x128", "3x12", "mx"])
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_odd_shapes_are_packed_by_wanda_alike(
    engine: Converter,
    models: dict[str, Path],
    tmp_path: Path,
    dtype: str,
    scale: str,
    layout: Any,
) -> None:
    choice = save_norms(models[dtype], usual_norms)
    model = models[dtype]
    compare_packing(
        engine, model, tmp_path, "e4m3", SCALES[scale], layout, True, "satfinite", choice
    )


@every_dtype
@pytest.mark.parametrize("type_name", ["e5m2", "s8", "f16", "bf16"])
def test_odd_shapes_become_other_operands_by_wanda_alike(
    engine: Converter, models: dict[str, Path], tmp_path: Path, dtype: str, type_name: str
) -> None:
    choice = save_norms(models[dtype], usual_norms)
    spec = SCALES["vector"] if OPERAND_TYPES[type_name].scaled else ScaleSpec("none")
    model = models[dtype]
    compare_packing(engine, model, tmp_path, type_name, spec, "sm90", True, "satfinite", choice)


NORMS: dict[str, Any] = {
    "zero": lambda k: np.zeros(k),
    # All products are subnormal, or round to zero, and tie.
    "subnormal": lambda k: np.arange(k) % 7 * 5e-324,
    "least": lambda k: np.where(np.arange(k) % 5 == 4, 1.0, np.arange(k) % 3 * 5e-324),
    "huge": lambda k: np.where(np.arange(k) % 3, 1e308, 1.7e308),
    "far apart": lambda k: 10.0 ** np.random.default_rng(k).integers(-308, 308, k),
    "bf16": lambda k: usual_norms(k).astype(DTYPES["BF16"]),
    "f16": lambda k: usual_norms(k).astype(np.float16),
}


@every_dtype
@pytest.mark.parametrize("norms", NORMS)
def test_extreme_norms(engine: Converter, tmp_path: Path, dtype: str, norms: str) -> None:
    """Beside weights from the least subnormal to the largest of the type."""
    kind = np.dtype(DTYPES[dtype])
    limits = ml_dtypes.finfo(kind)
    dense = values(3, (67, 1028), dtype)
    random = np.random.default_rng(4)
    for value in (limits.smallest_subnormal, limits.tiny, limits.max, -limits.max):
        dense[random.random(dense.shape) < 0.1] = kind.type(value)
    model = save(tmp_path / "model", {"a.weight": dense})
    choice = save_norms(model, NORMS[norms])
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(model, there, choice=choice, engine=engine)
    assert_same(there, here, by_gpu, prune_file(model, here, choice=choice))
    folder = tmp_path / "packed"
    folder.mkdir()
    compare_packing(engine, model, folder, "e4m3", SCALES["mx"], "row", True, "satfinite", choice)


@every_dtype
def test_equal_products_keep_the_lower_index(engine: Converter, tmp_path: Path, dtype: str) -> None:
    """All groups of values 0, 1, 2 with signs under norms 1, 2, 0 and 1: against the definition."""
    digits = np.array(np.meshgrid(*[[0, 1, -1, 2, -2]] * 4)).reshape(4, -1).T
    dense = digits.reshape(25, 100).astype(DTYPES[dtype])
    model = save(tmp_path / "model", {"a.weight": dense})
    norms = [1.0, 2.0, 0.0, 1.0]
    choice = save_norms(model, lambda k: np.tile(norms, k // 4))
    prune_file(model, tmp_path / "out", choice=choice, engine=engine)
    with SafetensorsFile(tmp_path / "out") as file:
        got = np.array(file.array("a.weight")).reshape(-1, 4)
    for group, pruned in zip(digits.tolist(), got.astype(int).tolist(), strict=True):
        scores = [abs(w) * n if w else -1 for w, n in zip(group, norms, strict=True)]
        kept = sorted(range(4), key=lambda i: (-scores[i], i))[:2]
        assert pruned == [group[i] if i in kept else 0 for i in range(4)]


@every_dtype
def test_norms_of_one_are_magnitude(
    engine: Converter, models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    choice = save_norms(models[dtype], lambda k: np.full(k, 7.3))
    prune_file(models[dtype], tmp_path / "wanda", choice=choice, engine=engine)
    prune_file(models[dtype], tmp_path / "magnitude", engine=engine)
    assert (tmp_path / "wanda").read_bytes() == (tmp_path / "magnitude").read_bytes()


def test_many_batches_by_wanda(engine: Converter, tmp_path: Path) -> None:
    shape = (5003, 4096)
    assert shape[0] * shape[1] > 2 * convert.BATCH_ELEMENTS
    model = save(tmp_path / "model", {"a.weight": values(1, shape, "BF16")})
    choice = save_norms(model, usual_norms)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(model, there, choice=choice, engine=engine, workers=4)
    assert_same(there, here, by_gpu, prune_file(model, here, choice=choice))
    for scale in ("tensor", "mx"):
        folder = tmp_path / scale
        folder.mkdir()
        spec = SCALES[scale]
        compare_packing(engine, model, folder, "e4m3", spec, "sm90", True, "satfinite", choice)


@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
def test_every_power_is_the_least_that_does(
    engine: Converter, tmp_path: Path, type_name: str
) -> None:
    """One value a block of 32, on both sides of where the power changes, in every binade of F32."""
    optype = OPERAND_TYPES[type_name]
    end = np.float32(optype.max_finite).view(np.uint32) & 0x7FFFFF
    mantissas = np.array([0, 1, end - 1, end, end + 1, 0x7FFFFF, 0x400000], np.uint32)
    bits = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissas).reshape(-1)
    every = bits.view(np.float32) * np.where(np.arange(bits.size) % 2, -1, 1).astype(np.float32)
    dense = np.zeros((255, mantissas.size, 32), np.float32)
    places = np.arange(every.size)
    dense.reshape(-1, 32)[places, places % 32] = every
    dense = dense.reshape(255, -1)
    model = save(tmp_path / "model", {"a.weight": dense})
    compare_packing(engine, model, tmp_path, type_name, SCALES["mx"], "row", False)
    codes = load(tmp_path / "gpu")[0]["a.weight_scale"].view(np.uint8).reshape(-1)
    assert codes.min() == 1 and codes.max() <= 254
    for code, value in zip(codes.tolist(), np.abs(every).tolist(), strict=True):
        power = 2.0 ** (code - 127)
        if value == 0:
            assert code == 127
            continue
        # Quotients by powers of two are exact in float64.
        assert value / power <= optype.max_finite
        assert code == 1 or value / (power / 2) > optype.max_finite


PATTERNS = [(1, 2), (1, 4), (3, 4), (2, 5), (4, 8), (3, 12), (1, 16), (17, 31), (31, 32)]


@every_dtype
@pytest.mark.parametrize("pattern", PATTERNS, ids="{0[0]}:{0[1]}".format)
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_other_patterns_are_pruned_alike(
    engine: Converter, tmp_path: Path, dtype: str, pattern: tuple[int, int], method: str
) -> None:
    """Groups that lie across the columns of a lane, a warp and a patch."""
    wanted = Pattern(*pattern)
    step = math.lcm(4, wanted.group)
    shapes = [(1, step), (17, 1028 // step * step + step), (130, 256 // step * step + step)]
    dense = {f"w{m}x{k}.weight": values(m + k, (m, k), dtype) for m, k in shapes}
    model = save(tmp_path / "model", dense)
    choice = Choice(pattern=wanted)
    if method == "wanda":
        calibration = save_norms(model, usual_norms).calibration
        choice = Choice("wanda", pattern=wanted, calibration=calibration)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(model, there, choice=choice, engine=engine, workers=3)
    assert_same(there, here, by_gpu, prune_file(model, here, choice=choice))


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [(0, 0), (700, 1027)])
def test_what_is_not_finite_is_named_alike_by_every_choice(
    engine: Converter, tmp_path: Path, dtype: str, bad: float, place: tuple[int, int]
) -> None:
    """Also in a channel that does not count, and where its group keeps others."""
    weight = np.random.default_rng(1).standard_normal((1000, 1032)).astype(np.float32)
    weight = weight.astype(DTYPES[dtype])
    weight[place] = bad
    model = save(tmp_path / "model", {"a.weight": weight})

    def norms(k: int) -> Array:
        found = usual_norms(k)
        found[place[1]] = 0
        return found

    wanda = save_norms(model, norms)
    packing: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "prune": True}
    for run in (
        lambda **how: prune_file(model, tmp_path / "out", choice=wanda, **how),
        lambda **how: prune_file(
            model, tmp_path / "out", choice=Choice(pattern=Pattern(1, 8)), **how
        ),
        *(
            lambda spec=SCALES[scale], choice=choice, **how: quantize_file(
                model, tmp_path / "out", spec=spec, choice=choice, **packing, **how
            )
            for scale in ("tensor", "mx")
            for choice in (None, wanda)
        ),
    ):
        assert f"row {place[0]}, column {place[1]}" in refusal_of_both(run, engine)
