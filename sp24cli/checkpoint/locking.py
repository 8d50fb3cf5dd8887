"""Locks on open files, which the system lets go of with the process, however that ends."""

from __future__ import annotations

import errno

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Whether the system has them; where not, a folder may not even be opened.
AVAILABLE = fcntl is not None


def lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until it is closed: False where another has it locked, None where
    there are no locks (some systems and network file systems)."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True
