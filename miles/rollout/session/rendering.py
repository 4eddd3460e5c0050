"""Messages to tokens and back, by the `renderers` library, with a self-test before anything is served."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config import Config
from miles.errors import ConfigError, SessionError
from miles.types import Message, ToolSpec

__all__ = ["ParsedMessage", "Rendering", "RenderingConfig", "check_tokenizer", "load_rendering"]

_FAMILY_OF_MODEL_TYPE = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}


class RenderingConfig(Config):
    """How conversations become tokens."""

    family: str = "auto"
    """Name of a `renderers` family, or `auto`: by the model_type in config.json."""
    thinking: bool = False
    """Whether the model may think before it answers."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A completion taken apart: text, reasoning, and (name, arguments as JSON text) of each valid call."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


class Rendering:
    """One tokenizer and its renderer. Thread-safe: tokenizers are not, so a lock guards them."""

    def __init__(self, tokenizer: Any, renderer: Any) -> None:
        self.tokenizer, self.renderer = tokenizer, renderer
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self._lock = threading.Lock()
        self._opening_ids: list[int] | None = None

    def full(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Ids of the whole conversation up to where the assistant begins to write."""
        with self._lock:
            ids: list[int] = self.renderer.render_ids(
                [_for_template(m, i) for i, m in enumerate(messages)],
                tools=tools or None,
                add_generation_prompt=True,
            )
            return ids

    def demonstration(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[list[int], list[bool]]:
        """Ids of a finished conversation and which of them the policy would have sampled."""
        with self._lock:
            rendered = self.renderer.render([_for_template(m, i) for i, m in enumerate(messages)], tools=tools or None)
        if not rendered.sampled_mask:
            raise ConfigError("this model family cannot tell sampled tokens from template text; SFT needs a known one")
        ids, sampled = list(rendered.token_ids), list(rendered.sampled_mask)
        opening = self._opening()
        for start in range(len(ids) - len(opening)):  # what the prompt gives is not sampled, as empty think blocks
            if ids[start] == opening[0] and ids[start : start + len(opening)] == opening:
                sampled[start : start + len(opening)] = [False] * len(opening)
        end = len(sampled) - sampled[::-1].index(True) if True in sampled else 0
        return ids[:end], sampled[:end]

    def _opening(self) -> list[int]:
        """Ids with which the template opens the assistant's turn."""
        if self._opening_ids is None:
            user: list[Message] = [{"role": "user", "content": "x"}]
            with self._lock:
                closed = self.renderer.render_ids(user)
                opened = self.renderer.render_ids(user, add_generation_prompt=True)
            self._opening_ids = opened[len(closed) :]
        return self._opening_ids

    def bridge(
        self, prompt_ids: list[int], output_ids: list[int], new: list[Message], tools: list[ToolSpec]
    ) -> list[int] | None:
        """Tokens to append after a sampled turn for `new` messages; None where only a full render is right."""
        with self._lock:
            bridged = self.renderer.bridge_to_next_turn(
                prompt_ids, output_ids, [_for_template(m, i) for i, m in enumerate(new)], tools=tools or None
            )
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        kept = len(prompt_ids) + len(output_ids)
        if ids[: len(prompt_ids)] != prompt_ids or ids[len(prompt_ids) : kept] != output_ids:
            return None
        return ids[kept:]

    def parse(
        self, output_ids: list[int], tools: list[ToolSpec], prompt_ids: list[int], *, partial: bool = False
    ) -> ParsedMessage:
        """Take a completion apart. A call that is not valid JSON stays in the text, as the model wrote it.

        With `partial` (more tokens will come) unfinished calls are left out.
        """
        with self._lock:
            parsed = self.renderer.parse_response(output_ids, tools=tools or None, prompt_ids=prompt_ids)
        content, calls = parsed.content or "", []
        for call in parsed.tool_calls:
            if call.status.value == "ok" and call.name:
                arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
                calls.append((call.name, arguments))
            elif not partial:
                content += f"<tool_call>{call.raw}</tool_call>"
        return ParsedMessage(content, parsed.reasoning_content or "", tuple(calls))

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, control tokens included: for scripts and tests, never for a user's words."""
        with self._lock:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
            return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens included."""
        with self._lock:
            text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
            return text

    def self_test(self) -> None:
        """Render, parse and bridge one tool conversation; ConfigError when any of it is not exact."""
        tools: list[ToolSpec] = [_PROBE_TOOL]
        call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": '{"x": "1"}'}}
        user, assistant = (
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        )
        prompt = self.full([user], tools)
        ids, sampled = self.demonstration([user, assistant], tools)
        answer = [token for token, own in zip(ids, sampled, strict=True) if own]
        parsed = self.parse(answer, tools, prompt)
        if [(name, json.loads(args)) for name, args in parsed.calls] != [("probe", {"x": "1"})]:
            raise ConfigError(
                f"this tokenizer does not survive its own tool call: parsed {parsed}; set session.rendering.family"
            )
        tail = self.bridge(prompt, answer, [{"role": "tool", "tool_call_id": "call_0", "content": "ok"}], tools)
        if tail is None or not tail or answer[-1] not in self.stop_ids:
            raise ConfigError("this model family cannot extend a sampled turn exactly; set session.rendering.family")


_PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Self-test.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


def check_tokenizer(model: Path) -> None:
    """ConfigError when a model directory has no tokenizer files."""
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(
            f"{model} has no tokenizer (tokenizer.json or tokenizer.model): copy the tokenizer files of the model there"
        )


def load_rendering(model: Path, config: RenderingConfig | None = None) -> Rendering:
    """Load the tokenizer of a model directory and its renderer; refuses a family that fails the self-test."""
    import renderers
    from transformers import AutoTokenizer

    config = config or RenderingConfig()
    check_tokenizer(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    family = _detect(model) if config.family == "auto" else config.family
    try:
        settings = renderers.config_from_name(family)
        if "enable_thinking" in type(settings).model_fields:
            settings = type(settings)(enable_thinking=config.thinking)
        rendering = Rendering(tokenizer, renderers.create_renderer(tokenizer, settings))
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"cannot render for {model} as family {family!r}: {error}; set session.rendering.family"
        ) from error
    rendering.self_test()
    return rendering


def _detect(model: Path) -> str:
    path = model / "config.json"
    model_type = json.loads(path.read_text()).get("model_type", "") if path.is_file() else ""
    family = _FAMILY_OF_MODEL_TYPE.get(model_type)
    if family is None:
        raise ConfigError(
            f"cannot tell the chat family of {model} (model_type {model_type!r}); "
            "name one: session.rendering.family=qwen3"
        )
    return family


def _for_template(message: Message, index: int) -> Message:
    """The message as renderers want it: arguments as an object, no None content (S07)."""
    clean = dict(message)
    if clean.get("content") is None:
        clean["content"] = ""
    if clean.get("tool_calls"):
        clean["tool_calls"] = [_call_for_template(call, index) for call in clean["tool_calls"]]
    else:
        clean.pop("tool_calls", None)
    return clean


def _call_for_template(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or "{}"
    try:
        function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        raise SessionError(f"messages[{index}].tool_calls: arguments are not valid JSON: {error}") from error
    if not isinstance(function["arguments"], dict):
        raise SessionError(f"messages[{index}].tool_calls: arguments must be a JSON object")
    return {**call, "function": function}
