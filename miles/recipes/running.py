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

from miles.errors import MilesError
from miles.recipes.plots import plot_rewards
from miles.runs import RunFolder
from miles.types import Reporter

__all__ = ["Running", "Stoppable", "ctrl_c", "raise_file_limit", "rescue", "told"]

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
def told(folder: RunFolder) -> Iterator[None]:
    """A run that fails before or after its driver says so in its folder too."""
    try:
        yield
    except Exception as error:
        if not folder.ended:
            with contextlib.suppress(MilesError):
                folder.log("end", {"step": 0, "error": str(error)})
        raise


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
