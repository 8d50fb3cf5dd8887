"""Imports go downward only, and CUDA stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp24cli

PACKAGE = Path(sp24cli.__file__).parent

#: A module imports from earlier lines only, or from its own package.
LAYERS = (
    ("errors", "closing"),
    ("optypes",),
    ("bits", "rowblocks"),
    ("sparsity", "metadata", "fp8"),
    ("pruning",),
    ("scaling", "layout"),
    ("fragments",),
    ("calibration", "smoothing"),
    ("packing",),
    ("packed", "activations"),
    ("reference",),
    ("checkpoint",),
    ("formats",),
    ("ops",),
    ("reporting",),
    ("kernels",),
    ("gpu",),
    ("api",),
    ("peers",),
    ("verify",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"
)


def part(path: Path) -> str:
    """The layer's name of a module: its package, or itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every absolute name that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what a module needs"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    mine = part(path)
    assert mine in RANK, f"{mine} has no layer yet"
    for name, _ in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "sp24cli" or parts[1:] in ([], ["__version__"]):
            continue
        assert parts[1] in RANK, f"{name} has no layer yet"
        assert parts[1] == mine or RANK[parts[1]] < RANK[mine], f"{name} lies above {mine}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_cuda_is_imported_in_gpu_only_and_late(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for name, node in imports(tree):
        if name.split(".")[0] in ("cuda", "pynvml"):
            assert part(path) == "gpu", f"{name} outside sp24cli/gpu"
            assert node in inside, f"{name} is imported with the module"


def test_every_layer_exists() -> None:
    assert {part(path) for path in MODULES} == set(RANK)


def test_no_command_but_bench_and_verify_loads_gpu_code() -> None:
    code = (
        "import sys, sp24cli.cli.main, sp24cli.cli.prune, sp24cli.cli.quantize, "
        "sp24cli.cli.inspect, sp24cli.cli.unpack, sp24cli.cli.verify\n"
        "loaded = [m for m in sys.modules if m.startswith(('cuda', 'sp24cli.gpu'))]\n"
        "sys.exit(str(loaded) if loaded else None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
