"""The documents say what the program does."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest

from sp24cli import errors
from sp24cli.checkpoint.packedfile import part_entries
from sp24cli.cli.main import COMMANDS
from sp24cli.packed import PackInfo
from sp24cli.scaling import ScaleSpec
from tests.cpu.console import ROOT
from tests.cpu.scripts import script_module

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def generator() -> ModuleType:
    return script_module("docs/make_cli.py")


def test_the_reference_is_that_of_the_help() -> None:
    """Word by word: click's versions break lines differently."""
    stored = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert stored.split() == generator().reference().split(), "run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_knows_every_command(name: str) -> None:
    assert f"sp24 {name}" in README


def test_the_readme_knows_every_exit_code() -> None:
    codes = {
        fault.exit_code
        for fault in vars(errors).values()
        if isinstance(fault, type) and issubclass(fault, errors.Sp24Error)
    }
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert listed == codes | {0, 2, 130}


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_the_readme_knows_every_part_of_a_packed_tensor(layout: str) -> None:
    info = PackInfo((64, 128), "BF16", "e4m3", ScaleSpec("vector"), "given", layout, "satfinite")
    whole = replace(info, scale=ScaleSpec.parse("mx"), permuted=True, smooth=0.5)
    for part, dtype, _ in [*part_entries("X.weight", info), *part_entries("X.weight", whole)]:
        assert re.search(rf"^\| `{re.escape(part)}` \| [^|]*{dtype}", README, re.MULTILINE), part


def test_make_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)", README):
        assert target in targets
    assert "make demo" in README
    assert "make test" in README


def test_every_target_is_described_and_phony() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    described = set(re.findall(r"^([a-z-]+):.*## .", MAKEFILE, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert described == targets == set(phony[1].split())


def test_ci_runs_the_tests_of_the_readme() -> None:
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()


def test_links_of_the_documents_exist() -> None:
    for document in ("README.md", "samples/walkthrough.md", "samples/results/README.md"):
        path = ROOT / document
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), f"{document}: {link}"
