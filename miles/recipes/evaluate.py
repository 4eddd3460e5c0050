"""`miles eval`: an environment, a harness, a sandbox and a model; resumable, and scored again without running."""

import asyncio
import contextlib
import json
import math
import random
import shutil
import statistics
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config, build, dump_toml, read_toml
from miles.envs.base import Taskset
from miles.envs.hub.manage import declared_rewards, open_env, tasks_of
from miles.envs.rewards import Judges
from miles.errors import ConfigError
from miles.recipes.agents import generate_for
from miles.recipes.config import EnvSection, HarnessSection, SamplingSection
from miles.recipes.scripted import read_script, scripted_model
from miles.rollout.engines.base import Engine
from miles.rollout.engines.embedded import EmbeddedConfig, EmbeddedEngine
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.episode import EpisodeConfig, EpisodeRunner, Job
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.server import SessionServer
from miles.runs import RunFolder
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.types import Discarded, Episode, Score, Scored, Task, Transcript, Tree

__all__ = ["EvaluateConfig", "Summary", "evaluate", "playing", "rescore", "summarise"]


class EvaluateConfig(Config):
    """One evaluation."""

    env: EnvSection
    """The environment."""
    harness: HarnessSection = HarnessSection()
    """The program around the model."""
    generation: str = ""
    """Generation layer, as in a recipe; empty: what the environment says, else the harness."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where commands run."""
    model: str
    """URL of an SGLang server, a model directory, or scripted:FILE."""
    tokenizer: Path | None = None
    """Model directory with the tokenizer of a server whose own one is not on this machine."""
    engine: EmbeddedConfig = EmbeddedConfig()
    """Settings of the embedded engine, which serves a model directory."""
    sampling: SamplingSection = SamplingSection()
    """How the model is sampled."""
    session: SessionConfig = SessionConfig()
    """The session server."""
    episode: EpisodeConfig = EpisodeConfig()
    """Deadlines and limits of one episode."""
    split: str = "test"
    """Which tasks."""
    tasks: int = Field(20, gt=0)
    """Tasks, the first ones of the split."""
    attempts: int = Field(1, gt=0)
    """Episodes of each."""
    concurrency: int = Field(16, gt=0)
    """Episodes at a time."""
    retries: int = Field(2, ge=0)
    """Fresh attempts after infrastructure failed."""
    solved_at: float = 1.0
    """The reward from which on a task counts as solved, for pass@k."""
    seed: int = 0
    """Seed of sampling."""
    root: Path = Path("evals")
    """Folder that evaluations are kept in."""


Summary = dict[str, Any]
_ANSWER_S = 15.0  # a server that is named is up
Tell = Callable[[int, int, Episode], None]


async def evaluate(config: EvaluateConfig, tell: Tell, folder: RunFolder | None = None) -> tuple[RunFolder, Summary]:
    """Play what is not yet in `folder` (None: a new one), and summarise. Episodes are kept as they end."""
    taskset = open_env(config.env.name, config.env.settings, config.env.tasks, config.env.rewards or None)
    try:
        if config.split not in (*taskset.splits(), "train", "test"):
            raise ConfigError(
                f"env {config.env.name!r} has no split {config.split!r}; it has {', '.join(taskset.splits())}"
            )
        tasks = tasks_of(taskset, config.split)[: config.tasks]
        if not tasks:
            raise ConfigError(f"env {config.env.name!r} has no tasks in split {config.split!r}")
        new = folder is None
        if folder is None:
            folder = RunFolder.create(config.root, config.env.name.replace(":", "-").replace("/", "-"))
        else:
            _same(folder, config)
        folder.write_config(dump_toml(config))
        done = {(e.task_id, e.index): e for e in folder.episodes("episodes") if not isinstance(e.outcome, Discarded)}
        wanted = [(task, n) for task in tasks for n in range(config.attempts)]
        missing = [(task, n) for task, n in wanted if (task.id, n) not in done]
        kept = [done[task.id, n] for task, n in wanted if (task.id, n) in done]
        began = time.monotonic()
        if missing:
            try:
                with folder.locked():
                    async with playing(config, taskset, folder.logs) as runner:
                        kept += await _play(config, runner, missing, len(wanted), len(kept), folder, tell)
            except BaseException:
                if new and not any(folder.episodes("episodes")):
                    shutil.rmtree(folder.path, ignore_errors=True)  # nothing was played: nothing to go on with
                raise
    finally:
        await taskset.close()
    summary = summarise(kept, config.attempts, config.solved_at)
    summary["seconds"] = round(time.monotonic() - began, 3)
    (folder.path / "summary.json").write_text(json.dumps(summary, indent=1))
    return folder, summary


