"""Where Miles keeps what is made once for a user, and how two processes do not make the same thing at once."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["alone", "miles_home"]


def miles_home() -> Path:
    """$MILES_HOME, else the cache folder."""
    if home := os.environ.get("MILES_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process makes `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
