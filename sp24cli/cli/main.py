"""The ``sp24`` command: the group, and how every kind of failure leaves the process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from sp24cli import __version__
from sp24cli.cli import console
from sp24cli.errors import Interrupted, Sp24Error

#: Commands in the order of use; each is the attribute of that name in ``sp24cli.cli.<name>``.
#: They are imported when asked for: `sp24 --version` need not load numpy.
COMMANDS = ("prune", "quantize", "verify", "bench", "inspect", "unpack", "convert")


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click must not see it: it would answer with an empty line.
            raise Interrupted("interrupted") from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"sp24cli.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name in ("prune", "quantize", "verify"):
            # Their threads multiply side by side: those of BLAS beneath them would only spin.
            # And what sparsegpt computes would depend on how many there are.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command = getattr(importlib.import_module(f"sp24cli.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.command(
    cls=LazyGroup,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="sp24", message="%(prog)s %(version)s")
def cli() -> None:
    """Prune, quantize, verify and run 2:4 sparse weights on Hopper's sparse tensor cores.

    Exit codes: 0 ok, 1 runtime error, 2 usage error, 3 verification failed, 4 bad input file,
    5 no usable GPU, 130 interrupted.
    """


#: What a user, a scheduler and a closed terminal end a process by. Not all systems have SIGHUP.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: run the command, turn failures into one line and an exit code.

    The process ends with it, and the signals are set for that; others call `run`.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is escaped, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # As Ctrl-C, so that nothing is left behind.
    for number in _signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        code = run(args)
        _ignore_signals()
    except KeyboardInterrupt:
        # After the result was printed, or its error.
        _ignore_signals()
        console.error("interrupted")
        code = Interrupted.exit_code
    sys.exit(code)


def _signals() -> Iterator[signal.Signals]:
    for name in _SIGNALS:
        number = getattr(signal, name, None)
        if number is not None:
            yield number


def _ignore_signals() -> None:
    """What comes now comes too late. Python sets the signals back to what ends a process by them
    before its own end, but for those that are ignored."""
    for number in _signals():
        signal.signal(number, signal.SIG_IGN)


def run(args: Sequence[str] | None = None) -> int:
    """The exit code of ``sp24 args``, with its output done.

    When the reader of stdout has left, as `head` does, click ends the process without a word.
    """
    try:
        code = cli.main(args, prog_name="sp24", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Sp24Error as fault:
        console.error(str(fault))
        return fault.exit_code
    except click.ClickException as fault:
        context = getattr(fault, "ctx", None)
        command = "sp24" if context is None else context.command_path
        # Click puts each choice of a missing option on a line of its own.
        message = fault.format_message().replace("\n\t", " ")
        console.error(f"{message} (see '{command} --help')")
        return fault.exit_code
    except (KeyboardInterrupt, click.Abort):
        # Before the command began.
        console.error("interrupted")
        return Interrupted.exit_code
    except OSError as fault:
        place = f"{fault.filename}: " if fault.filename else ""
        console.error(f"{place}{fault.strerror or fault}")
        return 1
    except MemoryError:
        console.error("out of memory")
        return 1
