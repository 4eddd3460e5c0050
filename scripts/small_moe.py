"""A small mixture of experts with the quickstart's tokenizer, for validation runs."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model


def make_small_moe(directory: Path, *, hidden: int = 256, layers: int = 4, experts: int = 16, top_k: int = 4) -> Path:
    """A randomly initialised Qwen3-MoE of about 15 M parameters that knows the vault's words."""
    taskset = VaultTaskset()
    messages, tools = next(taskset.demonstrations(0))
    words = taskset.vocabulary()
    make_tiny_model(directory, TinyModelConfig(), seed=0, words=words, tools=tools, example=messages)
    import json

    tiny = json.loads((directory / "config.json").read_text())
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=tiny["vocab_size"],
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            moe_intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
            max_position_embeddings=4096,
            tie_word_embeddings=False,  # SGLang gives this architecture a head of its own
            bos_token_id=None,
            eos_token_id=tiny["eos_token_id"],
            pad_token_id=tiny["pad_token_id"],
        )
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
