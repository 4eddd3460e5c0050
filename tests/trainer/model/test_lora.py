"""Adapters: only they train, peft and the engine read what is published, the weights below are the reference."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles.errors import ConfigError
from miles.rollout.engines.inprocess import InProcessEngine
from miles.trainer.settings import BackendConfig, LoraConfig, OptimConfig, ScoreSpec, StepSpec
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import GenerateRequest
from tests.trainer.conftest import assert_same_scores, plain_logprobs, rows_of, scaled

LORA = LoraConfig(rank=4, alpha=8.0)
SPEC = StepSpec(loss="policy", version=1)
OPTIM = OptimConfig(lr=1e-2)


def trainer_of(model, tmp_path, *, ranks=0, lora=LORA):
    return Trainer(model, tmp_path, TrainerConfig(ranks=ranks, compute=BackendConfig(lora=lora)))


async def trained(model, tmp_path, *, ranks=0, steps=3):
    """(metrics of the steps, adapter directory, merged directory, scores afterwards)."""
    async with trainer_of(model, tmp_path, ranks=ranks) as trainer:
        metrics = [await trainer.step(scaled(rows_of(seed)), SPEC, OPTIM) for seed in range(steps)]
        adapter = await trainer.weights(3, tmp_path / f"adapter{ranks}")
        merged = await trainer.export(tmp_path / f"merged{ranks}")
        return metrics, adapter, merged, await trainer.score(rows_of(9))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # asked by peft
async def test_only_the_adapter_trains_and_peft_reads_what_is_published(model, tmp_path):
    _, adapter, merged, scores = await trained(model, tmp_path)
    assert adapter.adapter == "policy"
    assert {path.name for path in adapter.directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((adapter.directory / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = [plain_logprobs(base, row).numpy() for row in rows_of(9)]
        by_peft = PeftModel.from_pretrained(base, adapter.directory)
        after = [plain_logprobs(by_peft, row).numpy() for row in rows_of(9)]
        plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        by_merge = [plain_logprobs(plain, row).numpy() for row in rows_of(9)]
    assert np.abs(np.concatenate(before) - np.concatenate(after)).max() > 0.01
    assert_same_scores(scores, after)
    assert_same_scores(scores, by_merge)


@pytest.mark.slow
async def test_two_ranks_train_the_same_adapter(model, tmp_path):
    alone, both = await trained(model, tmp_path), await trained(model, tmp_path, ranks=2)
    for one, other in zip(alone[0], both[0], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    left, right = (load_file(run[1].directory / "adapter_model.safetensors") for run in (alone, both))
    for name, tensor in left.items():
        assert name.startswith("base_model.model.model.layers.")
        assert torch.allclose(tensor, right[name], atol=1e-3), name


async def test_the_weights_below_are_the_reference(model, tmp_path):
    async with trainer_of(model, tmp_path) as trainer:
        before = await trainer.score(rows_of(9))
        await trainer.step(scaled(rows_of(0)), SPEC, OPTIM)
        after = await trainer.score(rows_of(9))
        reference = await trainer.score(rows_of(9), ScoreSpec(), role="reference")
        info = trainer.info["policy"]
    assert_same_scores(reference, before, atol=1e-6)
    assert not np.allclose(after[0]["logprobs"], before[0]["logprobs"], atol=1e-4)
    assert 0 < info.trainable < 0.2 * info.parameters


async def test_a_resumed_adapter_goes_on_bit_by_bit(model, tmp_path):
    async with trainer_of(model, tmp_path) as trainer:
        await trainer.step(scaled(rows_of(0)), SPEC, OPTIM)
        await trainer.save(tmp_path / "saved")
        expected = await trainer.step(scaled(rows_of(1)), SPEC, OPTIM)
        await trainer.saved(wait=True)
    assert (tmp_path / "saved" / "adapter" / "adapter_config.json").exists()
    assert (tmp_path / "saved" / "hf" / "model.safetensors").exists()
    async with trainer_of(model, tmp_path) as trainer:
        await trainer.load(tmp_path / "saved")
        assert await trainer.step(scaled(rows_of(1)), SPEC, OPTIM) == expected


async def test_the_embedded_engine_samples_with_the_adapter_that_was_published(model, tmp_path):
    engine = InProcessEngine(model, seed=0)
    await engine.start()
    try:
        async with trainer_of(model, tmp_path) as trainer:
            for version in (1, 2):  # the second one must not be added to the first
                await trainer.step(scaled(rows_of(version)), SPEC, OPTIM)
                await engine.load(await trainer.weights(version, tmp_path / f"v{version}"))
            merged = await trainer.export(tmp_path / "merged")
        request = GenerateRequest(id="r", session="s", prompt_ids=[1, 2, 3], max_tokens=20)
        found = await engine.generate(request)
    finally:
        await engine.close()
    assert set(found.versions) == {2}
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, *found.output_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, 2:-1], -1)
    expected = logprobs.gather(-1, ids[0, 3:, None])[:, 0].tolist()
    assert list(found.logprobs) == pytest.approx(expected, abs=1e-4)


async def test_an_exported_model_has_the_buffers_of_its_base(moe_models, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(moe_models["glm-4-moe"], dtype=torch.float32)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    base.get_buffer(name).copy_(torch.arange(8.0))
    base.save_pretrained(tmp_path / "base")
    for lora in (LoraConfig(targets=("q_proj",)), None):
        async with trainer_of(tmp_path / "base", tmp_path, lora=lora) as trainer:
            exported = await trainer.export(tmp_path / "out")
        assert load_file(exported / "model.safetensors")[name].tolist() == list(range(8))


async def test_targets_that_the_model_does_not_have_are_told(model, tmp_path):
    with pytest.raises(ConfigError, match=r"lora\.targets do not fit this model"):
        async with trainer_of(model, tmp_path, lora=LoraConfig(targets=("no_such_proj",))):
            pass
