"""Every way to hold and to compute a model gives the same step: layouts, heads, offloads, checkpointing, precision."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.trainer.settings import BackendConfig, CorrectionConfig, OptimConfig, PolicyLossConfig, ScoreSpec, StepSpec
from miles.trainer.trainer import Trainer, TrainerConfig
from tests.trainer.conftest import plain_logprobs, rows_of, scaled

SPEC = StepSpec(loss="policy", version=1, correction=CorrectionConfig(mode="off"))
OPTIM = OptimConfig(lr=1e-3)


async def step(model, tmp_path, rows, *, spec=SPEC, optim=OPTIM, ranks=0, steps=1, **compute):
    """(metrics of the last step, weights after it)."""
    async with Trainer(model, tmp_path, TrainerConfig(ranks=ranks, compute=BackendConfig(**compute))) as trainer:
        for _ in range(steps):
            metrics = await trainer.step(rows, spec, optim)
        await trainer.export(tmp_path / "out")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    return metrics, weights


def assert_same(one, other, *, atol=1e-5):
    assert one[0]["loss"] == pytest.approx(other[0]["loss"], abs=atol)
    assert one[0]["grad_norm"] == pytest.approx(other[0]["grad_norm"], rel=100 * atol)
    assert one[0]["tokens/trained"] == other[0]["tokens/trained"]
    for name, tensor in one[1].items():
        assert torch.allclose(tensor, other[1][name], atol=20 * atol), name


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
async def test_packed_tries_equal_padded_rows(model, tmp_path, kind):
    rows = scaled(rows_of(0, shared=12))
    spec = SPEC.model_copy(update={"policy": PolicyLossConfig(kind=kind)})
    padded = await step(model, tmp_path, rows, spec=spec, layout="rows")
    packed = await step(model, tmp_path, rows, spec=spec, layout="packed")
    cut = await step(model, tmp_path, rows, spec=spec, layout="packed", micro_tokens=60)
    assert_same(padded, packed)
    assert_same(padded, cut)
    assert packed[0]["micro_batches"] < cut[0]["micro_batches"]
    assert packed[0]["tree_token_ratio"] == pytest.approx((148 + 8 * 12) / (148 + 12), abs=0.02)


async def test_tries_are_chosen_when_they_save_enough(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        assert trainer.info["policy"].packs
        little = await trainer.step(scaled(rows_of(0, (30,) * 8, shared=1)), SPEC, OPTIM)
        much = await trainer.step(scaled(rows_of(0, (30,) * 8, shared=60)), SPEC, OPTIM)
    assert (little["packed"], much["packed"]) == (0.0, 1.0)
    assert little["tree_token_ratio"] < 1.1 < 2.0 < much["tree_token_ratio"]


async def test_a_small_chunk_of_the_head_changes_nothing(model, tmp_path):
    rows = scaled(rows_of(0))
    assert_same(await step(model, tmp_path, rows), await step(model, tmp_path, rows, head_chunk=7))


@pytest.mark.parametrize(
    "settings",
    [{"checkpoint_activations": True}, {"cpu_offload": True}, {"optim": OptimConfig(lr=1e-3, offload=True)}],
    ids=["activations", "cpu", "moments"],
)
async def test_saving_memory_changes_nothing(model, tmp_path, settings):
    rows = scaled(rows_of(0))
    plain = await step(model, tmp_path, rows, steps=2, micro_tokens=64)
    assert_same(plain, await step(model, tmp_path, rows, steps=2, micro_tokens=64, **settings))


async def test_bfloat16_computes_the_same_within_its_precision(model, tmp_path):
    rows = scaled(rows_of(0))
    exact, coarse = await step(model, tmp_path, rows), await step(model, tmp_path, rows, dtype="bfloat16")
    assert coarse[0]["loss"] == pytest.approx(exact[0]["loss"], abs=0.05)
    assert coarse[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.1)
    assert coarse[0]["grad_norm"] != exact[0]["grad_norm"]


@pytest.mark.slow
async def test_replicated_shards_equal_one_process(model, tmp_path):
    rows = scaled(rows_of(0))
    alone = await step(model, tmp_path, rows, steps=2)
    assert_same(alone, await step(model, tmp_path, rows, steps=2, ranks=4, shard=2, micro_tokens=64), atol=2e-5)


@pytest.mark.slow
async def test_two_ranks_on_tries_equal_one_process(model, tmp_path):
    rows = scaled(rows_of(0, shared=12))
    alone = await step(model, tmp_path, rows, steps=2, layout="rows")
    both = await step(model, tmp_path, rows, steps=2, ranks=2, layout="packed", micro_tokens=60)
    assert_same(alone, both, atol=2e-5)


async def test_entropy_and_candidates_are_those_of_the_whole_distribution(model, tmp_path):
    rows = rows_of(0)[:2]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        scores = await trainer.score(rows, ScoreSpec(temperature=2.0, top=3))
        spec = SPEC.model_copy(update={"policy": PolicyLossConfig(entropy=1e-9), "temperature": 2.0})
        metrics = await trainer.step(scaled(rows), spec, OptimConfig(lr=1e-12))
    entropies = []
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(row.ids)[None]).logits[0, :-1] / 2.0
        every = torch.log_softmax(logits, -1)[torch.from_numpy(row.owned[1:])]
        best = every.topk(3, dim=-1)
        assert score["top_ids"].tolist() == best.indices.tolist()
        assert torch.allclose(torch.from_numpy(score["top_logprobs"]), best.values, atol=1e-5)
        assert torch.allclose(torch.from_numpy(score["logprobs"]), plain_logprobs(plain, row, 2.0), atol=1e-5)
        entropies.append(-(every.exp() * every).sum(-1))
    assert metrics["policy/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-4)


async def test_a_model_whose_head_is_more_than_a_matrix_is_computed_whole(tmp_path):
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, logit_scale=0.25, use_cache=False,
    )  # fmt: skip
    plain = CohereForCausalLM(config)
    plain.save_pretrained(tmp_path / "cohere")
    rows = rows_of(0, shared=12)
    async with Trainer(tmp_path / "cohere", tmp_path, TrainerConfig(ranks=0)) as trainer:
        info = trainer.info["policy"]
        scores = await trainer.score(rows)
    assert "all logits are computed" in info.note
    assert info.packs
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(score["logprobs"]), plain_logprobs(plain, row), atol=1e-5)


async def test_models_without_plain_attention_everywhere_are_not_packed(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["full_attention", "sliding_attention"], sliding_window=8,
        use_sliding_window=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "sliding")
    async with Trainer(tmp_path / "sliding", tmp_path, TrainerConfig(ranks=0)) as trainer:
        info = trainer.info["policy"]
        assert (info.packs, info.note) == (False, "it has layers of kind sliding_attention")
        assert (await trainer.step(scaled(rows_of(0, shared=40)), SPEC, OPTIM))["tree_token_ratio"] == 1.0
