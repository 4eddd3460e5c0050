"""`miles engine install sglang`: an environment of its own, since SGLang pins torch, transformers and openai."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from miles.errors import ConfigError, EngineError
from miles.places import alone, miles_home
from miles.rollout.engines.sglang.process import STAND_INS, has_gpu

__all__ = ["RELEASE", "default_python", "install"]

RELEASE = "0.5.17"
"""The release that is installed when none is asked for: the newest one that was run on CPUs and on GPUs."""


def default_python(home: Path | None = None) -> Path:
    """The Python of the SGLang that was installed last for this kind of machine; ConfigError when there is none."""
    kind = "gpu" if has_gpu() else "cpu"
    found = sorted((home or miles_home()).glob(f"engines/sglang-*-{kind}/installed.json"), key=_made)
    if not found:
        raise ConfigError(
            f"SGLang is not installed: run `miles engine install sglang{'' if has_gpu() else ' --cpu'}`, or name a "
            "Python that has it in engine.sglang.python"
        )
    return found[-1].parent / "bin" / "python"


def _made(path: Path) -> float:
    return path.stat().st_mtime


def install(
    *,
    cpu: bool,
    release: str = RELEASE,
    torch: str = "torch==2.13.0",
    python: str = sys.executable,
    home: Path | None = None,
    tell: Callable[[str], None] = print,
) -> Path:
    """Make the environment, or find it made; the folder. ConfigError where it cannot work, EngineError when pip fails.

    A folder that an interrupted install left is made anew; two installs at once wait for each other.
    """
    if cpu and has_gpu():
        raise ConfigError("--cpu installs stand-ins for GPU kernels, and this machine has a GPU: leave it out")
    if not cpu and not has_gpu():
        raise ConfigError("this machine has no NVIDIA driver: `miles engine install sglang --cpu` (for tests, slow)")
    if cpu and release != RELEASE:
        raise ConfigError(f"on a CPU only SGLang {RELEASE} is known to run")
    folder = (home or miles_home()) / "engines" / f"sglang-{release}-{'cpu' if cpu else 'gpu'}"
    done = folder / "installed.json"
    with alone(folder):
        if done.is_file():
            tell(f"SGLang {release} is in {folder}")
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _run([python, "-m", "venv", str(folder)], tell)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            for words in _steps(cpu, release, torch):
                _run([*pip, *words], tell)
            _run(
                [str(folder / "bin" / "python"), "-c", "import importlib.util as u; assert u.find_spec('sglang')"], tell
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        done.write_text(json.dumps({"sglang": release, "torch": torch if cpu else "its own", "cpu": cpu}))
    tell(f"SGLang {release} is in {folder}")
    return folder


def _steps(cpu: bool, release: str, torch: str) -> Iterator[list[str]]:
    """Arguments of pip. On a CPU what SGLang would pull in for GPUs is left out."""
    if not cpu:
        yield [f"sglang=={release}"]
        return
    yield [torch]
    yield ["--no-deps", f"sglang=={release}", "-r", str(STAND_INS / "without-dependencies.txt")]
    yield ["-r", str(STAND_INS / "requirements.txt")]


def _run(command: list[str], tell: Callable[[str], None]) -> None:
    tell("$ " + " ".join(command[:12]) + (" …" if len(command) > 12 else ""))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise EngineError(f"SGLang could not be installed; `{command[0]} {command[2]}` said:\n{tail}")
