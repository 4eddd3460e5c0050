"""The one place that names concrete classes: from a RunConfig to a run that goes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from miles.envs.base import Taskset
from miles.envs.hub.manage import open_env, tasks_of
from miles.errors import ConfigError, MilesError, SandboxError
from miles.recipes.agents import generate_for, make_harness
from miles.recipes.config import RunConfig
from miles.recipes.gguf import convert, find
from miles.recipes.placement import place, what_is_missing
from miles.recipes.plots import plot_rewards
from miles.recipes.running import Running, begun, ctrl_c, raise_file_limit, rescue, resumed
from miles.recipes.teaching import taught
from miles.recipes.tiny_model import describe, make_tiny_model
from miles.registry import resolve
from miles.rollout.engines.base import Engine
from miles.rollout.engines.embedded import EmbeddedEngine
from miles.rollout.engines.inprocess import InProcessEngine
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.rollout.episode import EpisodeRunner
from miles.rollout.evaluation import SharedEvaluator
from miles.rollout.layers import RolloutSource
from miles.rollout.rendering.families import check_tokenizer, load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.scheduler import AsyncRollout
from miles.rollout.session.server import SessionServer
from miles.runs import RunFolder
from miles.sandboxes.pool import SandboxPool, make_backend
from miles.trainer.checkpoints import read_state
from miles.trainer.data.rows import Row, demonstration_row
from miles.trainer.loop import Driver, TrainConfig
from miles.trainer.publish import Publisher
from miles.trainer.trainer import Trainer
from miles.types import Episode, Reporter
from miles.watchdog import watched_loop

__all__ = ["check_plugins", "launch", "resume"]

log = logging.getLogger(__name__)


async def launch(config: RunConfig, reporter: Reporter) -> RunFolder:
    """A new run, from its folder to its last evaluation. Raises MilesError when it cannot go on."""
    taskset = check_plugins(config)
    _fits_here(config)
    with begun(config) as folder:
        await _go(config, taskset, folder, reporter, checkpoint=None)
    return folder


async def resume(folder: RunFolder, config: RunConfig, reporter: Reporter) -> RunFolder:
    """Go on from the newest checkpoint with the same data cursor."""
    taskset = check_plugins(config)
    _fits_here(config)
    critic = config.train.advantage.estimator == "gae"
    with resumed(folder, config, config.trainer, critic=critic) as checkpoint:
        await _go(config, taskset, folder, reporter, checkpoint=checkpoint)
    return folder


def _fits_here(config: RunConfig) -> None:
    if missing := what_is_missing(config):
        raise ConfigError(f"{config.name} cannot be launched here: {missing}")


def check_plugins(config: RunConfig) -> Taskset:
    """Find every plug-in and check its settings before anything is started or written."""
    for kind, name in (
        ("engines", config.engine.name),
        ("sandboxes", config.sandbox.backend),
        ("rollouts", config.rollout.name),
        ("trainers", config.trainer.backend),
        ("advantages", config.train.advantage.estimator),
        ("losses", config.train.policy.kind),
    ):
        resolve(kind, name)
    _check_models(config)
    place(config)
    if config.train.advantage.turn_credit is not None:
        resolve("advantages", config.train.advantage.turn_credit)
    if config.engine.name == "scripted":
        raise ConfigError("the scripted engine plays given replies: name an instance of it as module:attr")
    if config.generation is not None:
        generate = resolve("harnesses", config.generation)
        if isinstance(generate, type) or not callable(generate):
            raise ConfigError(f"generation={config.generation} must name an `async def generate(context)`")
    elif config.harness.name:
        make_harness(config.harness.name, config.harness.settings)
    taskset = open_env(config.env.name, config.env.settings, config.env.tasks, config.env.rewards or None)
    for split in ("train", config.eval.split):
        if not tasks_of(taskset, split):
            raise ConfigError(f"env {config.env.name!r} has no tasks in split {split!r}")
    return taskset


def _check_models(config: RunConfig) -> None:
    for key, path in _model_keys(config).items():
        if path is not None and not (path / "config.json").is_file():
            small = ", or try the recipe's small version: --smoke" if config.smoke else ""
            raise ConfigError(f"{key}={path} is not a model directory (no config.json): name yours, {key}=DIR{small}")
    if config.model.path is not None:
        check_tokenizer(config.model.path)
    elif config.model.gguf is not None:
        find(config.model.gguf)


def _model_keys(config: RunConfig) -> dict[str, Path | None]:
    """Every setting that names a model directory."""
    train = config.train
    teachers = {f"train.distill.teachers.{name}.path": t.path for name, t in train.distill.teachers.items()}
    others = {"train.kl.reference": train.kl.reference, "train.critic.path": train.critic.path}
    return {"model.path": config.model.path, **others, **teachers}


async def _go(
    config: RunConfig, taskset: Taskset, folder: RunFolder, reporter: Reporter, *, checkpoint: Path | None
) -> None:
    state = read_state(checkpoint) if checkpoint else None
    if config.model.tiny is not None or config.train.warm_start.steps:
        taskset = await taught(taskset, config.run.seed)
    began, running = time.monotonic(), Running()
    raise_file_limit()
    with ctrl_c(running, reporter):
        async with _parts(config, taskset, folder, state, reporter) as parts:
            running.driver = driver = parts.driver
            if checkpoint is not None:
                await parts.trainer.load(checkpoint)
            try:
                if driver.step == 0 and driver.warmed < config.train.warm_start.steps:
                    await driver.warm_start(_demonstrations(config, taskset, parts.rendering))
                    await _begin_others_there(config, parts.trainer, folder)
                await driver.train()
            except Exception as error:  # whatever ended the run, a checkpoint is worth having
                await rescue(driver, folder, error)
                raise
            await driver.save()
    plot_rewards(folder)
    folder.log("end", {"step": driver.step, "stopped": driver.stop.is_set(), "seconds": time.monotonic() - began})
    reporter.event("end", {"folder": str(folder.path), "stopped": driver.stop.is_set(), "step": driver.step})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    driver: Driver
    trainer: Trainer
    rendering: Rendering


@contextlib.asynccontextmanager
async def _parts(
    config: RunConfig, taskset: Taskset, folder: RunFolder, state: dict[str, Any] | None, reporter: Reporter
) -> AsyncIterator[_Parts]:
    """Everything of a run, up and running; everything down again at the end, whatever happened."""
    step = int(state["step"]) if state else 0
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(watched_loop())
        stack.push_async_callback(taskset.close)
        model = await asyncio.to_thread(_model, config, taskset, folder)
        engine = _engine(config, model, folder)
        stack.push_async_callback(engine.close)
        warmed = folder.path / _WARMED
        others = _others(config, warmed if warmed.is_dir() else model)
        trainer = Trainer(model, folder.logs, config.trainer, seed=config.run.seed, others=others)
        pool = SandboxPool(make_backend(config.sandbox), config.sandbox)
        stack.push_async_callback(pool.close)
        capabilities = await pool.start()
        _check_sandboxes(taskset, pool)
        engine_up = asyncio.ensure_future(engine.start())
        stack.callback(engine_up.cancel)
        await stack.enter_async_context(trainer)
        rendering = await asyncio.to_thread(load_rendering, model, config.session.rendering)
        await engine_up
        server = await stack.enter_async_context(
            SessionServer(engine, rendering, config.session, max_tokens=config.sampling.max_tokens)
        )
        harness = config.harness
        generate = await generate_for(taskset, config.generation, harness.name, harness.settings, stack)
        runner = EpisodeRunner(taskset, server, pool, generate, config.episode)
        record = _recorder(folder, engine)
        rollout = _rollout(config, taskset, runner, folder, state, record)
        stack.push_async_callback(rollout.close)
        held_out = taskset.tasks(config.eval.split)
        evaluator = SharedEvaluator(held_out, runner, rollout.paused, config.eval, on_episode=record)
        publisher = Publisher(trainer, engine, config.publish)
        stack.callback(publisher.close)
        joining = asyncio.create_task(_publish_when_wanted(engine, publisher))
        stack.callback(joining.cancel)
        driver = Driver(
            trainer,
            rollout,
            publisher,
            evaluator,
            folder,
            reporter,
            config.train,
            groups_per_step=config.rollout.groups_per_step,
            temperature=config.sampling.temperature,
            eval_every=config.eval.every,
            step=step,
            warmed=int(state["warm_start"]) if state else 0,
        )
        reporter.event(
            "composed",
            {
                "recipe": config.name,
                "env": f"{taskset.name} ({len(taskset.tasks('train'))} tasks)",
                "harness": config.generation or config.harness.name or taskset.harness,
                "sandbox": f"{config.sandbox.backend} ({capabilities.isolation}, limits {capabilities.limits})",
                "engine": getattr(engine, "description", config.engine.name),
                "trainer": _describe_trainer(config, trainer),
                "algorithm": _describe_algorithm(config.train),
                "model": describe(model),
                "session server": server.url,
                "folder": str(folder.path),
                "from step": step,
            },
        )
        ticking = asyncio.create_task(_tick(rollout, reporter))
        stack.callback(ticking.cancel)
        yield _Parts(driver=driver, trainer=trainer, rendering=rendering)


def _describe_trainer(config: RunConfig, trainer: Trainer) -> str:
    info, compute = trainer.info["policy"], config.trainer.compute
    share = f"{info.trainable / 1e6:.3g} of {info.parameters / 1e6:.3g} M parameters trained, {compute.dtype}"
    tries = "shared prefixes are computed once" if info.packs else f"padded rows ({info.note})"
    return f"{config.trainer.backend}, ranks {config.trainer.ranks}, {share}; {tries}"


def _describe_algorithm(train: TrainConfig) -> str:
    c = train.correction
    limits = {
        "mask": f"weights outside of [{c.low:g}, {c.high:g}] left out",
        "truncate": f"weights cut at {c.high:g}",
        "off": "no limit on weights",
    }
    reject = f", {c.reject_level}s with {c.reject} above {c.reject_above:g} rejected" if c.reject != "off" else ""
    anchor = "the engine's logprobs" if c.anchor == "behaviour" else "recomputed logprobs"
    more = [f"{train.minibatches} steps a batch"] if train.minibatches > 1 else []
    if train.kl.coefficient:
        more.append(
            f"KL {train.kl.coefficient:g} in the {train.kl.place} to {train.kl.reference or 'the first weights'}"
        )
    if train.distill.coefficient:
        more.append(f"distilled on {train.distill.on} from {', '.join(train.distill.teachers)}")
    if train.policy.entropy:
        more.append(f"entropy {train.policy.entropy:g}")
    return (
        f"{train.advantage.estimator} advantages, {train.policy.kind} loss per {train.loss_unit}"
        f"{''.join(', ' + part for part in more)}; off-policy: ratio to {anchor}, {c.level} {limits[c.mode]}{reject}"
    )


def _others(config: RunConfig, model: Path) -> dict[str, Path]:
    """The models that the algorithm needs beside the policy, by role."""
    train = config.train
    others: dict[str, Path] = {}
    if train.kl.coefficient and (train.kl.reference or config.trainer.compute.lora is None):
        others["reference"] = train.kl.reference or model
    if train.distill.coefficient:
        others |= {f"teacher:{name}": t.path for name, t in train.distill.teachers.items() if t.path}
    if train.advantage.estimator == "gae":
        others["critic"] = train.critic.path or model
    return others


async def _begin_others_there(config: RunConfig, trainer: Trainer, folder: RunFolder) -> None:
    """After a warm start, the reference and the critic are what it made of the policy; resumed runs find it there."""
    followers = [role for role, path in _others(config, folder.path / _WARMED).items() if path.name == _WARMED]
    if followers:
        await trainer.export(folder.path / _WARMED)
    for role in followers:
        await trainer.replace(role, folder.path / _WARMED)


_WARMED = "warmed"


def _rollout(
    config: RunConfig,
    taskset: Taskset,
    runner: EpisodeRunner,
    folder: RunFolder,
    state: dict[str, Any] | None,
    record: Callable[[Episode], None],
) -> AsyncRollout | RolloutSource:
    """Where groups come from: our scheduler over the taskset, or the recipe's own rollout layer."""
    tasks, source = taskset.tasks("train"), state["source"] if state else None
    if config.rollout.name != "async":
        plugin = resolve("rollouts", config.rollout.name)
        return RolloutSource(plugin(runner, tasks), state=source, on_episode=record)
    return AsyncRollout(
        tasks,
        runner,
        config.rollout,
        seed=config.run.seed,
        version=int(state["step"]) if state else 0,
        state=source,
        life=len(folder.metrics("resume")),
        on_episode=record,
    )


