import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles.errors import EngineError, EngineLost, TrainerError
from miles.processes import Worker, deferred, scratch_folder


class Echo:
    """Runs in the child."""

    def __init__(self, *, greeting="hi"):
        if greeting == "fail":
            raise ValueError("no greeting")
        self.greeting = greeting

    def greet(self, name):
        return f"{self.greeting} {name}"

    def size(self, data):
        return len(data)

    def fail(self):
        raise KeyError("unplanned")

    def refuse(self):
        raise TrainerError("planned")

    @deferred
    def count(self, reply, *, n):
        def run():
            for number in range(n):
                reply(number, last=False)
            reply("done")

        threading.Thread(target=run).start()

    def nap(self, seconds):
        time.sleep(seconds)

    def sleep(self):
        time.sleep(60)


def start(tmp_path, **kwargs):
    return Worker.start(
        "tests.test_processes:Echo", kwargs, name="echo", log=tmp_path / "echo.log", failed=EngineError, lost=EngineLost
    )


@pytest.fixture
async def worker(tmp_path):
    made = await start(tmp_path, greeting="hello")
    yield made
    await made.close(grace_s=0.1)


async def test_calls_return_and_large_arguments_arrive(worker):
    assert await worker.call("greet", name="you") == "hello you"
    assert await worker.call("size", data=b"x" * 5_000_000) == 5_000_000
    assert await asyncio.gather(*(worker.call("greet", name=str(n)) for n in range(50)))


async def test_a_deferred_method_answers_in_pieces(worker):
    seen = []
    assert await worker.call("count", on_item=seen.append, n=5) == "done"
    assert seen == [0, 1, 2, 3, 4]


async def test_failures_keep_their_kind_and_the_child_goes_on(worker):
    with pytest.raises(EngineError, match="echo: KeyError: 'unplanned'"):
        await worker.call("fail")
    with pytest.raises(TrainerError, match="planned"):
        await worker.call("refuse")
    assert await worker.call("greet", name="still") == "hello still"


async def test_a_child_that_does_not_read_blocks_nobody_and_a_cancelled_call_leaves_no_half_frame(worker):
    sleeping = asyncio.create_task(worker.call("nap", seconds=0.5))
    await asyncio.sleep(0.05)
    large = [asyncio.create_task(worker.call("size", data=b"x" * 3_000_000)) for _ in range(3)]
    began = time.monotonic()
    await asyncio.sleep(0.05)
    assert time.monotonic() - began < 0.3
    large[0].cancel()
    await sleeping
    assert await asyncio.gather(*large[1:]) == [3_000_000] * 2
    assert await worker.call("greet", name="still") == "hello still"


async def test_a_dead_child_fails_every_call_with_the_tail_of_its_log(worker):
    waiting = asyncio.create_task(worker.call("sleep"))
    await asyncio.sleep(0.05)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"echo \(pid \d+\) ended.*echo\.log"):
        await waiting
    with pytest.raises(EngineLost):
        await worker.call("greet", name="x")


async def test_a_child_that_cannot_begin_says_why_and_is_gone(tmp_path):
    with pytest.raises(EngineError, match="ValueError: no greeting"):
        await start(tmp_path, greeting="fail")


async def test_closing_kills_a_busy_child(worker):
    waiting = asyncio.create_task(worker.call("sleep"))
    await asyncio.sleep(0.05)
    await worker.close(grace_s=0.1)
    with pytest.raises(EngineLost):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


async def test_ctrl_c_does_not_reach_a_child(worker):
    os.kill(worker.pid, signal.SIGINT)
    assert await worker.call("greet", name="on") == "hello on"


def test_folders_of_dead_owners_of_this_machine_go_when_the_next_one_is_made(tmp_path):
    mine = scratch_folder("demo", tmp_path)
    here = "-".join(mine.name.split("-")[:3])
    dead, elsewhere = tmp_path / f"{here}-999999999-1-x", tmp_path / "miles-demo-0a1b2c3d-999999999-1-x"
    dead.mkdir()
    elsewhere.mkdir()  # in a folder that machines share, nobody can tell here whether its owner lives
    other = scratch_folder("demo", tmp_path)
    assert mine.is_dir()
    assert other.is_dir()
    assert elsewhere.is_dir()
    assert not dead.exists()


PARENT = """
import asyncio, pathlib, time
from tests.test_processes import start
async def main():
    worker = await start(pathlib.Path("{log}"), greeting="x")
    print(worker.pid, flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def test_a_child_ends_with_its_killed_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(log=tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not _alive(child):
            return
        time.sleep(0.02)
    pytest.fail(f"child {child} lives on")


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ROOT = Path(__file__).resolve().parents[1]
