"""What every run needs around its driver: signals, a last checkpoint when it fails, enough file descriptors."""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from miles.config import dump_toml
from miles.errors import MilesError
from miles.recipes.config import Recipe
from miles.recipes.plots import plot_rewards
from miles.runs import RunFolder
from miles.trainer.checkpoints import check_same_models, read_state
from miles.trainer.trainer import TrainerConfig
from miles.types import Reporter

__all__ = ["Running", "Stoppable", "begun", "ctrl_c", "raise_file_limit", "rescue", "resumed"]

log = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A driver: it ends after the step under way when `stop` is set, and can write a checkpoint."""

    stop: asyncio.Event
    step: int

    async def save(self) -> Path | None: ...


def raise_file_limit() -> None:
    """An episode holds about a dozen file descriptors; take all that the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("file descriptors: %d, before %d", hard, soft)


@dataclass(slots=True)
class Running:
    """What a signal finds: nothing that can be stopped yet, or a driver."""

    driver: Stoppable | None = None


@contextlib.contextmanager
def begun(config: Recipe) -> Iterator[RunFolder]:
    """A new run's folder, held while it goes on. A run that fails where no driver can say so says it here."""
    folder = RunFolder.create(config.run.root, config.name)
    folder.write_config(dump_toml(config))
    with folder.locked():
        try:
            yield folder
        except Exception as error:
            if not folder.ended:
                with contextlib.suppress(MilesError):
                    folder.log("end", {"step": 0, "error": str(error)})
            raise


@contextlib.contextmanager
def resumed(folder: RunFolder, config: Recipe, trainer: TrainerConfig, *, critic: bool) -> Iterator[Path]:
    """The checkpoint that a run goes on from, its folder held meanwhile; ConfigError when it does not fit `config`."""
    with folder.locked():
        checkpoint = folder.newest_checkpoint()
        state = read_state(checkpoint)
        check_same_models(state, trainer, critic=critic)
        folder.write_config(dump_toml(config))
        folder.log("resume", {name: state[name] for name in ("step", "warm_start")})
        yield checkpoint


async def rescue(driver: Stoppable, folder: RunFolder, error: Exception) -> None:
    """A run that cannot go on leaves a checkpoint, if the trainer still can write one."""
    try:
        path = await driver.save()
        error.add_note(f"saved {path}; go on with `miles launch --resume {folder.path}` when the cause is mended")
    except Exception as second:  # noqa: BLE001  the first error is the one to tell
        error.add_note(f"no checkpoint could be saved: {second}")
    with contextlib.suppress(MilesError):  # the disk may be what failed
        folder.log("end", {"step": driver.step, "error": str(error)})
        plot_rewards(folder)


@contextlib.contextmanager
def ctrl_c(running: Running, reporter: Reporter) -> Iterator[None]:
    """First Ctrl-C: finish cleanly. Second, or while starting up: at once, still cleaning up."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def pressed() -> None:
        if running.driver is None or running.driver.stop.is_set():
            if main is not None:
                main.cancel()
            return
        running.driver.stop.set()
        reporter.event("stopping", {})

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, pressed)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(number)
