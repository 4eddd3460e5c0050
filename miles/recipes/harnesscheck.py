"""`miles harness test`: a program, unmodified, plays real tasks with a scripted model in a sandbox without a network.

Every check is an episode. What the model "says" is a task's own solution, one shell command at a time, in the words
that the program's description gives for it."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from miles.envs.base import Taskset
from miles.envs.terminal.taskset import TerminalTaskset
from miles.envs.toy import GuessNumberConfig, GuessNumberTaskset
from miles.errors import EngineError, HarnessError, MilesError
from miles.harnesses.base import Harness
from miles.harnesses.description import Trial
from miles.recipes.agents import make_harness
from miles.recipes.tiny_model import tiny_rendering
from miles.rollout.engines.scripted import ScriptedEngine, scripted_logprobs
from miles.rollout.episode import AgentGenerate, EpisodeConfig, EpisodeRunner, Job
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.server import SessionConfig, SessionServer
from miles.rollout.session.session import Session
from miles.rollout.session.stability import Stability, shared_beginning, stability
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.types import Discarded, Edge, Episode, Faulted, Finish, Generated, GenerateRequest, Scored, Tree

__all__ = ["CHECKS", "Bench", "Player", "check_harness"]

Reply = str | Mapping[str, Any]
_ANSWER = "<|im_start|>assistant"
_OURS = Trial(tool="shell", arguments={"command": "$command"}, env_tool="$tool")
_TASK = "python-sum-range"
_LOOK = "cat total.py"
_MEND = 'python3 -c \'f = open("total.py", "r+"); t = f.read().replace("last)", "last + 1)"); f.seek(0); f.write(t)\''


@dataclass
class Player:
    """A scripted model that knows conversations by their first words, whoever asks and however often.

    `scripts` maps a text of a conversation's beginning to its replies; "*" is for the others. The n-th answer of a
    conversation is its n-th reply; after the last one it is told again. What offers no tools gets `aside`.
    """

    trial: Trial
    scripts: Mapping[str, Sequence[Reply]]
    aside: str = "What was said so far, in short."
    before: Callable[[int, str], Awaitable[None]] | None = None
    """Awaited before the n-th call (from 0) with this prompt is answered; may raise."""
    tails: Mapping[str, Reply] = field(default_factory=dict)
    """Replies to whatever was said since the last answer, by a text of it; they come before the scripts."""
    cut: Sequence[int] = ()
    """Calls whose answer breaks off in the middle."""
    rendering: Rendering = field(default_factory=tiny_rendering)
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(Prompt, answer) of every call, in ids."""
    _calls: int = 0
    _first: dict[tuple[str, str], int] = field(default_factory=dict)

    def engine(self, *, context: int = 1 << 20) -> ScriptedEngine:
        self._calls = 0
        return ScriptedEngine(self._answer, context_length=context)

    async def _answer(self, request: GenerateRequest) -> list[int] | Generated:
        number, self._calls = self._calls, self._calls + 1
        tokenizer = self.rendering.tokenizer
        prompt = tokenizer.decode(list(request.prompt_ids))
        if self.before is not None:
            await self.before(number, prompt)
        text = self.text(prompt, request.session)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        if number in self.cut:
            ids = ids[: len(ids) // 2]
        self.asked.append((tuple(request.prompt_ids), tuple(ids)))
        return _broken_off(ids) if number in self.cut else ids

    def text(self, prompt: str, session: str) -> str:
        """What the model says after this prompt."""
        since = prompt.rpartition(f"{_ANSWER}\n")[0].rpartition(_ANSWER)[2]
        for mark, reply in self.tails.items():
            if mark in since:
                return self.spoken(reply)
        if self.trial.tool and "<tools>" not in prompt:
            return self.aside
        head, count = prompt.partition(_ANSWER)[0], prompt.count(_ANSWER)
        key = next((key for key in self.scripts if key != "*" and key in head), "*")
        replies = self.scripts.get(key, ["Done."])
        place = count - self._first.setdefault((session, key), count)
        return self.spoken(replies[min(max(0, place), len(replies) - 1)])

    def spoken(self, reply: Reply) -> str:
        """A reply as the model writes it. `{"run": COMMAND}` is a command in the program's shell, `{"env": TOOL,
        "arguments": …}` a tool of the environment, `{"act": ACTION}` its `act`, `{"all": […]}` several at once."""
        if isinstance(reply, str):
            return reply
        if "all" in reply:
            return "\n".join(self.spoken(one) for one in reply["all"])
        if "run" in reply:
            if not self.trial.tool:
                return str(_filled(self.trial.text, reply["run"]))
            return _call(self.trial.tool, _filled(self.trial.arguments, reply["run"]))
        if "act" in reply:
            reply = {"env": "act", "arguments": {"action": reply["act"]}}
        if "env" in reply:
            name = Template(self.trial.env_tool).substitute(tool=reply["env"])
            return _call(name, {**reply["arguments"], **self.trial.env_arguments})
        return _call(reply["tool"], reply.get("arguments", {}))


def _broken_off(ids: list[int]) -> Generated:
    logprobs = scripted_logprobs(len(ids))
    return Generated(output_ids=tuple(ids), logprobs=logprobs, versions=(0,) * len(ids), finish=Finish.ABORT)


def _call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _filled(value: Any, command: str) -> Any:
    if isinstance(value, str):
        return Template(value).safe_substitute(
            command=command, command_json=json.dumps(command), line_json=json.dumps(command + "\n")
        )
    if isinstance(value, dict):
        return {key: _filled(item, command) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, command) for item in value]
    return value


