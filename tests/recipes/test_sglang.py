"""Whole runs on SGLang: on emulated servers here, on the real one where it is installed."""

import asyncio

import pytest

from miles.errors import MilesError
from miles.recipes.compose import launch
from miles.recipes.config import load_recipe
from miles.routing import decode_routing
from scripts.small_moe import make_small_moe
from tests.emulators.sglang import emulated

SMALL = [
    "engine.name=sglang",
    "train.warm_start.steps=3",
    "train.steps=3",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_episodes=4",
    "eval.tasks=2",
    "sampling.max_tokens=16",
]


class Quiet:
    def event(self, kind, data):
        pass


async def run(tmp_path, *overrides):
    return await launch(load_recipe("quickstart", [*SMALL, f"run.root={tmp_path}", *overrides]), Quiet())


def urls(*servers):
    return f"engine.sglang.urls={[server.url for server in servers]!r}".replace("'", '"')


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "delta"])
async def test_a_run_on_two_servers_one_of_which_dies(model, tmp_path, kind):
    async with emulated(model) as one, emulated(model) as two:

        async def trouble():
            while len(two.asked) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await two.die()

        dying = asyncio.create_task(trouble())
        settings = [f"publish.kind={kind}", f"model.path={model}", "model.tiny=none", "engine.sglang.probe_s=0.2"]
        # steps enough that its death is noticed before the last one
        folder = await run(tmp_path, urls(one, two), *settings, "engine.sglang.start_s=3", "train.steps=8")
        await dying
    steps = folder.metrics("step")
    assert len(steps) == 8
    assert steps[-1]["engine/servers"] == 1
    assert all(line["logprob_diff/mean"] < 1e-4 for line in steps if "logprob_diff/mean" in line)
    assert sum(line.get("engine/servers_lost", 0) for line in steps) <= 1
    assert all(line.get("outcome/discarded", 0) == 0 for line in steps)


@pytest.mark.slow
async def test_routing_is_recorded_kept_replayed_and_probed(tmp_path):
    directory = make_small_moe(tmp_path / "moe", hidden=64, layers=2, experts=8, top_k=2)
    async with emulated(directory) as server:
        settings = ["model.tiny=none", f"model.path={directory}", "engine.sglang.record_routing=true"]
        folder = await run(tmp_path, urls(server), *settings, "train.routing_probe=8", "publish.dtype=float32")
    steps = folder.metrics("step")
    probed = [line for line in steps if "routing/kl_replay" in line]
    assert probed
    for line in probed:
        assert line["routing/diff_replay"] < 1e-4
        assert abs(line["routing/kl_replay"]) < 1e-6
    turns = [turn for episode in folder.episodes() for turn in episode.tree.turns]
    assert turns
    for turn in turns:
        read = len(turn.prompt_ids) + len(turn.output_ids) - 1 + (turn.parent is not None)
        assert turn.routing.tokens == read
        assert (decode_routing(turn.routing) >= 0).all()


@pytest.mark.slow
async def test_a_run_whose_servers_are_all_gone_stops_with_a_checkpoint(model, tmp_path):
    async with emulated(model) as server:

        async def trouble():
            while len(server.asked) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await server.die()

        dying = asyncio.create_task(trouble())
        settings = [f"model.path={model}", "model.tiny=none", "engine.sglang.restarts=0", "engine.sglang.probe_s=0.1"]
        # told by the next publishing, or by the episodes where they come first
        with pytest.raises(MilesError, match="no SGLang server is left") as ended:
            await run(tmp_path, urls(server), *settings, "rollout.discard_limit=4")
        await dying
    assert any("saved" in note for note in ended.value.__notes__)
