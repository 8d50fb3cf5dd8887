"""``python -m sp24cli.cli``: the same as ``sp24``, for an interpreter that has no script of it."""

from sp24cli.cli.main import main

main()