class _Server(SessionServer):
    """Remembers its sessions."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.opened: list[Session] = []

    def open(self, *args: Any, **settings: Any) -> Session:
        self.opened.append(super().open(*args, **settings))
        return self.opened[-1]


class _LeftOut(Exception):
    """The check does not apply to this program."""


class Bench:
    """A harness, a pool of sandboxes, and episodes with scripted models."""

    def __init__(self, harness: Harness, trial: Trial, pool: SandboxPool, wall_s: float = 180.0) -> None:
        self.harness, self.trial, self.pool, self.wall_s = harness, trial, pool, wall_s
        self.episodes: list[Episode] = []
        self.sessions: list[Session] = []

    async def play(
        self,
        player: Player,
        taskset: Taskset | None = None,
        task_id: str = _TASK,
        *,
        context: int = 1 << 20,
        max_tokens: int = 4096,
        config: EpisodeConfig | None = None,
        session: SessionConfig | None = None,
    ) -> Episode:
        """One episode. Its tree is compared with what the engine was asked and answered: AssertionError."""
        taskset = taskset or TerminalTaskset()
        task = next(task for split in ("train", "test") for task in taskset.tasks(split) if task.id == task_id)
        config = config or EpisodeConfig(wall_s=self.wall_s, agent_s=self.wall_s - 30, turns=64, tokens=1 << 18)
        server = _Server(
            player.engine(context=context), player.rendering, session or SessionConfig(), max_tokens=max_tokens
        )
        async with server:
            runner = EpisodeRunner(taskset, server, self.pool, AgentGenerate(self.harness), config)
            episode = await runner.run(Job(task=task, group_id="check"))
        self.sessions += server.opened
        exact(episode.tree, player)
        self.episodes.append(episode)
        return episode

    def player(self, *replies: Reply, **more: Any) -> Player:
        return Player(self.trial, {"*": [*replies, self.trial.finish]}, **more)

    def solving(self, **more: Any) -> Player:
        """Looks, does two things at once, mends the file, tries it, and finishes."""
        if self.trial.script:
            return self.player(*self.trial.script, **more)
        both = [{"run": "ls"}, {"run": "pwd"}]
        looks: list[Reply] = [{"run": _LOOK}, {"all": both} if self.trial.tool else both[0]]
        return self.player(*looks, {"run": _MEND}, {"run": "python3 total.py 3 5"}, **more)


def exact(tree: Tree, player: Player) -> None:
    """Every recorded turn is, id by id, one that the engine was asked and answered."""
    asked = {prompt: answer for prompt, answer in player.asked}
    for turn in tree.turns:
        if not turn.output_ids:
            continue  # it was aborted
        ids: list[int] = []
        for above in tree.path(turn.id)[:-1]:
            ids += [*above.prompt_ids, *above.output_ids]
        prompt = (*ids, *turn.prompt_ids)
        answer = asked.get(prompt, ())[: len(turn.output_ids)]
        _must(answer == turn.output_ids, f"turn {turn.id} is not what was sampled")
        _must(
            turn.logprobs == scripted_logprobs(len(turn.output_ids)),
            f"turn {turn.id} has other logprobs than the engine gave",
        )


def _must(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _ended(episode: Episode) -> str:
    outcome = episode.outcome
    detail = getattr(outcome, "detail", "") or "\n".join(episode.log[-12:])
    hint = (
        "" if episode.tree.turns[1:] else " [its model was asked once at most: does [trial] say how it calls a tool?]"
    )
    told = f"{outcome.kind} {getattr(outcome, 'reason', '')} {getattr(outcome, 'reward', '')}"
    return f"{told}: {detail[-1500:]}{hint}"


async def _solves(bench: Bench) -> str:
    """A task is solved with its own tools; the main line is one conversation."""
    episode = await bench.play(bench.solving())
    _must(episode.outcome == Scored(reward=1.0, parts={"checks": 1.0}), _ended(episode))
    lines = [episode.tree.line(turn.id) for turn in episode.tree.turns]
    beside, first = len(lines) - lines.count("main"), len(episode.tree.turns[0].prompt_ids)
    counts = f"{lines.count('main')} turns, {beside} beside"
    return f"{counts}, the first prompt {first:,} bytes, {episode.timings['agent']:.1f} s"


def _runs_commands(bench: Bench) -> None:
    if bench.trial.script:
        raise _LeftOut("it runs no commands")


async def _fails(bench: Bench) -> str:
    """An agent that changes nothing scores nothing."""
    _runs_commands(bench)
    episode = await bench.play(bench.player({"run": _LOOK}))
    _must(isinstance(episode.outcome, Scored) and episode.outcome.reward == 0.0, _ended(episode))
    return "reward 0"


async def _begins_alike(bench: Bench) -> str:
    """Two episodes of one task begin with the same prompt, so that a group's is prefilled and trained once."""
    player = bench.solving()
    episode = await bench.play(player)
    decode = player.rendering.tokenizer.decode
    share, parts = shared_beginning(bench.episodes[0].tree, episode.tree, lambda ids: str(decode(list(ids))))
    _must(share > 0.9, f"only the first {share:.1%} of its prompt are the same: {parts}")
    return "all of its prompt" if share == 1.0 else f"the first {share:.1%} of its prompt; then {parts}"


