"""Methods, patterns and permutations on whole files, from pruning to unpacking."""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sp24cli
from sp24cli.checkpoint.names import Selection
from sp24cli.cli.main import run
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.ops import (
    choose,
    inspect_file,
    prune_checkpoint,
    prune_file,
    quantize_file,
    stream,
    unpack_file,
)
from sp24cli.ops.choose import Choice
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning import permute
from sp24cli.pruning import sparsegpt as sparsegpt_module
from sp24cli.pruning.pattern import Pattern, find_crowded, prune_pattern
from sp24cli.pruning.triangle import Triangle
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import find_violation, prune_24
from sp24cli.verify import verify_file
from sp24cli.verify.result import TensorVerdict
from tests.cpu.checkpoints import shard, small_model, write_checkpoint
from tests.cpu.modelfile import DTYPES, Array, load, naive_prune, normal, save
from tests.cpu.test_pruning_permute import kept, squares
from tests.cpu.test_pruning_sparsegpt import inputs, naive_sparsegpt
from tests.cpu.test_pruning_wanda import naive_wanda

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
SHAPES = {"a.weight": (50, 48), "b.weight": (33, 16)}
E4M3 = OPERAND_TYPES["e4m3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights of unlike columns, with norms and Hessians beside them."""
    tensors: dict[str, Array] = {}
    norms, hessians = {}, {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        signs = np.sign(normal(seed + 10, shape))
        tensors[name] = (np.sqrt(squares(seed, shape)) * signs).astype(np.float32)
        x = inputs(seed + 20, shape[1])
        norms[name] = np.linalg.norm(x, axis=1).astype(np.float32)
        hessians[name] = (x @ x.T).astype(np.float32)
    tensors["b.weight"] = tensors["b.weight"].astype(DTYPES["BF16"])
    tensors["a.bias"] = normal(3, (50,))
    save(tmp_path / "norms", norms)
    save(tmp_path / "hessians", hessians)
    return save(tmp_path / "in", tensors, {"who": "me"})


def wanda(model: Path, **options: Any) -> Choice:
    return Choice("wanda", calibration=model.with_name("norms"), **options)


def sparsegpt(model: Path, **options: Any) -> Choice:
    return Choice("sparsegpt", calibration=model.with_name("hessians"), **options)


def choices(model: Path) -> dict[str, Choice]:
    return {
        "magnitude": Choice(),
        "magnitude, permuted": Choice(permute=True),
        "wanda": wanda(model),
        "wanda, permuted": wanda(model, permute=True),
        "sparsegpt": sparsegpt(model),
        "sparsegpt, permuted": sparsegpt(model, permute=True),
        "wanda 4:8": wanda(model, pattern=Pattern(4, 8)),
        "sparsegpt 1:2": sparsegpt(model, pattern=Pattern(1, 2)),
        "magnitude 1:4": Choice(pattern=Pattern(1, 4)),
    }


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads have work by sparsegpt."""
    monkeypatch.setattr(sparsegpt_module, "_PIECE", 8)
    monkeypatch.setattr(sparsegpt_module, "_PIECE_ELEMENTS", 0)
    monkeypatch.setattr(sparsegpt_module, "_ENERGY_PIECE", 8)


NAMES = list(choices(Path("model")))


def test_wanda_is_that_of_the_naive_loop(model: Path, tmp_path: Path) -> None:
    report = prune_file(model, tmp_path / "out", choice=wanda(model))
    before, pruned, norms = load(model)[0], load(tmp_path / "out")[0], load(tmp_path / "norms")[0]
    for tensor in report.tensors:
        name = tensor.name
        want = naive_wanda(before[name], norms[name], 2, 4)
        assert pruned[name].tobytes() == want.tobytes()
        weighted = [
            np.square(w.astype(np.float64) * norms[name]).sum() for w in (want, before[name])
        ]
        assert tensor.weighted_error == pytest.approx(1 - weighted[0] / weighted[1], rel=1e-9)
        assert (tensor.method, tensor.permuted) == ("wanda", False)
    assert (report.method, report.pattern) == ("wanda", "2:4")
    assert set(pruned) == set(before)


def test_sparsegpt_is_that_of_the_naive_loop(model: Path, tmp_path: Path) -> None:
    choice = sparsegpt(model, damping=0.02, block_size=8)
    report = prune_file(model, tmp_path / "out", choice=choice)
    before, pruned, hessians = (load(tmp_path / n)[0] for n in ("in", "out", "hessians"))
    for tensor in report.tensors:
        name = tensor.name
        dense, hessian = before[name].astype(np.float64), hessians[name].astype(np.float64)
        want = naive_sparsegpt(dense, hessian, 2, 4, 0.02)
        got = pruned[name].astype(np.float64)
        assert np.array_equal(got != 0, want != 0)
        np.testing.assert_allclose(got, want, rtol=2**-8 if name == "b.weight" else 1e-6)
        lost = np.trace((dense - got) @ hessian @ (dense - got).T)
        assert tensor.weighted_error == pytest.approx(
            lost / np.trace(dense @ hessian @ dense.T), rel=1e-6
        )
        held = np.where(got != 0, dense, 0)
        share = np.square(held).sum() / np.square(dense).sum()
        assert tensor.kept_energy == pytest.approx(share, rel=1e-9)


def test_sparsegpt_loses_less_of_the_outputs_than_the_others(model: Path) -> None:
    hessians = load(model.with_name("hessians"))[0]
    before = load(model)[0]
    lost: dict[str, float] = {}
    for name, choice in (("m", Choice()), ("w", wanda(model)), ("s", sparsegpt(model))):
        output = model.with_name(name)
        prune_file(model, output, choice=choice)
        difference = before["a.weight"].astype(np.float64) - load(output)[0]["a.weight"]
        lost[name] = float(np.trace(difference @ hessians["a.weight"] @ difference.T))
    assert lost["s"] < 0.8 * lost["w"]
    assert lost["w"] < lost["m"]


@pytest.mark.parametrize("text", ["1:2", "4:8", "1:4", "3:8"])
def test_patterns(model: Path, tmp_path: Path, text: str) -> None:
    pattern = Pattern.parse(text)
    report = prune_file(model, tmp_path / "out", choice=Choice(pattern=pattern))
    pruned = load(tmp_path / "out")[0]
    for name in SHAPES:
        assert pruned[name].tobytes() == prune_pattern(load(model)[0][name], pattern).tobytes()
    assert report.pattern == text


def test_a_width_that_a_pattern_does_not_fit_is_skipped_with_the_reason(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 12)), "b.weight": normal(2, (4, 6))})
    report = prune_file(source, None, choice=Choice(pattern=Pattern(4, 8)))
    assert [item.reason for item in report.skipped] == [
        f"K = {k} is not a multiple of 8" for k in (12, 6)
    ]
    report = prune_file(source, None, choice=Choice(pattern=Pattern(1, 2)))
    assert len(report.tensors) == 2


# --- the order of the columns ----------------------------------------------------------------


def test_an_order_that_cannot_be_is_a_fault_of_structure(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    spec = ScaleSpec("tensor")
    quantize_file(model, packed, optype=E4M3, spec=spec, prune=True, choice=Choice(permute=True))
    assert all(p.permuted for p in inspect_file(packed).packed)
    tensors, metadata = load(packed)
    order = tensors["a.weight_perm"].copy()
    order[3] = len(order)
    bad = save(tmp_path / "bad", tensors | {"a.weight_perm": order}, metadata)
    for against in (None, model):
        report = verify_file(bad, against, device="cpu")
        assert report.failure is not None
        assert report.failure.startswith(f"a.weight: structure: permutation has {len(order)} at 3")


@pytest.mark.parametrize("name", [n for n in NAMES if "permuted" in n])
def test_a_permuted_weight_stays_in_its_order(model: Path, tmp_path: Path, name: str) -> None:
    plain = {t.name: t for t in prune_file(model, None, choice=choices(model)[name[:-10]]).tensors}
    report = prune_file(model, tmp_path / "out", choice=choices(model)[name])
    before, pruned = load(model)[0], load(tmp_path / "out")[0]
    assert set(pruned) == {*before, "a.weight_perm", "b.weight_perm"}
    for tensor in report.tensors:
        dense, perm = pruned[tensor.name], pruned[f"{tensor.name}_perm"]
        assert tensor.permuted
        assert sorted(perm) == list(range(dense.shape[1]))
        assert find_violation(dense) is not None
        assert find_violation(permute.apply(dense, perm)) is None
        if name != "sparsegpt, permuted":
            where = dense != 0
            assert np.array_equal(dense[where], before[tensor.name][where])
        if name == "magnitude, permuted":
            assert tensor.kept_energy > plain[tensor.name].kept_energy
            scores = np.square(before[tensor.name].astype(np.float64))
            assert tensor.kept_energy == pytest.approx(kept(scores, perm) / scores.sum())
        else:
            error, without = tensor.weighted_error, plain[tensor.name].weighted_error
            assert error is not None and without is not None and error < without


def test_a_sample_that_misleads_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not looked at are better off as they are: then so is the whole."""
    weight = np.tile(np.array([9, 8, 1, 1] * 2, np.float32), (64, 1))
    weight[::8] = [[4, 4, 4, 4, 1, 1, 1, 1]]
    source = save(tmp_path / "in", {"a.weight": weight})
    monkeypatch.setattr(permute, "SAMPLE_ELEMENTS", 64)
    report = prune_file(source, tmp_path / "out", choice=Choice(permute=True))
    tensors = load(tmp_path / "out")[0]
    assert tensors["a.weight_perm"].tolist() == list(range(8))
    assert tensors["a.weight"].tobytes() == naive_prune(weight).tobytes()
    assert report.tensors[0].permuted
    monkeypatch.setattr(permute, "SAMPLE_ELEMENTS", 512)
    weight[:] = weight[0]
    prune_file(
        save(source, {"a.weight": weight}),
        tmp_path / "out",
        choice=Choice(permute=True),
        overwrite=True,
    )
    assert load(tmp_path / "out")[0]["a.weight_perm"].tolist() != list(range(8))


@pytest.mark.parametrize("kind", ["tensor", "vector", "block"])
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("at_once", [True, False])
def test_permuted_through_pack_verify_unpack(
    model: Path, tmp_path: Path, kind: Any, layout: Any, at_once: bool
) -> None:
    spec = ScaleSpec(kind, (64, 16) if kind == "block" else None)
    pruned, packed, dense = (tmp_path / n for n in ("pruned", "packed", "dense"))
    prune_file(model, pruned, choice=Choice(permute=True))
    if at_once:
        quantize_file(
            model,
            packed,
            optype=E4M3,
            spec=spec,
            layout=layout,
            prune=True,
            choice=Choice(permute=True),
        )
    else:
        quantize_file(pruned, packed, optype=E4M3, spec=spec, layout=layout)
    for original in (model, pruned):
        report = verify_file(packed, original, device="cpu")
        assert report.passed, report.failure
        assert all(
            (t.agreement is not None and not t.agreement.note) or original == model
            for t in report.tensors
        )
    unpack_file(packed, dense, dtype="f32")
    before, after = load(pruned)[0], load(dense)[0]
    assert set(after) == set(before)
    for name in SHAPES:
        wide = before[name].astype(np.float64)
        assert np.array_equal(after[name] != 0, wide != 0)
        np.testing.assert_allclose(after[name], wide, rtol=0.07, atol=1e-3)
        assert after[f"{name}_perm"].tobytes() == before[f"{name}_perm"].tobytes()
        matrix = sp24cli.load(packed, name)
        assert sp24cli.unpack(matrix).tobytes() == after[name].tobytes()
    # What comes back can be packed again, to the same bytes.
    again = tmp_path / "again"
    quantize_file(dense, again, optype=OPERAND_TYPES["bf16"], spec=ScaleSpec("none"))
    assert verify_file(again, dense, device="cpu").passed


def test_a_wrong_order_is_found(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    options: Any = {"optype": E4M3, "spec": ScaleSpec("vector"), "prune": True}
    quantize_file(model, packed, choice=Choice(permute=True), **options)
    raw = packed.read_bytes()
    perm = load(packed)[0]["a.weight_perm"]

    def verdict(changed: Array) -> TensorVerdict:
        packed.write_bytes(raw.replace(perm.tobytes(), changed.tobytes()))
        report = verify_file(packed, model, device="cpu")
        assert not report.passed
        return next(t for t in report.tensors if t.name == "a.weight")

    found = verdict(perm[::-1].copy())
    assert found.structure is None
    assert found.agreement is not None and found.agreement.fault is not None
    assert verdict(perm * 0).structure == "permutation has column 0 twice"
    with pytest.raises(BadInputError, match=r"'a.weight': permutation has column 0 twice"):
        unpack_file(packed, tmp_path / "dense")


def test_codes_by_block_have_no_other_order(model: Path, tmp_path: Path) -> None:
    options: Any = {"optype": E4M3, "prune": True, "choice": Choice(permute=True)}
    quantize_file(model, tmp_path / "b", spec=ScaleSpec("block", (64, 16)), **options)
    with pytest.raises(BadInputError, match="block scales"):
        unpack_file(tmp_path / "b", tmp_path / "dense", codes=True)
    quantize_file(model, tmp_path / "v", spec=ScaleSpec("vector"), **options)
    unpack_file(tmp_path / "v", tmp_path / "codes", codes=True)
    unpack_file(tmp_path / "v", tmp_path / "dense", dtype="f32")
    codes, dense = load(tmp_path / "codes")[0], load(tmp_path / "dense")[0]
    product = codes["a.weight"].astype(np.float32) * codes["a.weight_scale"]
    assert product.tobytes() == dense["a.weight"].tobytes()


@pytest.mark.parametrize("bad", [[0] * 48, list(range(1, 49)), list(range(16))])
def test_an_order_in_the_file_that_is_none(model: Path, tmp_path: Path, bad: list[int]) -> None:
    perm = np.array(bad, np.int32)
    source = save(tmp_path / "bad", load(model)[0] | {"a.weight_perm": perm})
    with pytest.raises(BadInputError, match=rf"^{source}: tensor 'a.weight_perm': permutation "):
        prune_file(source, tmp_path / "out")
    with pytest.raises(BadInputError, match=r"'a.weight_perm': permutation "):
        quantize_file(source, tmp_path / "out", optype=E4M3, spec=ScaleSpec("vector"), prune=True)
    assert not (tmp_path / "out").exists()


# --- a mask that is there ---------------------------------------------------------------------


@pytest.mark.parametrize("first", ["magnitude", "wanda, permuted", "sparsegpt"])
@pytest.mark.parametrize("then", [n for n in NAMES if ":" not in n])
def test_a_mask_that_is_there_is_kept(model: Path, tmp_path: Path, first: str, then: str) -> None:
    prune_file(model, tmp_path / "once", choice=choices(model)[first])
    report = prune_file(tmp_path / "once", tmp_path / "twice", choice=choices(model)[then])
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()
    assert report.kept_energy == 1.0
    for tensor in report.tensors:
        assert tensor.weighted_error in (None, 0.0)


@pytest.mark.parametrize("text", ["4:8", "1:2", "1:4"])
def test_a_mask_of_another_pattern_is_kept(model: Path, tmp_path: Path, text: str) -> None:
    pattern = Pattern.parse(text)
    prune_file(model, tmp_path / "once", choice=Choice(pattern=pattern))
    for choice in (wanda(model, pattern=pattern), sparsegpt(model, pattern=pattern)):
        prune_file(tmp_path / "once", tmp_path / "twice", choice=choice, overwrite=True)
        assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


# --- the same bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_do_not_depend_on_workers(
    model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 48 * 8)
    monkeypatch.setattr(choose, "SPARSEGPT_PIECES", 2)
    small_pieces(monkeypatch)
    monkeypatch.setattr(sparsegpt_module, "_TILE", 12)
    choice = choices(model)[name]
    reports = [prune_file(model, tmp_path / f"{n}", choice=choice, workers=n) for n in (1, 2, 5)]
    for n in (2, 5):
        assert (tmp_path / f"{n}").read_bytes() == (tmp_path / "1").read_bytes()
    assert len({r.tensors for r in reports}) == 1
    dry = prune_file(model, None, choice=choice)
    assert dry.output_bytes == (tmp_path / "1").stat().st_size
    group = choice.pattern.group
    pruned = load(tmp_path / "1")[0]
    for each in SHAPES:
        dense = pruned[each]
        if choice.permute:
            dense = permute.apply(dense, pruned[f"{each}_perm"])
        assert dense.shape[1] % group == 0
        assert find_crowded(dense, choice.pattern) is None
        assert not np.signbit(dense[dense == 0].astype(np.float32)).any()


def test_packing_by_wanda_is_that_of_pruning_first(model: Path, tmp_path: Path) -> None:
    norms = {name: array.copy() for name, array in load(tmp_path / "norms")[0].items()}
    for name in SHAPES:
        # The largest weights go: the scale is that of what is kept.
        amax = np.abs(load(model)[0][name].astype(np.float32))
        norms[name][amax.max(axis=0).argsort()[-3:]] = 0
    save(tmp_path / "norms", norms)
    for permuted in (False, True):
        choice = wanda(model, permute=permuted)
        for kind in ("tensor", "vector"):
            options: Any = {"optype": E4M3, "spec": ScaleSpec(kind), "overwrite": True}
            prune_file(model, tmp_path / "pruned", choice=choice, overwrite=True)
            quantize_file(tmp_path / "pruned", tmp_path / "two", **options)
            report = quantize_file(model, tmp_path / "one", prune=True, choice=choice, **options)
            one, two = load(tmp_path / "one"), load(tmp_path / "two")
            assert one[0].keys() == two[0].keys()
            for name, array in one[0].items():
                assert array.tobytes() == two[0][name].tobytes()
            assert report.pruned == "wanda"
            assert '"pruned":"wanda"' in one[1]["sp24.tensors"]
            checked = verify_file(tmp_path / "one", model, device="cpu")
            assert checked.passed
            for tensor in checked.tensors:
                assert tensor.agreement is not None and "wanda" in tensor.agreement.note
            checked = verify_file(tmp_path / "one", tmp_path / "pruned", device="cpu")
            assert checked.passed
            assert not any(t.agreement.note for t in checked.tensors if t.agreement)


def test_a_code_that_wanda_packed_wrong_is_found(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantize_file(
        model, packed, optype=E4M3, spec=ScaleSpec("vector"), prune=True, choice=wanda(model)
    )
    codes = load(packed)[0]["a.weight_values"].tobytes()
    wrong = bytes([codes[0] ^ 1]) + codes[1:]
    packed.write_bytes(packed.read_bytes().replace(codes, wrong))
    report = verify_file(packed, model, device="cpu")
    assert report.failure is not None and "code at row 0" in report.failure


# --- what does not fit in memory --------------------------------------------------------------


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every factor of more than a tile lies in a file."""
    monkeypatch.setattr(sparsegpt_module, "_TILE", 12)
    monkeypatch.setattr(sparsegpt_module, "MEMORY_LIMIT", 8 * 16 * 16)


@pytest.mark.parametrize("name", [n for n in NAMES if "sparsegpt" in n])
def test_a_factor_in_a_file_gives_the_same_bytes(
    model: Path, tmp_path: Path, name: str, in_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    used: list[Path | None] = []
    alive: set[Triangle] = set()

    class Watched(Triangle):
        def __init__(self, k: int, tile: int, folder: Path | None = None) -> None:
            super().__init__(k, tile, folder)
            used.append(folder)
            alive.add(self)
            assert len(alive) == 1, "two factors at once"

        def close(self) -> None:
            super().close()
            alive.discard(self)

    monkeypatch.setattr(sparsegpt_module, "Triangle", Watched)
    report = prune_file(model, folder / "file", choice=choices(model)[name], workers=2)
    assert (used, len(alive)) == ([folder, None], 0)
    assert [path.name for path in folder.iterdir()] == ["file"]
    prune_file(model, None, choice=choices(model)[name])
    assert used[2:] == [Path(tempfile.gettempdir()), None]
    monkeypatch.setattr(sparsegpt_module, "MEMORY_LIMIT", 1 << 20)
    again = prune_file(model, folder / "memory", choice=choices(model)[name])
    assert (used[4:], len(alive)) == ([None, None], 0)
    assert (folder / "file").read_bytes() == (folder / "memory").read_bytes()
    assert report.tensors == again.tensors


def test_a_full_disk_ends_in_one_line(
    model: Path, in_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model.with_name("folder")
    folder.mkdir()
    command = ["prune", str(model), "-o", str(folder / "out"), "--method", "sparsegpt"]
    command += ["--hessians", str(model.with_name("hessians"))]
    size = sparsegpt_module.scratch_bytes(48)
    assert size > 10**4
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**4, hard))
    try:
        assert run(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fault = f"{folder}: scratch file of {size} bytes cannot be written: File too large"
    assert capsys.readouterr().err.splitlines()[-1].endswith(fault)
    assert not list(folder.iterdir())


def test_room_for_the_factor_is_checked_first(
    model: Path, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, choice = tmp_path / "out", sparsegpt(model)
    size = prune_file(model, None, choice=choice).output_bytes + sparsegpt_module.scratch_bytes(48)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(Sp24Error, match=f"needs {size} bytes, but {tmp_path} has {size - 1} free"):
        prune_file(model, output, choice=choice)
    assert not output.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    prune_file(model, output, choice=choice)
    # With the pattern there, no factor is needed.
    size -= sparsegpt_module.scratch_bytes(48)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    prune_file(output, tmp_path / "again", choice=choice)


# --- input that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_bad_calibration_is_one_error_with_file_tensor_and_place(
    model: Path, tmp_path: Path, method: Any
) -> None:
    good = load(model.with_name("norms" if method == "wanda" else "hessians"))[0]
    k = SHAPES["b.weight"][1]
    nan, negative = good["b.weight"].copy(), good["b.weight"].copy()
    nan.reshape(-1)[-1] = np.nan
    negative.reshape(-1)[0] = -1
    place = f"channel {k - 1}" if method == "wanda" else f"row {k - 1}, column {k - 1}"
    cases: list[tuple[dict[str, Array], str]] = [
        ({"a.weight": good["a.weight"]}, "has no tensor 'b.weight'"),
        ({**good, "b.weight": good["b.weight"][:-4]}, "not"),
        ({**good, "b.weight": good["a.weight"]}, "48"),
        ({**good, "b.weight": good["b.weight"].astype(np.int64)}, "I64"),
        ({**good, "b.weight": nan}, place),
        ({**good, "b.weight": negative}, "-1.0"),
        (
            {**good, "b.weight": np.zeros_like(nan)},
            "no input channel was ever active in the calibration",
        ),
    ]
    bad = tmp_path / "bad"
    for tensors, fault in cases:
        save(bad, tensors)
        with pytest.raises(BadInputError) as raised:
            prune_file(model, tmp_path / "out", choice=Choice(method, calibration=bad))
        message = str(raised.value)
        assert message.startswith(f"{bad}: ")
        assert "'b.weight'" in message and fault in message
        assert "\n" not in message
        assert not (tmp_path / "out").exists()
    bad.write_bytes(b"\x01")
    for path, fault in ((bad, "truncated"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(BadInputError, match=fault):
            prune_file(model, None, choice=Choice(method, calibration=path))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(
    model: Path, tmp_path: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load(model)[0]
    tensors["a.weight"] = tensors["a.weight"].copy()
    tensors["a.weight"][17, 9] = value
    save(model, tensors)
    # So that threads of their own come upon it.
    small_pieces(monkeypatch)
    choice = choices(model)[name]
    with pytest.raises(BadInputError, match=r"'a.weight': (nan|inf) at row 17, column 9"):
        prune_file(model, tmp_path / "out", choice=choice, workers=2)
    if choice.method != "sparsegpt" and choice.pattern == Pattern(2, 4):
        options: Any = {"optype": E4M3, "spec": ScaleSpec("vector"), "prune": True}
        with pytest.raises(BadInputError, match=r"'a.weight': (nan|inf) at row 17, column 9"):
            quantize_file(model, tmp_path / "out", choice=choice, **options)
    assert not (tmp_path / "out").exists()


# --- checkpoints ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four shards with stacked experts; Hessians of all their weights beside them."""
    folder = write_checkpoint(tmp_path / "folder")
    hessians = {}
    for tensors in small_model():
        for name, array in tensors.items():
            if name.endswith((".q.weight", ".up.weight")):
                x = inputs(len(hessians), array.shape[1])
                hessians[name] = (x @ x.T).astype(np.float32)
            if "experts" in name:
                for expert in range(len(array)):
                    x = inputs(len(hessians), array.shape[2])
                    hessians[f"{name}.{expert}"] = (x @ x.T).astype(np.float32)
    save(tmp_path / "hessians", hessians)
    return folder


def test_a_checkpoint_by_sparsegpt_permuted_with_its_experts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = ["--method", "sparsegpt", "--hessians", str(tmp_path / "hessians"), "--permute"]
    pruned, packed, dense = (str(tmp_path / name) for name in ("pruned", "packed", "dense"))
    assert run(["prune", str(folder), "-o", pruned, "--experts", *calibrated]) == 0
    packing = ["--scale", "vector", "--experts"]
    assert run(["quantize", pruned, "-o", packed, *packing]) == 0
    assert run(["verify", packed, "--against", pruned, "--device", "cpu"]) == 0
    assert run(["unpack", packed, "-o", dense]) == 0
    assert run(["quantize", dense, "-o", str(tmp_path / "again"), *packing]) == 0
    assert "7 of 7 packed tensors are right" in capsys.readouterr().out
    for number in range(1, 5):
        before, after = (load(Path(p) / shard(number))[0] for p in (pruned, dense))
        assert before.keys() == after.keys()
        for name, array in before.items():
            assert after[name].shape == array.shape
            if name.endswith("_perm"):
                assert after[name].tobytes() == array.tobytes()
    assert f"{EXPERTS}.2_perm" in load(Path(pruned) / shard(2))[0]


def test_a_checkpoint_needs_room_for_its_largest_factor(
    folder: Path, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {
        "selection": Selection(experts=True),
        "choice": Choice("sparsegpt", calibration=tmp_path / "hessians"),
    }
    dry = prune_checkpoint(folder, None, **options).folder
    assert dry is not None
    usage = shutil.disk_usage(tmp_path)
    free = dry.disk_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free - 1))
    with pytest.raises(Sp24Error, match=f"needs {free} bytes"):
        prune_checkpoint(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    done = prune_checkpoint(folder, tmp_path / "out", **options).folder
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert done is not None
    assert done.disk_bytes == free == written + sparsegpt_module.scratch_bytes(64)


def test_calibration_is_checked_for_all_shards_before_anything_is_written(
    folder: Path, tmp_path: Path
) -> None:
    bad = load(tmp_path / "hessians")[0]
    last = "model.layers.1.attn.q.weight"
    bad[last] = bad[last].copy()
    bad[last][31, 4] = np.nan
    save(tmp_path / "hessians", bad)
    with pytest.raises(
        BadInputError, match=r"1.attn.q.weight.*: Hessian is nan at row 31, column 4"
    ):
        prune_checkpoint(
            folder,
            tmp_path / "out",
            selection=Selection(experts=True),
            choice=Choice("sparsegpt", calibration=tmp_path / "hessians"),
        )
    assert not (tmp_path / "out").exists()


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("prune --method wanda", "--method wanda needs --activation-norms"),
        ("prune --method sparsegpt", "--method sparsegpt needs --hessians"),
        ("prune --hessians f", "--hessians goes with --method sparsegpt only"),
        ("prune --activation-norms f", "--activation-norms goes with --method wanda only"),
        ("prune --damping 1", "--damping goes with --method sparsegpt only"),
        ("prune --block-size 8", "--block-size goes with --method sparsegpt only"),
        ("prune --method sparsegpt --hessians f --damping nan", "--damping nan is not a share"),
        ("prune --method sparsegpt --hessians f --damping -1", "--damping -1 is not a share"),
        ("prune --method sparsegpt --hessians f --damping 1e17", "not a share from 0 to 1e+16"),
        ("prune --method sparsegpt --hessians f --block-size 6", "6 is not a multiple of 4"),
        ("prune --pattern 4", "--pattern: pattern '4' is not N:M"),
        ("prune --pattern 4:8 --permute", "--permute goes with --pattern 2:4 only"),
        ("prune --method optimal", "Invalid value for '--method'"),
        ("quantize --scale vector --permute", "--method and --permute go with --prune only"),
        ("quantize --scale vector --method wanda", "go with --prune only"),
        ("quantize --scale vector --prune --method sparsegpt", "Invalid value for '--method'"),
    ],
)
def test_options_that_do_not_go_together(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: str, fault: str
) -> None:
    command, *rest = arguments.split()
    assert run([command, str(model), "-o", str(model.with_name("out")), *rest]) == 2
    assert fault in capsys.readouterr().err
    assert not model.with_name("out").exists()


def test_the_table_tells_what_was_lost(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prune", str(model), "-o", str(model.with_name("out"))]
    hessians = ["--method", "sparsegpt", "--hessians", str(model.with_name("hessians"))]
    assert run([*command, *hessians, "--permute", "--damping", "0.02", "--block-size", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "tensor",
        "dtype",
        "shape",
        "kept",
        "energy",
        "output",
        "lost",
        "order",
    ]
    assert "pruned 2 of 3 tensors by sparsegpt, kept energy " in lines[-2]
    want = prune_file(
        model, None, choice=sparsegpt(model, permute=True, damping=0.02, block_size=16)
    )
    error = want.tensors[0].weighted_error
    assert error is not None and f"{100 * error:.2f} %  permuted" in lines[1]
    assert run([*command, "--force", "--pattern", "4:8"]) == 0
    assert "pruned 2 of 3 tensors to 4:8, kept energy" in capsys.readouterr().out


def test_quantize_takes_the_method(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, dense = model.with_name("packed"), model.with_name("dense")
    norms = ["--method", "wanda", "--activation-norms", str(model.with_name("norms"))]
    command = ["quantize", str(model), "-o", str(packed), "--scale", "vector", "--prune"]
    assert run([*command, *norms, "--permute"]) == 0
    assert run(["verify", str(packed), "--against", str(model), "--device", "cpu"]) == 0
    assert "pruned by wanda; compared with the mask as it is" in capsys.readouterr().out
    assert run(["unpack", str(packed), "-o", str(dense)]) == 0
    perm = load(dense)[0]["a.weight_perm"]
    assert prune_24(permute.apply(load(dense)[0]["a.weight"], perm)).any()
    assert run(["inspect", str(dense)]) == 0
