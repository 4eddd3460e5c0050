"""The house rules, checked: links, budgets, imports, words in the docs."""

import ast
import importlib
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import miles

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "miles").rglob("*.py"))


@pytest.mark.parametrize("room", ["envs", "harnesses", "sandboxes", "rollout", "trainer", "recipes"])
def test_the_six_parts_stand_at_the_top(room):
    assert (ROOT / room).is_symlink()
    assert (ROOT / room).resolve() == ROOT / "miles" / room


def test_files_fit_in_the_head():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 500, max(lengths, key=lengths.get)
    assert statistics.median(lengths.values()) <= 150


def function_lengths():
    for path in [*FILES, *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno}:{node.name}", node.end_lineno - node.lineno + 1


def test_functions_fit_on_a_screen():
    lengths = dict(function_lengths())
    assert max(lengths.values()) <= 80, max(lengths, key=lengths.get)
    short = sum(length <= 35 for length in lengths.values())
    assert short / len(lengths) >= 0.9


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(miles.__path__, "miles.")])
def test_every_module_imports_and_exports_what_it_says(name):
    if name.endswith("__main__") or ".workers.guest." in name:  # those run on other Pythons, with other packages
        return
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), public


def imported_by(statement):
    script = f"import sys; {statement}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_miles_is_light():
    assert not {"torch", "transformers", "docker", "pydantic", "rich"} & imported_by("import miles")
    assert not {"torch", "transformers", "pydantic", "rich"} & imported_by("import miles.cli.main")


def test_the_driver_side_needs_no_torch():
    assert "torch" not in imported_by("import miles.recipes.compose, miles.trainer.loop, miles.rollout.scheduler")


def test_nobody_leaves_work_without_an_owner():
    for path in [*FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert "TO" + "DO" not in path.read_text(), path
