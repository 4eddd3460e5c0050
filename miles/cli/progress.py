"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from miles.types import Reporter

__all__ = ["PlainReporter", "RichReporter", "make_reporter", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 60) -> str:
    """Numbers between 0 and 1 as a row of bars, the last `width` of them."""
    return "".join(_BARS[min(7, max(0, int(v * 8)))] for v in values[-width:])


@contextlib.contextmanager
def make_reporter(*, plain: bool) -> Iterator[Reporter]:
    """The reporter that fits standard output."""
    if plain or not sys.stdout.isatty():
        yield PlainReporter()
        return
    reporter = RichReporter(Console())
    with reporter.live:
        yield reporter


class PlainReporter:
    """One line an event, for logs and pipes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._rewards: list[float] = []
        self._deaf = False

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._deaf:
            return
        try:
            self._print(kind, data)
        except OSError:  # the reader of the pipe has gone; the run goes on, its folder has everything
            self._deaf = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123

    def _print(self, kind: str, data: Mapping[str, Any]) -> None:
        for line in self._lines(kind, data):
            print(f"[{time.monotonic() - self._began:6.1f}s] {line}", flush=True)

    def _lines(self, kind: str, data: Mapping[str, Any]) -> Iterator[str]:
        if kind == "composed":
            yield from (f"{name}: {value}" for name, value in data.items())
        elif kind == "warm_start" and (data["step"] % 50 == 0 or data["step"] == data["steps"]):
            yield f"warm start {data['step']}/{data['steps']}  loss {data['loss']:.3f}"
        elif kind == "supervised" and (data["step"] % 10 == 0 or data["step"] == data["steps"]):
            yield f"step {data['step']}/{data['steps']}  loss {data['loss']:.4f}  tok/s {data['tokens_per_s']:.0f}"
        elif kind == "held_out":
            yield _held_out_line(data)
        elif kind == "evaluating":
            yield f"evaluating version {data['step']} on held-out tasks"
        elif kind == "eval":
            yield _eval_line(data)
        elif kind == "step":
            self._rewards.append(data["reward/mean"])
            yield "  ".join(f"{name} {value}" for name, value in _step_cells(data).items())
        elif kind == "checkpoint":
            yield f"checkpoint {data['path']}"
        elif kind == "stopping":
            yield "stopping after this step, then a checkpoint; once more stops at once"
        elif kind == "end":
            yield from _end_lines(data, self._rewards)


class RichReporter:
    """A live screen: what runs, a progress bar, the last steps, counts, a sparkline."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rewards: list[float] = []
        self._steps: list[dict[str, str]] = []
        self._tick: Mapping[str, Any] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
        )
        self._task: Any = None
        self._phase = ""
        self.live = Live(self._screen(), console=console, refresh_per_second=4)

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "composed":
            table = Table.grid(padding=(0, 2))
            for name, value in data.items():
                table.add_row(Text(name, style="bold"), str(value))
            self._console.print(table)
        elif kind == "warm_start":
            self._advance("warm start (supervised)", data["step"], data["steps"])
            self._phase = f"loss {data['loss']:.3f}"
        elif kind == "supervised":
            self._advance("learning from a file", data["step"], data["steps"])
            self._phase = f"loss {data['loss']:.4f}"
        elif kind == "evaluating":
            self._phase = f"evaluating version {data['step']} on held-out tasks"
        elif kind in ("eval", "held_out"):
            self._phase = ""
            line = _eval_line(data) if kind == "eval" else _held_out_line(data)
            self._console.print(line, style="green", highlight=False)
        elif kind == "step":
            self._rewards.append(data["reward/mean"])
            self._steps = [*self._steps, _step_cells(data)][-8:]
            self._advance("reinforcement learning", data["step"], data["steps"])
        elif kind == "tick":
            self._tick = data
        elif kind == "stopping":
            self._phase = "stopping after this step, then a checkpoint; once more stops at once"
        elif kind == "end":
            self.live.update(self._screen())
            self.live.stop()
            for line in _end_lines(data, self._rewards):
                self._console.print(line, markup=False, highlight=False)
        self.live.update(self._screen())

    def _advance(self, what: str, done: int, total: int) -> None:
        if self._task is None or self._bar.tasks[-1].description != what:
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done, total=total)

    def _screen(self) -> Group:
        parts: list[Any] = [self._bar]
        if self._steps:
            table = Table(box=None, pad_edge=False)
            for name in self._steps[-1]:
                table.add_column(name, justify="right")
            for cells in self._steps:
                table.add_row(*(cells.get(name, "") for name in self._steps[-1]))
            parts += [table, Text(f"reward {sparkline(self._rewards)}", style="cyan")]
        if self._tick:
            parts.append(Text("  ".join(f"{name} {value:g}" for name, value in self._tick.items()), style="dim"))
        if self._phase:
            parts.append(Text(self._phase, style="yellow"))
        return Group(*parts)


def _step_cells(data: Mapping[str, Any]) -> dict[str, str]:
    counts = {kind: int(data.get(f"outcome/{kind}", 0)) for kind in ("scored", "faulted", "discarded")}
    diff = data.get("logprob_diff/max")
    return {
        "step": str(data["step"]),
        "reward": f"{data['reward/mean']:.3f}",
        "staleness": f"{data['staleness/mean']:.2f}/{data['staleness/max']:.0f}",
        "tok/s": f"{data['tokens_per_s']:.0f}",
        "in flight": f"{data.get('in_flight', 0):.0f}",
        "scored/faulted/discarded": "/".join(str(n) for n in counts.values()),
        "logprob diff": "-" if diff is None else f"{diff:.1e}",
        "grad": _gradient(data),
        "wait+train+publish s": f"{data['wait_s']:.1f}+{data['train_s']:.1f}+{data['publish_s']:.1f}",
    }


def _gradient(data: Mapping[str, Any]) -> str:
    """The gradient's norm, or why there was none."""
    if data.get("skipped_empty"):
        return "none, no group has a difference in reward"
    if data.get("skipped_all_masked"):
        return "none, every token is too far off-policy"
    return f"{data.get('grad_norm', 0.0):.2f}"


def _eval_line(data: Mapping[str, Any]) -> str:
    reward = "none" if data["reward"] is None else f"{data['reward']:.3f}"
    return (
        f"held-out success {reward} at version {data['version']} ({data['episodes']} episodes, "
        f"{data['outcomes']}, {data['seconds']:.0f} s)"
    )


def _held_out_line(data: Mapping[str, Any]) -> str:
    accuracy = f", preferred {data['accuracy']:.3f}" if "accuracy" in data else ""
    return f"held-out loss {data['loss']:.4f}{accuracy} at step {data['step']}"


def _end_lines(data: Mapping[str, Any], rewards: list[float]) -> Iterator[str]:
    if rewards:
        yield f"reward {sparkline(rewards)} {rewards[0]:.2f} -> {rewards[-1]:.2f}"
    how = "stopped" if data["stopped"] else "finished"
    yield f"{how} at step {data['step']}; everything is in {data['folder']}"
    plot = f"plot: {data['folder']}/reward.png; " if rewards else ""
    yield f"{plot}look again: miles runs show {data['folder']}"
    if data["stopped"]:
        yield f"go on: miles launch --resume {data['folder']}"
