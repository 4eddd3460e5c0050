import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "lines"),
    [
        ("session_server", ["--sessions", "8", "--turns", "2", "--open", "1", "4", "--history", "3000"], 7),
        ("async_vs_sync", ["--steps", "1"], 5),
        ("tree_packing", ["--hidden", "64", "--layers", "1", "--repeat", "1"], 6),
        ("delta_sync", ["--hidden", "64", "--layers", "1", "--lr", "1e-6"], 2),
        ("loss_memory", ["--tokens", "512", "--vocabulary", "2048"], 3),
        ("env_workers", ["--steps", "256"], 4),
        pytest.param("harnesses", ["pi", "--episodes", "1", "--together", "2"], 3, marks=pytest.mark.harness),
        ("train_step", ["--hidden", "64", "--layers", "1", "--vocabulary", "512", "--repeat", "1"], 4),
    ],
)
def test_benchmarks_run(script, arguments, lines):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == lines


@pytest.mark.slow
def test_the_trainers_validation_finds_every_way_equal():
    command = [sys.executable, "-m", "scripts.validate_trainer", "--hidden", "64", "--layers", "1"]
    command += ["--parts", "layouts"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert done.stdout.count("gradient norm off") == 4
