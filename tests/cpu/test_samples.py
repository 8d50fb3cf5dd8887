"""The sample checkpoint is the same everywhere and goes all the way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sp24cli.cli.main import run
from tests.cpu.checkpoints import contents, tensors_of
from tests.cpu.console import Shell

#: Of all files of the sample of width 64, in order of their names.
DIGEST = "0d580f4489eccfbe8dcbc37eb7b60282039f694daaa5740455873f2fdf9bdb8f"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    assert Shell(folder).run("python samples/make_checkpoint.py model 64") == ""
    return folder / "model"


def test_the_sample_checkpoint_has_the_same_bytes_everywhere(sample: Path) -> None:
    digest = hashlib.sha256()
    for name, raw in contents(sample).items():
        digest.update(name.encode() + raw)
    assert digest.hexdigest() == DIGEST


def test_the_sample_checkpoint_has_what_it_says(sample: Path) -> None:
    tensors = tensors_of(sample)
    tied = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    assert tied[0].tobytes() == tied[1].tobytes()
    names = [name for name in tensors if name.endswith(".attn.q.weight")]
    assert len({tensors[name].tobytes() for name in names}) > 1


def test_the_sample_checkpoint_goes_all_the_way(sample: Path) -> None:
    def at(name: str) -> str:
        return str(sample.with_name(name))

    taken = ["--experts", "--dequantize-fp8", "bf16", "-q"]
    assert run(["prune", str(sample), "-o", at("pruned"), *taken]) == 0
    packing = ["--scale", "vector", "--experts", "-q"]
    assert run(["quantize", at("pruned"), "-o", at("packed"), *packing]) == 0
    against = ["--against", at("pruned"), "--device", "cpu", "-q"]
    assert run(["verify", at("packed"), *against]) == 0
    assert run(["unpack", at("packed"), "-o", at("dense"), "-q"]) == 0
    dense, pruned = tensors_of(sample.with_name("dense")), tensors_of(sample.with_name("pruned"))
    assert {n: (a.shape, a.dtype) for n, a in dense.items()} == {
        n: (a.shape, a.dtype) for n, a in pruned.items()
    }
