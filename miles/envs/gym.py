"""Every environment as a `gymnasium.Env`: `gymnasium.make("miles/NAME-v0")`.

`import miles.envs.gym` registers what is built in, installed and declared;
`gymnasium.make("miles.envs.gym:miles/NAME-v0")` needs no import. Actions and observations are texts. With tools, an
action is the text for `act`, or {"name": …, "arguments": …} for another tool; any other text is the agent's last word,
which ends the episode. The rewards of an episode add up to its score."""

import asyncio
import contextlib
import json
import string
from typing import Any

import gymnasium

from miles.envs.base import Taskset
from miles.envs.hub.manage import open_env
from miles.envs.hub.project import Project
from miles.errors import EnvError
from miles.registry import known
from miles.sandboxes.base import Sandbox
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.sandboxes.shell import SHELL_TOOL, run_shell
from miles.types import Env, Message, Observation, Task, Transcript

__all__ = ["HubEnv", "TextSpace", "register"]

_MOST = 1 << 16


class TextSpace(gymnasium.spaces.Text):  # type: ignore[misc]  # Any without its stubs
    """Any text at all; samples are short ones of printable letters."""

    def __init__(self) -> None:
        super().__init__(max_length=16, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= _MOST * 16


class HubEnv(gymnasium.Env[str, str]):  # type: ignore[misc]  # Any without its stubs
    """One environment, blocking. `taskset` is the caller's own, or is opened by `name` and closed with it."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012  Gymnasium declares it so

    def __init__(
        self,
        name: str = "",
        *,
        taskset: Taskset | None = None,
        split: str = "train",
        settings: dict[str, Any] | None = None,
        sandbox: str = "local",
        render_mode: str | None = None,
    ) -> None:
        self.observation_space, self.action_space, self.render_mode = TextSpace(), TextSpace(), render_mode
        self._loop = asyncio.new_event_loop()
        self._owned = taskset is None
        self._taskset = taskset if taskset is not None else open_env(name, settings or {})
        if self._taskset.harness == "own" or self._taskset.generation:
            raise EnvError(f"{self._taskset.name} brings its own loop: it cannot be stepped from outside")
        self._tasks = self._taskset.tasks(split)
        self._backend = sandbox
        self._stack = contextlib.AsyncExitStack()
        self._pool: SandboxPool | None = None
        self._env: Env | None = None
        self._sandbox: Sandbox | None = None
        self._told, self._over, self._last = 0.0, True, ""
        self._observation = Observation(messages=())
        self._messages: list[Message] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """`options={"task": ID}` chooses a task, else the seed does."""
        super().reset(seed=seed)
        task = self._chosen((options or {}).get("task"))
        self._loop.run_until_complete(self._begin(task))
        return self._last, {"task": task.id, "tools": json.dumps(self._tools())}

    def _chosen(self, wanted: str | None) -> Task:
        if wanted is None:
            return self._tasks[int(self.np_random.integers(len(self._tasks)))]
        found = next((task for task in self._tasks if task.id == wanted), None)
        if found is None:
            raise EnvError(f"there is no task {wanted!r}; the first one is {self._tasks[0].id!r}")
        return found

    async def _begin(self, task: Task) -> None:
        await self._end()
        spec = self._taskset.sandbox(task)
        if spec is not None:
            if self._pool is None:
                config = SandboxConfig(backend=self._backend)
                self._pool = SandboxPool(make_backend(config), config)
                await self._pool.start()
            self._sandbox = await self._stack.enter_async_context(self._pool.sandbox(spec))
        self._env = self._taskset.env(task, self._sandbox)
        if self._pool is not None and hasattr(self._env, "more_sandboxes"):
            self._env.more_sandboxes = self._pool.sandbox
        self._observation = await self._env.reset()
        self._messages = list(self._observation.messages)
        self._told, self._over = 0.0, False
        self._last = "\n".join(str(message.get("content") or "") for message in self._messages)

    def _tools(self) -> list[Any]:
        return [*self._observation.tools, *([SHELL_TOOL] if self._sandbox is not None else [])]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._env is None or self._over:
            raise EnvError("call reset before step")
        return self._loop.run_until_complete(self._step(action))

    async def _step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self._env is not None
        offered = {tool["function"]["name"] for tool in self._tools()}
        call = _call(action, offered)
        if call is None:
            return await self._finish(action)
        name, arguments = call
        if name == "shell" and self._sandbox is not None:
            self._last = await run_shell(self._sandbox, arguments, timeout_s=60.0, max_output=_MOST)
            return self._last, 0.0, False, False, {}
        text = str(arguments.get("action", "")) if name == "act" else json.dumps({"name": name, "arguments": arguments})
        step = await self._env.step(text)
        self._last = step.observation
        if not step.terminated and not step.truncated:
            self._told += step.reward
            return step.observation, float(step.reward), False, False, dict(step.info)
        _, rest, _, _, info = await self._finish("")
        return step.observation, rest, step.terminated, step.truncated, {**step.info, **info}

    async def _finish(self, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score: the last reward is what is missing of it."""
        assert self._env is not None
        self._over = True
        if self._sandbox is not None:
            await self._sandbox.quiesce()
        messages = (*self._messages, {"role": "assistant", "content": answer})
        score = await self._env.score(Transcript(messages=messages, final_text=answer, turns=1))
        self._last = ""
        return "", score.reward - self._told, True, False, {"score": score.reward, "parts": dict(score.parts)}

    def render(self) -> str:
        return self._last

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.run_until_complete(self._end())
        if self._pool is not None:
            self._loop.run_until_complete(self._pool.close())
        if self._owned:
            self._loop.run_until_complete(self._taskset.close())
        self._loop.close()

    async def _end(self) -> None:
        env, self._env, self._sandbox = self._env, None, None
        if env is not None:
            await env.close()
        await self._stack.aclose()


def _call(action: str, offered: set[str]) -> tuple[str, dict[str, Any]] | None:
    """A tool call, or None for the agent's last word."""
    with contextlib.suppress(ValueError):
        told = json.loads(action)
        if isinstance(told, dict) and told.get("name") in offered and isinstance(told.get("arguments"), dict):
            return told["name"], told["arguments"]
    return ("act", {"action": action}) if "act" in offered else None


def register() -> None:
    """Tell Gymnasium of every environment that has a name here. Safe to call again, as after `miles env add`."""
    for name in {*known("envs"), *Project.find().entries()}:
        id = f"miles/{name}-v0"
        if id not in gymnasium.registry and name != "gymnasium":
            gymnasium.register(id, entry_point=HubEnv, kwargs={"name": name}, disable_env_checker=True)


register()
