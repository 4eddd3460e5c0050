"""The driver against a real one-rank trainer; groups and engines are the simplest that keep the contracts."""

import asyncio
from dataclasses import replace

import pytest

from miles.errors import RunError, TrainerError
from miles.runs import RunFolder
from miles.trainer.checkpoints import read_state
from miles.trainer.data.rows import demonstration_row
from miles.trainer.loop import Driver, TrainConfig, WarmStartConfig
from miles.trainer.publish import PublishConfig, Publisher
from miles.trainer.settings import OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import Tree
from tests.trainer.conftest import rows_of
from tests.trees import group, turn


class Source:
    """Hands out endless groups of two episodes, one good, one bad."""

    def __init__(self, limit=10**6, state=None):
        self.taken, self.version, self.limit = (state or {"taken": 0})["taken"], -1, limit

    async def take(self, n):
        if self.taken + n > self.limit:
            await asyncio.Event().wait()
        tree = Tree(turns=(turn(0, None, [1, 2], [3, 4], version=self.version),))
        self.taken += n
        return [group(1.0, 0.0, id=f"g{self.taken - n + i}", tree=tree) for i in range(n)]

    def trained(self):
        self.done = self.taken

    def advance(self, version):
        self.version = version

    def counters(self):
        return {"sampled_tokens": 8.0}

    def state(self):
        return {"taken": self.taken}


class Sink:
    def __init__(self):
        self.versions, self.directories = [], []

    async def load(self, weights):
        self.versions.append(weights.version)
        self.directories.append(weights.directory)
        if weights.directory is not None:
            assert (weights.directory / "model.safetensors").stat().st_size > 0
        return 0.0


class Evaluator:
    def __init__(self):
        self.versions = []

    async def evaluate(self, version):
        self.versions.append(version)
        return {"version": version, "reward": 0.5}


class Silent:
    def __init__(self):
        self.kinds = []

    def event(self, kind, data):
        self.kinds.append(kind)


@pytest.fixture
async def drive(model, tmp_path):
    """A driver around a real trainer; yields a function (source, settings) -> (driver, parts)."""
    folder, evaluator, reporter = RunFolder.create(tmp_path, "demo"), Evaluator(), Silent()
    async with Trainer(model, folder.logs, TrainerConfig(ranks=0)) as trainer:
        publishers = []

        def make(source, sink=None, publish=None, step=0, warmed=0, eval_every=0, **settings):
            sink = sink or Sink()
            publishers.append(Publisher(trainer, sink, publish))
            config = TrainConfig(**{"steps": 3, "optim": OptimConfig(lr=1e-4), **settings})
            driver = Driver(
                trainer,
                source,
                publishers[-1],
                evaluator,
                folder,
                reporter,
                config,
                groups_per_step=2,
                eval_every=eval_every,
                step=step,
                warmed=warmed,
            )
            return driver, sink, evaluator, folder, reporter

        yield make
        for publisher in publishers:
            publisher.close()


