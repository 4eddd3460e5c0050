"""Becomes an SGLang server that ends with its parent: `python launcher.py PARENT_PID ARGUMENT…`.

Run by the Python that has SGLang, so it needs the standard library alone.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Ask Linux for SIGKILL at the parent's end, which survives exec, and become the server."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *arguments])


if __name__ == "__main__":
    main()
