"""Models and rows of the trainer's benchmarks: randomly initialised, of any size, without a download."""

import random
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from miles.trainer.data.batch import normalize
from miles.trainer.data.rows import Row
from miles.trainer.settings import CorrectionConfig, StepSpec

SPEC = StepSpec(loss="policy", correction=CorrectionConfig(mode="off"))
"""Every token is trained, however far the made-up logprobs are."""


def qwen3(directory: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    """A Qwen3 of about 12 * layers * hidden^2 parameters and its embeddings."""
    disable_progress_bar()
    torch.manual_seed(0)
    head = 32 if hidden < 1024 else 128
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=max(1, hidden // head // 2),
        head_dim=head,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        use_cache=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def row(ids: list[int], first: int, episode: int) -> Row:
    """A row that owns its tokens from `first` on, sampled by version 0."""
    n = len(ids) - first
    owned = np.arange(len(ids)) >= first
    dice = random.Random(episode)
    return Row(
        ids=np.array(ids),
        owned=owned,
        logprobs=np.full(n, -6.0, dtype=np.float32),
        versions=np.zeros(n, dtype=np.int64),
        episode=f"e{episode}",
        group="g",
        advantage=dice.choice([-1.0, 1.0]),
    )


def scaled(rows: list[Row]) -> list[Row]:
    """With the scales of loss_unit=episode."""
    return normalize(rows, {row.episode: row.n_owned for row in rows}, unit="episode")
