"""Pruning whole files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp24cli.checkpoint.names import Selection
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.ops import prune_file, stream
from tests.cpu.modelfile import DTYPES, load, naive_prune, normal, save


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_every_selected_weight_is_pruned_and_the_rest_untouched(tmp_path: Path, dtype: str) -> None:
    weight = normal(1, (50, 68), dtype)
    weight[3, 4:8] = np.array([0.5, -0.5, 0.5, 0.5])  # ties keep the lower index
    weight[4, 0:4] = np.array([-0.0, 0.25, -0.0, 0.0])
    others = {
        "norm.weight": normal(2, (68,), dtype),
        "a.bias": normal(3, (50,), dtype),
        "conv.weight": normal(4, (4, 3, 3), "F32"),
        "experts.weight": normal(5, (2, 8, 8), dtype),
        "odd.weight": normal(6, (5, 6), dtype),
        "embed.weight": normal(7, (8, 8), dtype),
        "fp8.weight": normal(8, (8, 8), "F8_E4M3"),
        "empty.weight": np.zeros((0, 8), DTYPES[dtype]),
        "count": np.array([3], np.int64),
        "flags": np.array([True, False, True]),
    }
    source = save(tmp_path / "in.safetensors", {"a.weight": weight, **others}, {"who": "me"})
    report = prune_file(source, tmp_path / "out.safetensors")

    tensors, metadata = load(tmp_path / "out.safetensors")
    want = naive_prune(weight)
    assert tensors["a.weight"].tobytes() == want.tobytes()
    assert np.array_equal(want[3, 4:8].astype(float), [0.5, -0.5, 0, 0])
    for name, array in others.items():
        assert tensors[name].dtype == array.dtype
        assert tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()
    assert set(tensors) == {"a.weight", *others}
    assert metadata == {"who": "me", "format": "pt"}

    wide = weight.astype(np.float64)
    energy = np.square(want.astype(np.float64)).sum() / np.square(wide).sum()
    assert [t.name for t in report.tensors] == ["a.weight"]
    assert report.tensors[0].kept_energy == pytest.approx(energy, rel=1e-12)
    assert report.kept_energy == pytest.approx(energy, rel=1e-12)
    reasons = {item.name: item.reason for item in report.skipped}
    assert set(reasons) == set(others)
    assert "3-D" in reasons["experts.weight"]
    assert "already quantized" in reasons["fp8.weight"]
    assert "6" in reasons["odd.weight"]


def test_pruning_again_changes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (32, 32), "BF16")})
    prune_file(source, tmp_path / "once")
    report = prune_file(tmp_path / "once", tmp_path / "twice")
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()
    assert report.kept_energy == 1.0


def test_a_zero_tensor_keeps_all_of_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": np.zeros((4, 8), np.float32)})
    report = prune_file(source, tmp_path / "out")
    assert report.tensors[0].kept_energy == 1.0
    assert load(tmp_path / "out")[0]["a.weight"].tobytes() == bytes(4 * 8 * 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_nan_and_infinity_are_named_and_nothing_is_written(
    tmp_path: Path, dtype: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 64)  # so that the place lies in a later band
    weight = normal(1, (40, 16), dtype)
    weight[17, 9] = value
    source = save(tmp_path / "in.safetensors", {"b.weight": weight})
    with pytest.raises(BadInputError) as raised:
        prune_file(source, tmp_path / "out")
    assert str(raised.value).startswith(f"{source}: tensor 'b.weight': ")
    assert "row 17, column 9" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_nan_in_a_tensor_that_is_not_selected_passes_through(tmp_path: Path) -> None:
    bias = np.array([np.nan, np.inf, 1], np.float32)
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4)), "a.bias": bias})
    prune_file(source, tmp_path / "out")
    assert load(tmp_path / "out")[0]["a.bias"].tobytes() == bias.tobytes()


def test_squares_beyond_float64_are_no_error(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": np.full((2, 4), 1e300)})
    report = prune_file(source, tmp_path / "out")
    assert report.to_json()["kept_energy"] == 0.5
    assert np.array_equal(load(tmp_path / "out")[0]["a.weight"], [[1e300, 1e300, 0, 0]] * 2)


def test_the_bytes_do_not_depend_on_workers_or_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (301, 64), "F16")})
    prune_file(source, tmp_path / "one", workers=1)
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 64 * 7)
    reports = [prune_file(source, tmp_path / f"w{n}", workers=n) for n in (1, 2, 5)]
    for n in (1, 2, 5):
        assert (tmp_path / f"w{n}").read_bytes() == (tmp_path / "one").read_bytes()
    assert len({r.kept_energy for r in reports}) == 1


def test_dry_run_reports_the_same_and_writes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (8, 8)), "x": normal(2, (3,))})
    dry = prune_file(source, None)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    real = prune_file(source, tmp_path / "out")
    assert dry.tensors == real.tensors
    assert dry.output is None
    assert dry.output_bytes == real.output_bytes == (tmp_path / "out").stat().st_size


def test_globs_choose(tmp_path: Path) -> None:
    names = ("lm_head.weight", "a.weight", "b.weight", "plain")
    source = save(tmp_path / "in", {n: normal(1, (4, 4)) for n in names})
    chosen = prune_file(source, None, selection=Selection(("*head*", "plain", "b.*"), ("b.*",)))
    assert {t.name for t in chosen.tensors} == {"lm_head.weight", "plain"}


def test_the_input_is_never_replaced(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    for output in (source, tmp_path / "link"):
        with pytest.raises(Sp24Error, match="is the input"):
            prune_file(source, output, overwrite=True)
    assert source.read_bytes() == before


def test_an_output_that_exists_stays_unless_asked(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    output = tmp_path / "out"
    output.write_text("precious")
    with pytest.raises(Sp24Error, match="exists"):
        prune_file(source, output)
    assert output.read_text() == "precious"
    prune_file(source, output, overwrite=True)
    assert "a.weight" in load(output)[0]


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    tensors = {"a.weight": normal(1, (300, 8)), "x": normal(2, (77,))}
    source = save(tmp_path / "in", tensors)
    seen: list[tuple[int, int]] = []
    prune_file(source, None, progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in tensors.values())
    assert {t for _, t in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_a_packed_file_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"x": normal(1, (4, 4))}, {"sp24.version": "1"})
    with pytest.raises(BadInputError, match="packed already"):
        prune_file(source, None)
