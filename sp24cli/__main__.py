"""``python -m sp24cli`` is ``sp24``, and where that begins."""

from __future__ import annotations

import sys


def main() -> None:
    """`sp24cli.cli.main.main`; Ctrl-C while that is imported ends as it does later."""
    try:
        from sp24cli.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("sp24: error: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
