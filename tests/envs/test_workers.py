"""Environments in processes of their own: what they answer, and every way in which they end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from miles.envs.workers.process import WorkerProcess, quiet_environment
from miles.envs.workers.taskset import WorkerConfig, WorkerTaskset
from miles.errors import EngineError, EnvError, HarnessError
from miles.sandboxes.base import SandboxSpec
from miles.sandboxes.local.reaper import processes_with
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.types import Transcript

NOTHING = Transcript(messages=(), final_text="42", turns=1)
ADAPTER = """
import asyncio, os, subprocess, sys, time
from miles_worker.protocol import Failure

def make(settings):
    if settings.get("dies"):
        print("no luck today", flush=True)
        os._exit(3)
    return Adapter(settings)

class Adapter:
    def __init__(self, settings):
        self.settings = settings

    def about(self):
        return {"name": "toy", "layer": "env", "splits": {"train": 2500, "more": None}}

    def tasks(self, split, start, stop):
        return [{"id": f"{split}/{n}", "prompt": f"task {n}", "data": {"seed": n}} for n in range(start, stop)]

    def play(self, task, seed, host):
        return Play(task, host)

    def gold(self, task):
        return {"answer": "42", "actions": ["right"]}

class Play:
    def __init__(self, task, host):
        self.task, self.host = task, host

    def reset(self):
        return {"tools": "act"}

    def step(self, action):
        if action == "crash":
            os._exit(7)
        if action == "hang":
            time.sleep(3600)
        if action == "raise":
            raise KeyError("the environment's own bug")
        if action == "spawn":
            return {"observation": str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)}
        if action == "big":
            return {"observation": "x" * (3 << 20)}
        if action.startswith("reward "):
            return {"observation": "", "reward": {"nan": float("nan"), "two": [1, 2], "one": [1]}[action[7:]]}
        if action.startswith("env "):
            return {"observation": str(os.environ.get(action[4:]))}
        if action == "pid":
            return {"observation": str(os.getpid())}
        return {"observation": action, "reward": 0.5, "terminated": action == "end"}

    async def run(self, endpoint, timeout_s):
        self.host.log("running")
        kind = endpoint["model"]
        if kind == "sandbox":
            done = await self.host.ask("exec", command="echo $((6*7))", timeout_s=10.0)
            self.said = done["stdout"]
            return
        raise Failure("it is " + kind, kind, "its_reason")

    def score(self, transcript):
        return {"reward": float(transcript["final_text"] == "42"), "parts": {"turns": transcript["turns"]}}
