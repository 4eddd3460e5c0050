"""Shared pieces: one asyncio backend, one tiny model, one rendering for the whole test run."""

from pathlib import Path

import pytest

from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised tiny chat model."""
    directory = tmp_path_factory.mktemp("model")
    taskset = VaultTaskset()
    messages, tools = next(taskset.demonstrations(0))
    make_tiny_model(directory, TinyModelConfig(), seed=0, words=taskset.vocabulary(), tools=tools, example=messages)
    return directory


@pytest.fixture(scope="session")
def rendering(model: Path) -> Rendering:
    return load_rendering(model)


@pytest.fixture(scope="session")
def moe_models(tmp_path_factory):
    """{name: directory} of tiny mixture-of-experts models, randomly initialised."""
    import torch
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
    for name, model in models.items():
        for weight, parameter in model.named_parameters():
            if weight.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=0.5)  # decided routers, as trained ones are
            elif ".experts." in weight:
                torch.nn.init.normal_(parameter, std=0.3)  # experts that differ
        model.save_pretrained(root / name)
    return {name: root / name for name in models}