async def _tick(rollout: AsyncRollout | RolloutSource, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(1.0)
        reporter.event("tick", rollout.now())


async def _publish_when_wanted(engine: Engine, publisher: Publisher) -> None:
    """An engine whose servers were all replaced between two broadcasts waits for another one."""
    wants: asyncio.Event | None = getattr(engine, "wants_weights", None)
    while wants is not None:
        await wants.wait()
        try:
            await publisher.again()
        except MilesError as error:  # the next step's publishing meets it too, and is where it belongs
            log.warning("weights could not be published again: %s", error)
            await asyncio.sleep(5.0)


def _check_sandboxes(taskset: Taskset, pool: SandboxPool) -> None:
    """Whether the backend can make what the tasks need, before the first of them fails of it."""
    for task in taskset.tasks("train")[:1000]:
        spec = taskset.sandbox(task)
        if spec is not None:
            try:
                pool.settled(spec)
            except SandboxError as error:
                raise ConfigError(f"task {task.id!r}: {error}") from error


def _engine(config: RunConfig, model: Path, folder: RunFolder) -> Engine:
    plugin = resolve("engines", config.engine.name)
    if plugin is EmbeddedEngine:
        return EmbeddedEngine(
            model,
            folder.logs,
            config.engine.embedded,
            temperature=config.sampling.temperature,
            seed=config.run.seed,
        )
    if plugin is SGLangEngine:
        lora = config.trainer.compute.lora
        return SGLangEngine(
            model,
            folder.logs,
            config.engine.sglang,
            temperature=config.sampling.temperature,
            seed=config.run.seed,
            lora=(lora.rank, lora.targets) if lora else None,
            dtype=config.publish.dtype,
        )
    if plugin is InProcessEngine:
        return InProcessEngine(
            model, config.engine.embedded, temperature=config.sampling.temperature, seed=config.run.seed
        )
    if not isinstance(plugin, type):
        return plugin  # type: ignore[no-any-return]  # an instance, by module:attr
    engine: Engine = plugin(model, temperature=config.sampling.temperature, seed=config.run.seed)
    return engine


def _model(config: RunConfig, taskset: Taskset, folder: RunFolder) -> Path:
    """The directory of the first weights; a tiny model is made in the run folder."""
    if config.model.path is not None:
        return config.model.path
    directory = folder.path / "model"
    if directory.is_dir():
        return directory
    if config.model.gguf is not None:
        convert(find(config.model.gguf), directory)
        return directory
    if config.model.tiny is None:
        return directory
    examples = list(islice(taskset.demonstrations(0), 64))
    if not examples and not config.train.warm_start.steps:
        examples = [(({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}), ())]
    if not examples:
        raise ConfigError(f"model.tiny needs demonstrations, and env {taskset.name!r} has none: set model.path")
    messages, tools = max(examples, key=lambda example: len(example[0]))
    words = taskset.vocabulary()
    make_tiny_model(directory, config.model.tiny, seed=config.run.seed, words=words, tools=tools, example=messages)
    return directory


def _demonstrations(config: RunConfig, taskset: Taskset, rendering: Rendering) -> Iterator[Row]:
    for messages, tools in taskset.demonstrations(config.run.seed):
        yield demonstration_row(*rendering.demonstration(list(messages), list(tools)))


def _recorder(folder: RunFolder, engine: Engine) -> Callable[[Episode], None]:
    def record(episode: Episode) -> None:
        folder.write_episode(f"{episode.split}-v{engine.version:06d}", episode)

    return record
