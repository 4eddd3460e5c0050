import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "header"),
    [
        ("session_server.py", ["--sessions", "8", "--turns", "2"], "added p50"),
        ("async_vs_sync.py", ["--steps", "1"], "trainer idle"),
    ],
)
def test_benchmarks_run(script, arguments, header):
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert header in done.stdout
    assert len(done.stdout.splitlines()) == 5