def _same(folder: RunFolder, config: EvaluateConfig) -> None:
    """Episodes of different kinds do not go into one mean."""
    before = build(EvaluateConfig, read_toml(folder.config))
    for key in ("env", "harness", "generation", "model", "sampling", "split", "episode"):
        if getattr(before, key) != getattr(config, key):
            raise ConfigError(f"{folder.path} was begun with another {key}: begin a new evaluation for this one")


async def _play(
    config: EvaluateConfig,
    runner: EpisodeRunner,
    missing: Sequence[tuple[Task, int]],
    total: int,
    before: int,
    folder: RunFolder,
    tell: Tell,
) -> list[Episode]:
    slots, finished = asyncio.Semaphore(config.concurrency), []

    async def one(task: Task, number: int) -> None:
        async with slots:
            for attempt in range(config.retries + 1):
                job = Job(task=task, group_id=f"eval-{task.id}", index=number, attempt=attempt)
                episode = await runner.run(job)
                folder.write_episode("episodes", episode)
                if not isinstance(episode.outcome, Discarded):
                    break
        finished.append(episode)
        tell(before + len(finished), total, episode)

    running = [asyncio.ensure_future(one(task, number)) for task, number in missing]
    try:
        await asyncio.gather(*running)
    finally:  # Ctrl-C: what is kept goes on with --resume
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return finished


@contextlib.asynccontextmanager
async def playing(
    config: EvaluateConfig, taskset: Taskset, logs: Path, model: tuple[Engine, Rendering] | None = None
) -> AsyncIterator[EpisodeRunner]:
    """Everything that an episode needs, up and running; everything down again at the end."""
    async with contextlib.AsyncExitStack() as stack:
        engine, rendering = model or await _model(config, logs)
        stack.push_async_callback(engine.close)
        await engine.start()
        harness = config.harness
        generate = await generate_for(taskset, config.generation, harness.name, harness.settings, stack)
        pool = SandboxPool(make_backend(config.sandbox), config.sandbox)
        stack.push_async_callback(pool.close)
        tasks = taskset.tasks(config.split)[: config.tasks]
        if getattr(generate, "makes_machines", False) or any(taskset.sandbox(task) is not None for task in tasks):
            await pool.start()
        server = SessionServer(engine, rendering, config.session, max_tokens=config.sampling.max_tokens)
        await stack.enter_async_context(server)
        yield EpisodeRunner(taskset, server, pool, generate, config.episode)


async def _model(config: EvaluateConfig, logs: Path) -> tuple[Engine, Rendering]:
    """An engine and what turns messages into its tokens."""
    if config.model.startswith("scripted:"):
        return scripted_model(read_script(Path(config.model.removeprefix("scripted:"))))
    if config.model.startswith(("http://", "https://")):
        return await _served(config)
    directory = Path(config.model)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model {config.model} is no URL, no scripted:FILE, and no model directory (no config.json)")
    engine = EmbeddedEngine(directory, logs, config.engine, temperature=config.sampling.temperature, seed=config.seed)
    return engine, await asyncio.to_thread(load_rendering, directory, config.session.rendering)


async def _served(config: EvaluateConfig) -> tuple[Engine, Rendering]:
    client = SGLangClient(config.model, temperature=config.sampling.temperature, follow=True, start_s=_ANSWER_S)
    directory = config.tokenizer
    if directory is None:
        try:
            await client.start()
        except BaseException:
            await client.close()
            raise
        directory = Path(client.model_path)
        if not (directory / "config.json").is_file():
            await client.close()
            raise ConfigError(
                f"the tokenizer of {config.model} is not on this machine: name its directory, tokenizer=DIR"
            )
    return client, await asyncio.to_thread(load_rendering, directory, config.session.rendering)


