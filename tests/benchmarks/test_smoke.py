import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "lines"),
    [
        ("session_server.py", ["--sessions", "8", "--turns", "2", "--open", "1", "4", "--history", "3000"], 7),
        ("async_vs_sync.py", ["--steps", "1"], 5),
    ],
)
def test_benchmarks_run(script, arguments, lines):
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == lines
