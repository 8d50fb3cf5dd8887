"""The documents' console sessions do what they say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.cpu.console import ROOT, Shell, blocks, matches, sessions


@pytest.mark.parametrize("document", ["README.md", "samples/walkthrough.md"])
def test_every_command_prints_what_the_document_says(document: str, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    steps = sessions(text)
    assert len(steps) >= 4
    shell = Shell(tmp_path)
    for step in steps:
        got = shell.run(step.command)
        assert matches(step.output, got), (
            f"{document}:{step.line}: $ {step.command}\n--- says\n{step.output}--- prints\n{got}"
        )
    # Python snippets work on the files that the commands have left.
    for code in blocks(text, "python"):
        (tmp_path / "snippet.py").write_text(code, encoding="utf-8")
        assert shell.run("python snippet.py") == ""


def test_the_sample_model_is_the_same_everywhere(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell.run("python samples/make_model.py model.safetensors") == ""
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "97e0f67771568582bc7b52a603696dd60827c6efb43c17895830feb9cffdc969"
    shell.run("python samples/make_model.py other.safetensors 25")
    other = (tmp_path / "other.safetensors").read_bytes()
    assert hashlib.sha256(other).hexdigest() != digest


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a ... c\n", "a\nc\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a.c\n", "abc\n", False),
        ("", "boom\n", False),
    ],
)
def test_matching(expected: str, got: str, same: bool) -> None:
    assert matches(expected, got) is same