def summarise(episodes: Sequence[Episode], attempts: int, solved_at: float = 1.0) -> Summary:
    """Mean reward with a 95 % interval, pass@k, outcomes, parts, seconds by phase.

    The interval is a bootstrap over tasks (1,000 resamples, fixed seed): attempts at one task are not independent.
    pass@k is the unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374), averaged over
    tasks."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.reward is not None:
            by_task[episode.task_id].append(episode.reward)
    means = [statistics.fmean(rewards) for rewards in by_task.values()]
    low, high = _interval(means)
    passed = {}
    for k in sorted({1, *(2**n for n in range(1, 12) if 2**n <= attempts), attempts}):
        tried = [(len(r), sum(reward < solved_at for reward in r)) for r in by_task.values() if len(r) >= k]
        values = [1 - math.comb(wrong, k) / math.comb(n, k) for n, wrong in tried]
        passed[str(k)] = statistics.fmean(values) if values else None
    parts: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.outcome.parts.items() if isinstance(episode.outcome, Scored) else ():
            parts[name].append(value)
        for name, seconds in episode.timings.items():
            phases[name].append(seconds)
    return {
        "reward": statistics.fmean(means) if means else None,
        "interval": [low, high],
        "pass": passed,
        "tasks": len(by_task),
        "episodes": len(episodes),
        "outcomes": dict(Counter(_outcome(episode) for episode in episodes)),
        "parts": {name: statistics.fmean(values) for name, values in sorted(parts.items())},
        "seconds_by_phase": {name: round(statistics.median(values), 4) for name, values in sorted(phases.items())},
        "turns": statistics.fmean([len(e.tree.turns) for e in episodes]) if episodes else 0,
        "sampled_tokens": sum(episode.tree.sampled_tokens for episode in episodes),
    }


def _outcome(episode: Episode) -> str:
    outcome = episode.outcome
    return outcome.kind if isinstance(outcome, Scored) else f"{outcome.kind}/{outcome.reason}"


def _interval(means: Sequence[float]) -> tuple[float | None, float | None]:
    if len(means) < 2:
        return None, None
    dice = random.Random(0)
    drawn = sorted(statistics.fmean(dice.choices(means, k=len(means))) for _ in range(1000))
    return drawn[25], drawn[974]


async def rescore(folder: RunFolder, config: EvaluateConfig) -> Summary:
    """Score kept episodes again: with the judges as they are now, over the parts that were kept, and where no sandbox
    is needed with the environment's own scoring after its recorded actions. Nothing is sampled."""
    taskset = open_env(config.env.name, config.env.settings, config.env.tasks, {})
    rewards = config.env.rewards or declared_rewards(config.env.name)
    judges = Judges(rewards) if rewards else None
    known = {task.id: task for task in taskset.tasks(config.split)}
    again, seen = [], set()
    try:
        for episode in folder.episodes("episodes"):
            if isinstance(episode.outcome, Discarded) or (episode.task_id, episode.index) in seen:
                continue
            seen.add((episode.task_id, episode.index))
            if episode.task_id not in known:
                raise ConfigError(f"the environment has no task {episode.task_id!r} any more")
            again.append(await _rescored(episode, known[episode.task_id], taskset, judges))
    finally:
        await taskset.close()
    summary = summarise(again, max(config.attempts, 1 + max((e.index for e in again), default=0)), config.solved_at)
    name = time.strftime("rescore-%Y%m%d-%H%M%S.json")
    told = {"rewards": {key: part.model_dump() for key, part in rewards.items()}, **summary}
    (folder.path / name).write_text(json.dumps(told, indent=1))
    return summary


async def _rescored(episode: Episode, task: Task, taskset: Taskset, judges: Judges | None) -> Episode:
    if not isinstance(episode.outcome, Scored):
        return episode
    try:
        return await _scored_again(episode, episode.outcome, task, taskset, judges)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001  the boundary to an environment's and a judge's code
        return replace(episode, outcome=Discarded(reason="score_failed", detail=traceback.format_exc()[-2000:]))


async def _scored_again(
    episode: Episode, outcome: Scored, task: Task, taskset: Taskset, judges: Judges | None
) -> Episode:
    transcript = transcript_of(episode.tree)
    kept = dict(outcome.parts)  # where rewards were judged, "score" is what the environment said
    score = Score(reward=kept.pop("score", outcome.reward), parts=kept)
    if taskset.sandbox(task) is None and taskset.harness != "own" and not taskset.generation:
        env = taskset.env(task, None)
        try:
            observation = await env.reset()
            offered = {tool["function"]["name"] for tool in observation.tools}
            for name, text in _calls(transcript):
                if name in offered:
                    arguments = json.loads(text)
                    act = str(arguments.get("action", "")) if name == "act" else None
                    await env.step(json.dumps({"name": name, "arguments": arguments}) if act is None else act)
            score = await env.score(transcript)
        finally:
            await env.close()
    elif judges is None:
        raise ConfigError("scoring again needs the episode as the agent left it: give env.rewards of the kept parts")
    if judges is not None:
        score = await judges(task, transcript, score)
    return replace(episode, outcome=Scored(reward=score.reward, parts=score.parts))


def transcript_of(tree: Tree) -> Transcript:
    """The main line of a kept tree."""
    main = [turn for turn in tree.turns if tree.line(turn.id) == "main"] or list(tree.turns)
    if not main:
        return Transcript(messages=(), final_text="", turns=0)
    path = tree.path(main[-1].id)
    messages = tuple(message for turn in path for message in (*turn.messages, turn.message))
    return Transcript(messages=messages, final_text=main[-1].message.get("content") or "", turns=len(tree.turns))


def _calls(transcript: Transcript) -> list[tuple[str, str]]:
    found = []
    for message in transcript.messages:
        for call in message.get("tool_calls") or () if message.get("role") == "assistant" else ():
            arguments = call["function"]["arguments"]
            with contextlib.suppress(ValueError):
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                if isinstance(json.loads(text), dict):
                    found.append((call["function"]["name"], text))
    return found
