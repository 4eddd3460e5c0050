"""Rows, scales and tiny models of several architectures for the trainer's tests."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.trainer.data.batch import normalize
from miles.trainer.data.rows import Row


def rows_of(seed, lengths=(20, 31, 8, 15, 27, 5, 12, 30), *, shared=0, vocabulary=400):
    """Rows of episodes e0, e1, …; each begins with four tokens that are only context, `shared` of them the same."""
    rng = random.Random(seed)
    stem = [rng.randrange(vocabulary) for _ in range(shared)]
    rows = []
    for number, n in enumerate(lengths):
        owned = [(place >= 4 and rng.random() < 0.8) or place == n - 1 for place in range(n)]
        rows.append(
            Row(
                ids=[*stem, *(rng.randrange(vocabulary) for _ in range(n))],
                owned=[False] * shared + owned,
                logprobs=[-6.0 - rng.random() for own in owned if own],
                versions=[1] * sum(owned),
                episode=f"e{number}",
                group=f"g{number // 4}",
                advantage=rng.choice([-1.0, 0.5, 1.0]),
            )
        )
    return rows


def scaled(rows, unit="episode"):
    owned = {}
    for row in rows:
        owned[row.episode] = owned.get(row.episode, 0) + row.n_owned
    return normalize(rows, owned, unit=unit, constant=50.0)


def plain_logprobs(plain, row, temperature=1.0):
    """(n,) logprobs of a row's owned tokens by a Hugging Face model as it is."""
    ids = torch.from_numpy(row.ids)
    logprobs = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1].float() / temperature, -1)
    return logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.owned[1:])]


def assert_same_scores(scores, expected, key="logprobs", atol=1e-5):
    for one, other in zip(scores, expected, strict=True):
        assert np.allclose(one[key], other[key] if isinstance(other, dict) else other, atol=atol)


def _saved(directory: Path, model) -> Path:
    torch.manual_seed(0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def moe_models(tmp_path_factory):
    """{name: directory} of tiny mixture-of-experts models, randomly initialised."""
    from transformers import (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    root = tmp_path_factory.mktemp("moe")
    common = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    qwen3 = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=8, norm_topk_prob=True, **common))
    glm = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, **common
        )
    )
    linear = {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
    }
    qwen35 = Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(
            num_experts=8, shared_expert_intermediate_size=16, linear_value_head_dim=16, **linear, **common
        )
    )
    models = {"qwen3-moe": qwen3, "glm-4-moe": glm, "qwen3.5-moe": qwen35}
    for model in models.values():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=0.5)  # decided routers, as trained ones are
            elif ".experts." in name:
                torch.nn.init.normal_(parameter, std=0.3)  # experts that differ
    return {name: _saved(root / name, model) for name, model in models.items()}