async def _plays(bench: Bench) -> str:
    """The environment's own actions reach it."""
    _runs_commands(bench)
    taskset = GuessNumberTaskset(GuessNumberConfig(count=4))
    task = taskset.tasks("train")[0]
    secret = task.data["secret"]
    replies: list[Reply] = [{"act": str(guess)} for guess in (secret - 1, secret)]
    if not _sees_tools(bench.harness):
        replies = [{"run": f'/tmp/env-tool act \'{{"action": "{guess}"}}\''} for guess in (secret - 1, secret)]
    episode = await bench.play(bench.player(*replies), taskset, task.id)
    _must(isinstance(episode.outcome, Scored) and episode.outcome.reward == 0.5, _ended(episode))
    return "reward 0.5 after two actions"


def _sees_tools(harness: Harness) -> bool:
    """Whether the model is told of the environment's tools as tools, not as a command."""
    description = getattr(harness, "description", None)
    return description is None or bool(description.takes_mcp)


def _discarded(episode: Episode) -> bool:
    return isinstance(episode.outcome, Discarded) and episode.outcome.reason == "engine"


async def _stumbles(bench: Bench) -> str:
    """A model call that fails twice with a 5xx is asked again, and sampled once."""

    async def before(number: int, prompt: str) -> None:
        if number - (not bench.trial.script) in (0, 1):  # the first call of one that makes but one
            raise EngineError("the engine stumbled, as it was asked to")

    episode = await bench.play(bench.solving(before=before))
    if _discarded(episode):
        return "it does not ask again after a 5xx: every stumble of the engine discards an episode"
    _must(episode.outcome == Scored(reward=1.0, parts={"checks": 1.0}), _ended(episode))
    return "solved after two failures"


async def _waits(bench: Bench) -> str:
    """A slow engine is waited for, and its answer is sampled once."""

    async def before(number: int, prompt: str) -> None:
        await asyncio.sleep(8.0 if number == (not bench.trial.script) else 0.0)

    episode = await bench.play(bench.solving(before=before))
    _must(episode.outcome == Scored(reward=1.0, parts={"checks": 1.0}), _ended(episode))
    return "solved after 8 s of silence"


async def _is_cut(bench: Bench) -> str:
    """An answer that breaks off in mid-stream is asked for again; what came of it is not trained."""
    episode = await bench.play(bench.solving(cut=[0]))
    if _discarded(episode):
        return "it gives up, and the episode is discarded"
    _must(episode.outcome == Scored(reward=1.0, parts={"checks": 1.0}), _ended(episode))
    broken = [turn for turn in episode.tree.turns if turn.finish is Finish.ABORT]
    _must(len(broken) == 1 and not broken[0].trainable, f"{len(broken)} broken turns, trained or not as they were")
    return "solved, the broken turn is kept and not trained"