"""


@pytest.fixture
def made(tmp_path):
    """Makes tasksets of the adapter above; all are closed at the end."""
    (tmp_path / "toy.py").write_text(ADAPTER)
    tasksets = []

    def make(**more):
        config = {
            "name": "toy",
            "python": Path(sys.executable),
            "kind": str(tmp_path / "toy.py"),
            "log": tmp_path / "log",
        }
        tasksets.append(WorkerTaskset(WorkerConfig(**{**config, **more})))
        return tasksets[-1]

    yield make
    for taskset in tasksets:
        taskset.workers.close()


async def begun(taskset, **more):
    env = taskset.env(taskset.tasks("train")[0], more.get("sandbox"))
    await env.reset()
    return env


async def test_tasks_come_in_pages_and_endless_splits_are_cut(made):
    taskset = made(endless=1500)
    assert [task.id for task in taskset.tasks("train")] == [f"train/{n}" for n in range(2500)]
    assert len(taskset.tasks("more")) == 1500
    assert taskset.tasks("train")[3].prompt == ({"role": "user", "content": "task 3"},)
    assert (taskset.splits(), taskset.harness) == (("train", "more"), "react")


async def test_an_episode_is_played_and_scored_over_the_socket(made):
    taskset = made()
    env = taskset.env(taskset.tasks("train")[0], None)
    observation = await env.reset()
    assert observation.messages == ({"role": "user", "content": "task 0"},)
    assert observation.tools[0]["function"]["name"] == "act"
    step = await env.step("end")
    assert (step.observation, step.reward, step.terminated) == ("end", 0.5, True)
    assert len((await env.step("big")).observation) == 3 << 20
    assert (await env.score(NOTHING)).reward == 1.0
    solution = await taskset.solution(env.task)
    assert (solution.answer, solution.actions) == ("42", ("right",))
    await env.close()
    await env.close()


async def test_what_the_environment_raises_is_its_error_with_its_trace_and_the_episode_goes_on(made):
    env = await begun(made())
    with pytest.raises(EnvError, match=r"(?s)KeyError.*the environment's own bug.*in step"):
        await env.step("raise")
    assert (await env.step("on")).observation == "on"
    await env.close()


@pytest.mark.parametrize("reward, error", [("nan", "finite"), ("two", "one number")])
async def test_a_reward_that_is_none_is_its_error(made, reward, error):
    env = await begun(made())
    with pytest.raises(EnvError, match=error):
        await env.step(f"reward {reward}")
    assert (await env.step("reward one")).reward == 1.0
    await env.close()


@pytest.mark.parametrize("kind, error", [("policy", HarnessError), ("engine", EngineError), ("env", EnvError)])
async def test_its_own_agent_says_whose_failure_it_was(made, kind, error):
    env, lines = await begun(made()), []
    with pytest.raises(error, match=f"it is {kind}") as found:
        await env.run({"base_url": "", "api_key": "", "model": kind}, 5.0, lines.append)
    assert kind != "policy" or found.value.reason == "its_reason"
    assert lines == ["running"]
    await env.close()


async def test_it_works_in_the_sandbox_of_its_episode(made):
    taskset, config = made(), SandboxConfig()
    pool = SandboxPool(make_backend(config), config)
    await pool.start()
    async with pool.sandbox(SandboxSpec()) as sandbox:
        env = await begun(taskset, sandbox=sandbox)
        await env.run({"base_url": "", "api_key": "", "model": "sandbox"}, 5.0, print)
        await env.close()
        env = await begun(taskset)
        with pytest.raises(EnvError, match="no such sandbox"):
            await env.run({"base_url": "", "api_key": "", "model": "sandbox"}, 5.0, print)
        await env.close()
    await pool.close()


async def test_a_worker_that_dies_at_its_start_is_noticed_at_once_with_what_it_said(made):
    began = time.monotonic()
    with pytest.raises(EnvError, match=r"(?s)the worker is gone.*no luck today"):
        made(settings={"dies": True}).tasks("train")
    assert time.monotonic() - began < 10


async def test_a_python_that_is_none_is_noticed_at_once(made, tmp_path):
    (tmp_path / "broken").write_text("#!/bin/sh\necho cannot >&2; exit 4\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(EnvError, match=r"(?s)ended with status 4.*cannot"):
        made(python=tmp_path / "broken").tasks("train")


async def test_a_worker_that_dies_in_an_episode_is_replaced(made):
    taskset = made()
    one, two = await begun(taskset), await begun(taskset)
    with pytest.raises(EnvError, match="the worker is gone"):
        await one.step("crash")
    with pytest.raises(EnvError, match="the worker is gone"):
        await two.step("on")
    await one.close()
    await two.close()
    again = await begun(taskset)
    assert (await again.step("on")).observation == "on"
    assert taskset.workers.lives == 2
    await again.close()


async def test_a_worker_that_dies_time_after_time_is_given_up(made, monkeypatch):
    monkeypatch.setattr("miles.envs.workers.taskset._PAUSES_S", (0.0, 0.0))
    taskset = made()
    for _ in range(2):
        env = await begun(taskset)
        with pytest.raises(EnvError):
            await env.step("crash")
        await env.close()
    with pytest.raises(EnvError, match="died 2 times in a row"):
        await begun(taskset)


async def test_hangs_are_no_deaths(made, monkeypatch):
    monkeypatch.setattr("miles.envs.workers.taskset._CLOSE_S", 0.1)
    taskset = made()
    for _ in range(6):
        env = await begun(taskset)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.step("hang")
        await env.close()
    env = await begun(taskset)
    assert (await env.step("on")).observation == "on"
    await env.close()


async def test_a_step_that_hangs_costs_its_worker_and_no_other_episode(made, monkeypatch):
    monkeypatch.setattr("miles.envs.workers.taskset._CLOSE_S", 0.2)
    taskset = made()
    hanging, going = await begun(taskset), await begun(taskset)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await hanging.step("hang")
    await hanging.close()
    fresh = await begun(taskset)
    pids = [(await env.step("pid")).observation for env in (going, fresh)]
    assert pids[0] != pids[1]
    await going.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids[0]), 0)
    await fresh.close()


async def test_closing_ends_all_that_the_worker_started(made):
    taskset = made()
    env = await begun(taskset)
    child = int((await env.step("spawn")).observation)
    os.kill(child, 0)
    await env.close()
    await taskset.close()
    assert not alive(child)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_it_sees_none_of_our_keys_but_the_named_ones(made, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    env = await begun(made())
    assert (await env.step("env MY_KEY")).observation == "None"
    assert (await env.step("env HARBOR_TELEMETRY")).observation == "0"
    await env.close()
    env = await begun(made(secrets=("MY_KEY",), environment={"OWN": "1"}))
    assert [(await env.step(f"env {name}")).observation for name in ("MY_KEY", "OWN")] == ["secret", "1"]
    await env.close()
    with pytest.raises(EnvError, match="export it"):
        quiet_environment(["NO_SUCH_KEY"])


def test_a_worker_of_another_protocol_is_refused(made, tmp_path):
    made()
    process = WorkerProcess.start(
        Path(sys.executable), str(tmp_path / "toy.py"), log=tmp_path / "log", environment=quiet_environment()
    )
    with pytest.raises(EnvError, match="speaks protocol 1, not 99"):
        process.call("hello", protocol=99, settings={}).result(10)
    process.close()


def test_a_worker_dies_with_its_host(tmp_path):
    (tmp_path / "toy.py").write_text(ADAPTER)
    script = f"""
        import os, sys
        from pathlib import Path
        from miles.envs.workers.taskset import WorkerConfig, WorkerTaskset
        t = WorkerTaskset(WorkerConfig(name="toy", python=Path(sys.executable), kind={str(tmp_path / "toy.py")!r},
                                       log=Path({str(tmp_path / "log")!r})))
        print(t.workers.now().pid, flush=True)
        sys.stdin.read()
    """
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    pid = int(host.stdout.readline())
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    assert processes_with(f"MILES_WORKER_PATH={tmp_path}") == []


def test_a_python_that_is_not_there_is_told_and_leaves_no_folder(made):
    before = set(Path(tempfile.gettempdir()).glob("miles-worker*"))
    with pytest.raises(EnvError, match="cannot be started: No such file"):
        made(python=Path("/nonexistent/python")).tasks("train")
    assert set(Path(tempfile.gettempdir()).glob("miles-worker*")) <= before


async def test_an_error_that_is_none_still_ends_the_call(made, tmp_path):
    (tmp_path / "odd").write_text(
        f"#!{sys.executable}\nimport socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[2])\n"
        """s.recv(9999); s.sendall(b'{"id": 1, "error": "oh no"}\\n'); time.sleep(60)\n"""
    )
    (tmp_path / "odd").chmod(0o755)
    with pytest.raises(EnvError, match="an error that is none: 'oh no'"):
        made(python=tmp_path / "odd").tasks("train")


async def test_what_a_cancelled_reset_made_is_closed_all_the_same(tmp_path):
    (tmp_path / "slow.py").write_text(
        """
