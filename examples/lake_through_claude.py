"""A model of 0.1 M parameters, made on the spot, learns FrozenLake inside Claude Code, on a laptop.

    miles launch examples/lake_through_claude.toml

A small model must first be shown the words of the program that it will be asked by: its system prompt, its name for the
environment's tool. So one episode is played with a scripted model, and what Claude Code said in it becomes the frame of
demonstrations, every other one of which walks at random. The rest is learned by reward, through the program itself.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from miles.config import Config
from miles.envs.base import Demonstration, Taskset
from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset
from miles.recipes.harnesscheck import Player, benching
from miles.sandboxes.base import Sandbox
from miles.types import Env, Message, Task, ToolSpec

__all__ = ["HARNESS", "Lake"]

HARNESS = ("claude-code", {"bare": True, "tools": "none"})
WAY = ("1", "1", "2", "2", "1", "2")  # down, down, right, right, down, right
SHOWN = 64


class LakeConfig(Config):
    """Nothing to choose."""


class Lake(Taskset):
    """FrozenLake without ice, and demonstrations in Claude Code's words."""

    name, reward_range, config_class = "lake-through-claude", (0.0, 1.0), LakeConfig

    def __init__(self, config: LakeConfig | None = None) -> None:
        self._lake = GymnasiumTaskset(GymnasiumConfig(id="FrozenLake-v1", kwargs={"is_slippery": False}))
        self._shown: list[Demonstration] = []

    def tasks(self, split: str) -> Sequence[Task]:
        return self._lake.tasks(split)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return self._lake.env(task, sandbox)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        if not self._shown:
            with ThreadPoolExecutor(1) as thread:  # whoever asks may have a loop of its own
                thread.submit(asyncio.run, self._show(random.Random(seed))).result()
        dice = random.Random(seed)
        while True:
            yield dice.choice(self._shown)

    async def _show(self, dice: random.Random) -> None:
        frame, tools, name = await self._frame()
        for number in range(SHOWN):
            moves = WAY if number % 2 else [str(dice.randrange(4)) for _ in WAY]
            env, said = self.env(self.tasks("train")[0], None), list(frame)
            await env.reset()
            for turn, move in enumerate(moves):
                function = {"name": name, "arguments": json.dumps({"action": move})}
                calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
                step = await env.step(move)
                over = step.terminated or step.truncated
                told = step.observation + ("\n[The episode is over.]" if over else "")
                said.append({"role": "assistant", "content": "", "tool_calls": calls})
                said.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": told})
                if over:
                    break
            said.append({"role": "assistant", "content": "Done."})
            self._shown.append((tuple(said), tools))

    async def _frame(self) -> tuple[list[Message], tuple[ToolSpec, ...], str]:
        """(What the program says first, the tools that it offers, its name for ours): from one scripted episode."""
        async with benching(*HARNESS) as bench:
            player = bench.player({"act": "1"})
            episode = await bench.play(player, self._lake, self.tasks("train")[0].id)
        return list(episode.tree.turns[0].messages), _tools(player), bench.trial.env_tool.replace("$tool", "act")


def _tools(player: Player) -> tuple[ToolSpec, ...]:
    """The tools of the first prompt, as its template writes them."""
    prompt = player.rendering.tokenizer.decode(list(player.asked[0][0]))
    inner = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    return tuple(json.loads(line) for line in inner.splitlines())