async def _overflows(bench: Bench) -> str:
    """A full context ends as the policy's own fault or is got over; never as an infrastructure failure."""
    _runs_commands(bench)
    first = bench.episodes[0].tree.turns
    room = max(len(turn.prompt_ids) for turn in first) + 6_000
    flood: list[Reply] = [{"run": "head -c 3000 /dev/zero | tr '\\0' x"}] * 12
    episode = await bench.play(bench.player(*flood), context=room)
    _must(not isinstance(episode.outcome, Discarded), _ended(episode))
    refused = bench.sessions[-1].refused.get("context_length_exceeded", 0)
    began_anew = any(turn.edge is Edge.COMPACTION_REQUEST for turn in episode.tree.turns)
    _must(bool(refused) or began_anew, f"the context of {room} tokens was never full")
    return f"refused {refused} times, " + ("summed up and went on" if began_anew else "ended")


async def _is_ended(bench: Bench) -> str:
    """At the deadline the program and all that it started is ended, and what it did is scored as it stands."""
    _runs_commands(bench)
    config = EpisodeConfig(wall_s=60.0, agent_s=bench.episodes[0].timings["agent"] + 6.0, turns=64, tokens=1 << 18)
    busy: list[Reply] = [{"run": "python3 -c 'import time; time.sleep(300)'"}] * 50  # not every program waits for it
    episode = await bench.play(bench.player(*busy), config=config)
    _must(isinstance(episode.outcome, Scored | Faulted), _ended(episode))
    took = episode.timings["agent"]
    _must(config.agent_s - 3.0 < took < config.agent_s + 5.0, f"it ended after {took:.1f} s of {config.agent_s:.1f}")
    _must(not bench.pool.metrics()["sandbox/alive"], "its sandbox is still there")
    return f"ended after {episode.timings['agent']:.1f} s"


CHECKS: dict[str, Callable[[Bench], Awaitable[str]]] = {
    "solves a task with its own tools": _solves,
    "an agent that does nothing scores nothing": _fails,
    "two episodes begin alike": _begins_alike,
    "acts in an environment": _plays,
    "gets over a failing engine": _stumbles,
    "waits for a slow engine": _waits,
    "asks again when a stream breaks off": _is_cut,
    "a full context": _overflows,
    "ends at the deadline": _is_ended,
}


@contextlib.asynccontextmanager
async def benching(name: str, settings: dict[str, Any], sandbox: SandboxConfig | None = None) -> AsyncIterator[Bench]:
    """A harness, installed, with a pool of sandboxes. HarnessError, SandboxError where that is impossible."""
    harness = make_harness(name, settings)
    if (prepare := getattr(harness, "prepare", None)) is not None:
        await asyncio.to_thread(prepare)
    config = sandbox or SandboxConfig()
    pool = SandboxPool(make_backend(config), config)
    description = getattr(harness, "description", None)
    trial = description.trial if description is not None else _OURS
    try:
        await pool.start()
        yield Bench(harness, trial, pool)
    finally:
        await pool.close()
        await harness.close()


Tell = Callable[[str, str, str], None]


async def check_harness(
    name: str,
    settings: dict[str, Any],
    *,
    sandbox: SandboxConfig | None = None,
    only: Sequence[str] = (),
    tell: Tell,
    keep: Path | None = None,
) -> tuple[list[dict[str, str]], Stability]:
    """Every check with its status ("ok", "FAILED", "left out"), and how stable the prompts of the first were. Episodes
    go to `keep`, as lines of JSON."""
    report = []
    async with benching(name, settings, sandbox) as bench:
        for title, check in CHECKS.items():
            if only and title not in only and check is not _solves:
                continue
            began = time.monotonic()
            status, detail = await _tried(check, bench)
            tell(title, status, f"{detail} ({time.monotonic() - began:.0f} s)")
            report.append({"check": title, "status": status, "detail": detail})
            if status == "FAILED" and check is _solves:
                break  # nothing else can be told of it
        if keep is not None:
            lines = [f"{json.dumps(_kept(episode))}\n" for episode in bench.episodes]
            await asyncio.to_thread(keep.write_text, "".join(lines))
        return report, stability([episode.tree for episode in bench.episodes[:1]])


def _kept(episode: Episode) -> dict[str, Any]:
    turns = [
        {"id": t.id, "parent": t.parent, "edge": t.edge.value, "line": episode.tree.line(t.id), "said": t.message}
        for t in episode.tree.turns
    ]
    return {"outcome": episode.outcome.kind, "log": list(episode.log), "turns": turns}


async def _tried(check: Callable[[Bench], Awaitable[str]], bench: Bench) -> tuple[str, str]:
    try:
        return "ok", await check(bench)
    except _LeftOut as reason:
        return "left out", str(reason)
    except (AssertionError, HarnessError) as wrong:
        return "FAILED", str(wrong)
    except MilesError as error:
        return "FAILED", f"{type(error).__name__}: {error}"