async def test_each_step_trains_publishes_and_tells(drive):
    driver, sink, evaluator, folder, reporter = drive(Source())
    await driver.train()
    assert sink.versions == [0, 1, 2, 3]
    assert evaluator.versions == [0, 3]
    steps = folder.metrics("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[1]["groups"] == ["g2", "g3"]
    assert steps[0]["reward/mean"] == 0.5
    assert {"loss", "grad_norm", "staleness/max", "tokens_per_s", "trainer_idle", "wait_s", "logprob_diff/max"} <= set(
        steps[0]
    )
    assert reporter.kinds[:3] == ["evaluating", "eval", "step"]


async def test_a_step_with_nothing_to_train_still_compares_logprobs_and_changes_nothing(drive):
    class Flat(Source):
        async def take(self, n):
            groups = await super().take(n)
            return [group(1.0, 1.0, id=g.id, tree=g.episodes[0].tree) for g in groups]

    driver, _, _, folder, _ = drive(Flat())
    await driver.train()
    for step in folder.metrics("step"):
        assert (step["skipped_empty"], step["groups/without_difference"]) == (1.0, 2.0)
        assert step["logprob_diff/tokens"] == 8
        assert step["logprob_diff/max"] > 1  # the source's logprobs are made up: -0.5


async def test_a_probe_says_what_routing_replay_changes(moe_models, tmp_path):
    """The engine's model made the recorded turns; the trainer's routers have moved since."""
    from tests.trainer.model.test_replay import perturbed, recorded

    ids = rows_of(0, (30,))[0].ids.tolist()
    (row,) = recorded(moe_models["qwen3-moe"], [demonstration_row(ids, [place >= 6 for place in range(30)])])
    sampled = turn(0, None, ids[:6], ids[6:])
    one = replace(sampled, logprobs=tuple(row.logprobs.tolist()), routing=row.routing[0][1])

    class Recorded(Source):
        async def take(self, n):
            await super().take(n)
            return [group(1.0, 0.0, tree=Tree(turns=(one,)))]

    folder = RunFolder.create(tmp_path, "demo")
    async with Trainer(perturbed(moe_models["qwen3-moe"], tmp_path), folder.logs, TrainerConfig(ranks=0)) as trainer:
        publisher = Publisher(trainer, Sink())
        config = TrainConfig(steps=1, routing_probe=2, optim=OptimConfig(lr=1e-9))
        await Driver(trainer, Recorded(), publisher, Evaluator(), folder, Silent(), config, groups_per_step=1).train()
        publisher.close()
    (step,) = folder.metrics("step")
    assert step["routing/flipped"] > 0
    assert step["routing/diff_replay"] < step["routing/diff_own"]
    assert 0 < step["routing/kl_replay"] < step["routing/kl_own"]


async def test_an_engine_that_serves_another_model_is_doubted_once(drive, caplog):
    driver, *_ = drive(Source())  # its logprobs are made up
    await driver.train()
    doubts = [record for record in caplog.records if "serves other weights" in record.message]
    assert len(doubts) == 1


async def test_only_the_newest_snapshot_is_kept(drive):
    driver, sink, *_ = drive(Source())
    await driver.train()
    assert [directory.exists() for directory in sink.directories] == [False, False, False, True]


async def test_weights_by_value_reach_an_engine_in_this_process(drive):
    class Holder(Sink):
        async def load(self, weights):
            self.versions.append(weights.version)
            self.names = set(weights.tensors)
            return 0.0

    driver, sink, *_ = drive(Source(), sink=Holder(), publish=PublishConfig(kind="inprocess"))
    await driver.train()
    assert sink.versions == [0, 1, 2, 3]
    assert "model.embed_tokens.weight" in sink.names


async def test_evaluation_and_checkpoints_come_as_often_as_asked(drive):
    driver, _, evaluator, folder, _ = drive(Source(), steps=5, eval_every=2, save_every=2, keep_checkpoints=1)
    await driver.train()
    await driver.save()
    assert evaluator.versions == [0, 2, 4, 5]
    assert [line["step"] for line in folder.metrics("checkpoint")] == [2, 4, 5]
    (last,) = folder.checkpoints()
    models = {"lora": None, "critic": False}
    assert read_state(last) == {"step": 5, "warm_start": 0, "source": {"taken": 10, "groups": []}, "models": models}
    assert (last / "hf" / "config.json").exists()
    assert (last / "hf" / "tokenizer.json").exists()


async def test_a_resumed_run_takes_the_very_steps_that_an_uninterrupted_one_takes(model, tmp_path):
    """Model, moments, schedule, data cursor and version: losses and norms are equal to the last bit."""

    async def steps(folder, total, resume):
        state = read_state(folder.checkpoints()[-1]) if resume else {"step": 0, "source": None}
        optim = OptimConfig(kind="muon", lr=1e-3, decay_steps=6)
        async with Trainer(model, folder.logs, TrainerConfig(ranks=0)) as trainer:
            if resume:
                await trainer.load(folder.checkpoints()[-1])
            publisher = Publisher(trainer, Sink())
            driver = Driver(
                trainer, Source(state=state["source"]), publisher, Evaluator(), folder, Silent(),
                TrainConfig(steps=total, optim=optim), groups_per_step=2, step=state["step"],
            )  # fmt: skip
            await driver.train()
            await driver.save()
            publisher.close()

    whole, parts = RunFolder.create(tmp_path, "whole"), RunFolder.create(tmp_path, "parts")
    await steps(whole, 5, resume=False)
    for total in (1, 3, 5):
        await steps(parts, total, resume=total > 1)
    facts = ("step", "groups", "loss", "grad_norm", "lr", "logprob_diff/max")
    found = {f: [[line.get(key) for key in facts] for line in f.metrics("step")] for f in (whole, parts)}
    assert found[parts] == found[whole]
    assert [line[0] for line in found[whole]] == [1, 2, 3, 4, 5]


async def test_told_to_stop_it_finishes_the_step_and_no_more(drive):
    driver, sink, evaluator, folder, _ = drive(Source(limit=4), steps=100)
    running = asyncio.create_task(driver.train())
    while len(sink.versions) != 3:  # noqa: ASYNC110  the sink tells nobody
        await asyncio.sleep(0.01)
    driver.stop.set()
    await asyncio.wait_for(running, 5)
    assert driver.step == 2
    assert evaluator.versions == [0]
    await driver.save()
    assert read_state(folder.checkpoints()[-1])["step"] == 2


async def test_the_wish_to_stop_comes_before_groups_that_wait_already(drive):
    driver, sink, *_ = drive(Source(), steps=500)
    running = asyncio.create_task(driver.train())
    while len(sink.versions) < 3:  # noqa: ASYNC110  the sink tells nobody
        await asyncio.sleep(0.005)
    driver.stop.set()
    await asyncio.wait_for(running, 5)
    assert driver.step < 10


async def test_resumed_it_goes_on_to_the_same_last_step(drive):
    driver, sink, evaluator, *_ = drive(Source(state={"taken": 4}), step=2, steps=3)
    await driver.train()
    assert (sink.versions, evaluator.versions, driver.step) == ([2, 3], [3], 3)


async def test_the_warm_start_is_supervised_and_ends_with_its_steps(drive):
    warm = WarmStartConfig(steps=4, batch=2, optim=OptimConfig(lr=1e-2))
    driver, _, _, folder, _ = drive(Source(), warm_start=warm)
    await driver.warm_start(demonstration_row([1, 2, 3], [False, True, True]) for _ in range(100))
    losses = [line["loss"] for line in folder.metrics("warm_start")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


async def test_an_interrupted_warm_start_goes_on_with_the_next_demonstrations(drive):
    warm = WarmStartConfig(steps=3, batch=2)
    driver, _, _, folder, _ = drive(Source(), warm_start=warm)
    driver.stop.set()
    await driver.warm_start(demonstration_row([1, 2, n], [False, True, True]) for n in range(3, 100))
    assert read_state(await driver.save())["warm_start"] == driver.warmed == 1
    seen = []

    def rest():
        for n in range(3, 100):
            seen.append(n)
            yield demonstration_row([1, 2, n], [False, True, True])

    again, *_ = drive(Source(), warm_start=warm, warmed=1)
    await again.warm_start(rest())
    assert again.warmed == 3
    assert [line["step"] for line in folder.metrics("warm_start")] == [1, 2, 3]


async def test_a_warm_start_without_demonstrations_says_what_to_set(drive):
    driver, *_ = drive(Source(), warm_start=WarmStartConfig(steps=1))
    with pytest.raises(TrainerError, match=r"train\.warm_start\.steps=0"):
        await driver.warm_start(iter(()))


async def test_a_full_disk_stops_the_run(drive):
    driver, _, _, folder, _ = drive(Source())
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        await driver.train()


async def test_an_error_of_the_source_is_the_runs(drive):
    class Broken(Source):
        async def take(self, n):
            raise RunError("64 episodes in a row were discarded")

    driver, *_ = drive(Broken())
    with pytest.raises(RunError, match="64 episodes"):
        await driver.train()
