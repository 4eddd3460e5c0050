"""The run folder: everything a run leaves, and the only code that writes there.

RUN/config.toml           the resolved recipe
RUN/metrics.jsonl         one line a step (kind "step"), evaluation, warm start, checkpoint, end
RUN/episodes/NAME.jsonl   trees with ids, logprobs, versions and outcomes
RUN/checkpoints/step-N/   dcp/ (all ranks), hf/ (a loadable model), state.json (the driver's)
RUN/model/                the model that the run began with, when the recipe made it
RUN/logs/                 the child processes' output
RUN/reward.png            the learning curve
RUN/save-now              made by anyone: the run writes a checkpoint after its present step and removes it
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles.errors import ConfigError, RunError
from miles.types import Episode, from_json, to_json

__all__ = ["RunFolder", "list_runs"]

_SAVE_NOW = "save-now"


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.ended = False  # whether this process wrote, or tried to write, the line that ends the run

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """A new folder `root/name-time`; RunError when it cannot be made."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            folder = cls(root / f"{name}-{stamp}{suffix}")
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RunError(
                    f"cannot make {folder.path}: {error.strerror}; set run.root to a writable folder"
                ) from error
            for part in ("episodes", "checkpoints", "logs"):
                (folder.path / part).mkdir()
            return folder
        raise RunError(f"cannot find a free name for a run in {root}")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run; ConfigError otherwise."""
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is not a run folder (no config.toml); `miles runs list` shows the runs")
        return cls(path)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second process that would go on with the same run; ConfigError if one does."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{self.path} is being trained by another process; stop it first") from error
            yield

    def write_config(self, toml: str) -> None:
        """Keep the resolved recipe."""
        partial = self.config.with_suffix(".partial")
        self.guarded(self.config, lambda: (partial.write_text(toml), partial.replace(self.config)))

    def log(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        self.ended = self.ended or kind == "end"
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **data}, separators=(",", ":"))
        self._append(self.path / "metrics.jsonl", line.encode())

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl. A line cut by a crash is left out, and so is what a resumed run did again."""
        lines: list[dict[str, Any]] = []
        for line in _json_lines(self.path / "metrics.jsonl"):
            if line.get("kind") == "resume":  # what came after the checkpoint happens again
                lines = [earlier for earlier in lines if earlier["kind"] != "end" and _before(earlier, line)]
            lines.append(line)
        return [line for line in lines if kind is None or line.get("kind") == kind]

    def write_episode(self, name: str, episode: Episode) -> None:
        """Append one episode to episodes/NAME.jsonl."""
        self._append(self.path / "episodes" / f"{name}.jsonl", to_json(episode))

    def episodes(self, pattern: str = "*") -> Iterator[Episode]:
        """Episodes of episodes/PATTERN.jsonl."""
        for path in sorted((self.path / "episodes").glob(f"{pattern}.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                with contextlib.suppress(ValidationError):  # a line that a crash cut
                    yield from_json(Episode, line)

    def wish_to_save(self) -> None:
        """Ask the run that is going on here for a checkpoint after its present step."""
        self.guarded(self.path / _SAVE_NOW, (self.path / _SAVE_NOW).touch)

    def take_wish_to_save(self) -> bool:
        """Whether somebody asked; asking is done once."""
        try:
            (self.path / _SAVE_NOW).unlink()
        except FileNotFoundError:
            return False
        return True

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.path.glob("checkpoints/step-*/state.json"))

    def newest_checkpoint(self) -> Path:
        """Where a run can go on from; ConfigError when it has no checkpoint."""
        found = self.checkpoints()
        if not found:
            raise ConfigError(f"{self.path} has no checkpoint to resume from; start again with `miles launch RECIPE`")
        return found[-1]

    def new_checkpoint(self, step: int) -> Path:
        """A folder to write a checkpoint into, not yet counted as one."""
        partial = self.path / "checkpoints" / f".step-{step:06d}.partial"
        for left in self.path.glob("checkpoints/.step-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self.guarded(partial, lambda: partial.mkdir(parents=True))
        return partial

    def finish_checkpoint(self, partial: Path, state: Mapping[str, Any], *, keep: int) -> Path:
        """Make a written checkpoint count, in one rename; drop the oldest beyond `keep`."""
        final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        self.guarded(partial, lambda: (partial / "state.json").write_text(json.dumps(state, indent=1)))
        aside = partial.with_suffix(".old")
        if final.exists():
            self.guarded(final, lambda: final.rename(aside))
        self.guarded(final, lambda: partial.rename(final))
        for old in self.checkpoints()[:-keep]:
            (old / "state.json").unlink(missing_ok=True)  # half deleted, it must not count
            shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
        return final

    def _append(self, path: Path, line: bytes) -> None:
        """Whole lines only: a write that fails half-way is taken back."""

        def write() -> None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a crash cut the last line
                data = (b"\n" if torn else b"") + line + b"\n"
                written = os.write(fd, data)
                if written != len(data):
                    os.ftruncate(fd, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)

        self.guarded(path, write)

    def guarded(self, path: Path, write: Any) -> None:
        """Call `write`; an OSError becomes a RunError that says what to do about `path`."""
        try:
            write()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            hint = "free some space" if full else "make it writable"
            raise RunError(
                f"cannot write {path}: {error.strerror}; {hint}, then go on with `miles launch --resume {self.path}`"
            ) from error


def list_runs(root: Path) -> list[RunFolder]:
    """Runs below `root`, oldest first."""
    return [RunFolder(path.parent) for path in sorted(root.glob("*/config.toml"), key=lambda p: p.stat().st_mtime)]


def _before(line: Mapping[str, Any], resume: Mapping[str, Any]) -> bool:
    """Whether a line was written before the checkpoint that a run resumed from."""
    done = resume.get("warm_start", line.get("step", 0)) if line["kind"] == "warm_start" else resume["step"]
    return bool(line.get("step", 0) <= done)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(json.JSONDecodeError):  # a line that a crash cut
            yield json.loads(line)
