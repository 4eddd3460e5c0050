"""Routing replay on three mixture-of-experts architectures: recorded choices are used, and what that changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.errors import TrainerError
from miles.models import load_model
from miles.routing import encode_routing
from miles.trainer.model.replay import RoutingReplay
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec
from miles.trainer.trainer import Trainer, TrainerConfig
from tests.trainer.conftest import rows_of, scaled

NAMES = ["qwen3-moe", "glm-4-moe", "qwen3.5-moe"]
EXPERTS = 8


def recorded(directory, rows):
    """Rows with the routing and the logprobs of the model in `directory`, as an engine would record them."""
    model = load_model(directory)
    replay = RoutingReplay(model)
    result = []
    for row in rows:
        replay.recorded = {}
        ids = torch.from_numpy(row.ids)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0].numpy()[row.owned[1:]]
        routing = encode_routing(replay.experts()[:-1])
        result.append(replace(row, routing=((0, routing),), logprobs=logprobs))
    return result


def perturbed(directory, tmp_path):
    """The model with its routers moved a little, so that some choices flip."""
    model = load_model(directory)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "moved")
    return tmp_path / "moved"


@pytest.mark.parametrize("name", NAMES)
async def test_with_the_same_weights_replay_changes_nothing(moe_models, tmp_path, name):
    rows = recorded(moe_models[name], rows_of(0))
    config = TrainerConfig(ranks=0, compute=BackendConfig(checkpoint_activations=True))
    async with Trainer(moe_models[name], tmp_path, config) as trainer:
        metrics = await trainer.step(scaled(rows), StepSpec(loss="policy", version=1), OptimConfig(lr=1e-9))
    assert metrics["routing/flipped"] == 0.0
    assert metrics["logprob_diff/max"] <= 1e-4


@pytest.mark.parametrize("name", NAMES)
async def test_where_choices_flip_replay_brings_the_logprobs_back(moe_models, tmp_path, name):
    rows = recorded(moe_models[name], rows_of(0))
    async with Trainer(perturbed(moe_models[name], tmp_path), tmp_path, TrainerConfig(ranks=0)) as trainer:
        away = {}
        for replay in (True, False):
            scores = await trainer.score(rows, ScoreSpec(replay=replay))
            pairs = zip(scores, rows, strict=True)
            away[replay] = float(np.abs(np.concatenate([s["logprobs"] - r.logprobs for s, r in pairs])).mean())
        metrics = await trainer.step(scaled(rows), StepSpec(loss="policy", version=1), OptimConfig(lr=1e-9))
    assert 0.01 < metrics["routing/flipped"] < 0.9
    assert away[True] < 0.6 * away[False]
    assert metrics["logprob_diff/mean"] == pytest.approx(away[True], abs=1e-4)


async def test_gradients_reach_the_router_through_replayed_choices(moe_models, tmp_path):
    rows = recorded(moe_models["qwen3-moe"], rows_of(0))
    async with Trainer(moe_models["qwen3-moe"], tmp_path, TrainerConfig(ranks=0)) as trainer:
        before = (await trainer.tensors(0)).tensors
        await trainer.step(scaled(rows), StepSpec(loss="policy", version=1), OptimConfig(lr=1e-3))
        after = (await trainer.tensors(1)).tensors
    name = "model.layers.1.mlp.gate.weight"
    assert not torch.equal(before[name], after[name])


async def test_a_trie_replays_what_its_rows_recorded(moe_models, tmp_path):
    rows = recorded(moe_models["qwen3-moe"], rows_of(0, shared=12))
    moved, found = perturbed(moe_models["qwen3-moe"], tmp_path), {}
    for layout in ("rows", "packed"):
        config = TrainerConfig(ranks=0, compute=BackendConfig(layout=layout))
        async with Trainer(moved, tmp_path, config) as trainer:
            found[layout] = np.concatenate([s["logprobs"] for s in await trainer.score(rows)])
    assert np.allclose(found["rows"], found["packed"], atol=1e-4)


async def test_turns_without_recorded_routing_use_the_routers_own(moe_models, tmp_path):
    full = recorded(moe_models["qwen3-moe"], rows_of(0)[:2])
    half = [replace(full[0], routing=()), full[1]]
    async with Trainer(moe_models["qwen3-moe"], tmp_path, TrainerConfig(ranks=0)) as trainer:
        one, other = await trainer.score(full), await trainer.score(half)
    assert np.allclose(one[0]["logprobs"], other[0]["logprobs"], atol=1e-5)


async def test_routing_of_another_model_is_refused(moe_models, tmp_path):
    rows = recorded(moe_models["qwen3-moe"], rows_of(0)[:1])
    wrong = encode_routing(np.zeros((4, 7, 2), dtype=np.int64))
    async with Trainer(moe_models["qwen3-moe"], tmp_path, TrainerConfig(ranks=0)) as trainer:
        with pytest.raises(TrainerError, match="recorded for 7 layers; this model has 3"):
            await trainer.score([replace(rows[0], routing=((0, wrong),))])
