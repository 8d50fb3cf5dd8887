"""Console sessions in Markdown: commands behind ``$ ``, then what they print.

In the expected output ``...`` stands for anything within a line, and a line of it alone for any
number of lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """One command of a document and the output it is said to have."""

    line: int
    command: str
    output: str


def sessions(text: str) -> list[Step]:
    """The steps of all ``console`` blocks of a Markdown ``text``, in order."""
    steps: list[Step] = []
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith("$ "):
            steps.append(Step(number, line[2:], ""))
        elif inside:
            last = steps[-1]
            steps[-1] = Step(last.line, last.command, last.output + line + "\n")
    return steps


def blocks(text: str, language: str) -> list[str]:
    """The contents of all fenced blocks of a ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def matches(expected: str, got: str) -> bool:
    pattern = re.escape(expected).replace(re.escape("...\n"), r"(?:.*\n)*?")
    return re.fullmatch(pattern.replace(re.escape("..."), r"[^\n]*?"), got) is not None


class Shell:
    """Runs commands in ``folder``, with ``sp24``, ``python`` and the samples at hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / ".bin"
        tools.mkdir()
        for name, arguments in (("sp24", " -m sp24cli.cli"), ("python", "")):
            script = tools / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
            script.chmod(0o755)
        (folder / "samples").symlink_to(ROOT / "samples")
        self.environment = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUTF8": "1",
        }

    def run(self, command: str) -> str:
        """Stdout and stderr together, as a terminal shows them."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        return done.stdout


def rewrite(path: Path, folder: Path) -> None:
    """Put the outputs of today into a document: for its author, who then reads the difference."""
    shell = Shell(folder)
    lines: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```console"
        if not inside or line.startswith(("```", "$ ")):
            lines.append(line)
        if inside and line.startswith("$ "):
            lines.extend(shell.run(line[2:]).splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
