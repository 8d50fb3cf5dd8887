"""``python -m sp24cli`` is ``sp24``."""

from sp24cli.cli.main import main

if __name__ == "__main__":
    main()
