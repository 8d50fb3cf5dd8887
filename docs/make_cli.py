"""Write docs/cli.md, the reference of the command line, from the commands' own help.

python docs/make_cli.py
"""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.cli.main import COMMANDS, cli

HEAD = """# Command line reference

Made from `--help` by `make docs`; a test compares the two.
"""


def reference() -> str:
    """The whole of docs/cli.md."""
    group = click.Context(
        cli,
        info_name="sp24",
        terminal_width=100,
        max_content_width=100,
        help_option_names=cli.context_settings["help_option_names"],
    )
    parts = [HEAD, _section(group)]
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        parts.append(_section(click.Context(command, info_name=name, parent=group)))
    return "\n".join(parts)


def _section(context: click.Context) -> str:
    return f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n"


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(reference(), encoding="utf-8")
