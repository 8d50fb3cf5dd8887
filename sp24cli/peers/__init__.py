"""The libraries sp24 is measured against, opened by ctypes where they are installed."""
