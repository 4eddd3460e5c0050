"""A very small chat model made on the spot: Qwen3 architecture, its own tokenizer, no download.

The tokenizer is byte-level with whole-word tokens for the taskset's vocabulary and single tokens for
the fixed text of the chat template, so that a whole tool conversation is about eighty tokens and a
model of 0.1 M parameters can learn it in seconds. Any other text still round-trips, byte by byte.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.rollout.rendering.guard import GuardedTokenizer
from miles.rollout.rendering.rendering import Rendering
from miles.types import Message, ToolSpec

__all__ = ["TinyModelConfig", "make_tiny_model", "tiny_rendering"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NO_THOUGHT = "<think>\n\n</think>\n\n"  # what the template writes before every answer
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", _NO_THOUGHT)


class TinyModelConfig(Config):
    """Architecture of the model that a recipe makes for itself."""

    hidden: int = Field(64, gt=0)
    """Width; heads have 16 dimensions, two query heads share one key head."""
    layers: int = Field(2, gt=0)
    """Decoder layers."""
    context: int = Field(512, gt=0)
    """Longest sequence."""


def make_tiny_model(
    directory: Path,
    config: TinyModelConfig,
    *,
    seed: int,
    words: Sequence[str],
    tools: Sequence[ToolSpec],
    example: Sequence[Message],
) -> None:
    """Write a Hugging Face model directory. The same arguments give the same bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = _tokenizer(words, list(tools), list(example))
    size = -(-len(tokenizer) // 16) * 16
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size,
            hidden_size=config.hidden,
            intermediate_size=3 * config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.hidden // 16,
            num_key_value_heads=max(1, config.hidden // 32),
            head_dim=16,
            max_position_embeddings=config.context,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer(words: Sequence[str], tools: list[ToolSpec], example: list[Message]) -> Any:
    """Bytes, control tokens, words; then the template's own phrases, read off a rendered example."""
    from renderers import Qwen3RendererConfig, create_renderer

    base = _with_tokens([*_MARKS, *words])
    guarded = GuardedTokenizer(base)
    rendering = Rendering(guarded, create_renderer(guarded, Qwen3RendererConfig(enable_thinking=False)), "qwen3")
    ids, _ = rendering.demonstration(example, tools)
    return _with_tokens([*_MARKS, *_phrases(base, ids), *words])


def tiny_rendering() -> Rendering:
    """Qwen3's template over bytes: any text, no model."""
    from renderers import Qwen3RendererConfig, create_renderer

    guarded = GuardedTokenizer(_with_tokens(_MARKS))
    return Rendering(guarded, create_renderer(guarded, Qwen3RendererConfig(enable_thinking=False)), "qwen3")


def _with_tokens(tokens: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    unique = list(dict.fromkeys(tokens))
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in unique])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def _phrases(base: Any, ids: Sequence[int]) -> list[str]:
    """Runs of plain bytes between known tokens: the template's fixed text."""
    known = {*base.get_added_vocab().values()}
    phrases, run = [], []
    for token in [*ids, next(iter(known))]:
        if token not in known:
            run.append(token)
        elif len(run) > 1:
            text = base.decode(run)
            phrases += [text, text.strip("\n")]
            run = []
        else:
            run = []
    return [text for text in dict.fromkeys(phrases) if len(text) > 1]


def describe(directory: Path) -> str:
    """One line about a model directory."""
    config = json.loads((directory / "config.json").read_text())
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    return f"{config.get('model_type')} {layers} layers x {hidden}, vocabulary {config.get('vocab_size')}"