import pathlib, time
TRACE = pathlib.Path(__file__).with_name("trace")
def make(settings):
    return Slow()
class Slow:
    def about(self):
        return {"name": "slow", "layer": "env", "splits": {"train": 1}}
    def tasks(self, split, start, stop):
        return [{"id": "one", "data": {}}]
    def play(self, task, seed, host):
        time.sleep(0.5)
        return Play()
class Play:
    def reset(self):
        return {}
    def close(self):
        TRACE.write_text("closed")
"""
    )
    config = {
        "name": "slow",
        "python": Path(sys.executable),
        "kind": str(tmp_path / "slow.py"),
        "log": tmp_path / "log",
    }
    taskset = WorkerTaskset(WorkerConfig(**config))
    env = taskset.env(taskset.tasks("train")[0], None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await env.reset()
    await env.close()
    assert (tmp_path / "trace").read_text() == "closed"
    await taskset.close()


@pytest.mark.parametrize("line", ["no json", '{"jsonrpc": "2.0"}', "[]", "[" * 200_000])
async def test_a_worker_that_speaks_nonsense_is_gone(made, tmp_path, line):
    (tmp_path / "odd").write_text(
        f"#!{sys.executable}\nimport socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[2])\n"
        f"s.sendall({line!r}.encode() + b'\\n')\ntime.sleep(60)\n"
    )
    (tmp_path / "odd").chmod(0o755)
    with pytest.raises(EnvError, match="the worker is gone"):
        made(python=tmp_path / "odd").tasks("train")


def test_the_protocol_is_what_its_page_says():
    """Every method of the page is answered, and nothing else is."""
    page = (Path(__file__).parents[2] / "docs" / "env-workers.md").read_text()
    told = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    source = (Path(__file__).parents[2] / "miles/envs/workers/guest/miles_worker/protocol.py").read_text()
    methods = {line.split("on_")[1].split("(")[0] for line in source.splitlines() if "async def on_" in line}
    assert methods <= told
    assert json.dumps(sorted(told - methods)) == '["cancel", "exec", "log", "open", "read", "write"]'
