"""Which renderer speaks for a model: by name, or the one that renders as the model's own template does."""

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.errors import ConfigError, SessionError
from miles.rollout.rendering.guard import GuardedTokenizer
from miles.rollout.rendering.rendering import Rendering, RenderingConfig
from miles.rollout.rendering.template import TemplateRenderer
from miles.rollout.rendering.text import settled
from miles.types import Message, ToolSpec

__all__ = ["check_tokenizer", "families", "load_rendering", "rendering_of", "self_test"]

log = logging.getLogger(__name__)

_FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "llama": "llama-3",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "gemma4": "gemma4",
}
_PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Self-test.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_CALL = {"id": "functions.probe:0", "type": "function", "function": {"name": "probe", "arguments": {"x": "1"}}}
_PLAIN: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
_TOOLED: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "functions.probe:0", "content": "d"},
]


def families() -> list[str]:
    """Names of all families: those of `renderers`, and `template`."""
    from renderers import base

    base._populate_registry()
    return sorted({*base.RENDERER_REGISTRY, "template"} - {"default"})


def check_tokenizer(model: Path) -> None:
    """ConfigError when a model directory has no tokenizer files."""
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(
            f"{model} has no tokenizer (tokenizer.json or tokenizer.model): copy the tokenizer files of the model there"
        )


def load_rendering(model: Path, config: RenderingConfig | None = None) -> Rendering:
    """Load the tokenizer of a model directory and its renderer; refuses a family that fails the self-test."""
    from transformers import AutoTokenizer

    config = config or RenderingConfig()
    check_tokenizer(model)
    path = model / "config.json"
    model_type = str(json.loads(path.read_text()).get("model_type", "")) if path.is_file() else ""
    try:
        return rendering_of(AutoTokenizer.from_pretrained(model), config, model_type)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error


def rendering_of(tokenizer: Any, config: RenderingConfig | None = None, model_type: str = "") -> Rendering:
    """The rendering of a loaded tokenizer. ConfigError says what to set when no family fits."""
    config = config or RenderingConfig()
    guarded = GuardedTokenizer(tokenizer)
    if config.family != "auto":
        if config.family not in families():
            raise ConfigError(f"unknown family {config.family!r}; known: {', '.join(families())}")
        rendering = _make(guarded, config, config.family)
        self_test(rendering)
        return rendering
    for family in _candidates(guarded, config, model_type):
        try:
            rendering = _make(guarded, config, family)
            self_test(rendering)
        except ConfigError as error:
            log.debug("family %s: %s", family, error)
            continue
        if not rendering.extends:
            log.warning("family %s cannot extend a sampled turn: every turn is rendered anew, as a branch", family)
        return rendering
    raise ConfigError(
        f"cannot tell the chat family (model_type {model_type!r}); name one: session.rendering.family=… "
        f"Known: {', '.join(families())}"
    )


def _candidates(tokenizer: GuardedTokenizer, config: RenderingConfig, model_type: str) -> Iterator[str]:
    """Families in the order to try: those that render as the chat template does, the named one first."""
    named = _FAMILY_OF_MODEL_TYPE.get(model_type)
    order = sorted(families(), key=lambda name: (name != named, name))
    if not tokenizer.chat_template:
        yield from [named] if named else []
        return
    # Compared while thinking: without it some families keep on purpose what their template drops from history.
    own, config = TemplateRenderer(tokenizer, thinking=True), config.model_copy(update={"thinking": True})
    plain = []
    for family in order:
        if family == "template":
            continue
        try:
            renderer = _make(tokenizer, config, family).renderer
        except ConfigError:
            continue
        agrees = [_agrees(renderer, own, messages, tools) for messages, tools in ((_PLAIN, None), (_TOOLED, True))]
        if all(agrees):
            yield family
        elif agrees[0] or (family == named and agrees[1]):
            plain.append(family)
    yield from plain if named in plain else []
    yield "template"


def _agrees(renderer: Any, own: TemplateRenderer, messages: list[Message], tools: bool | None) -> bool:
    offered = [_PROBE_TOOL] if tools else None
    try:
        theirs = own.render_ids(messages, tools=offered, add_generation_prompt=True)
        return bool(renderer.render_ids(messages, tools=offered, add_generation_prompt=True) == theirs)
    except SessionError:
        return False


def _make(tokenizer: GuardedTokenizer, config: RenderingConfig, family: str) -> Rendering:
    import renderers

    if family == "template":
        return Rendering(tokenizer, TemplateRenderer(tokenizer, thinking=config.thinking), family)
    if family == "gpt-oss":
        tokenizer = GuardedTokenizer(tokenizer.inner, escapes=False)  # its library takes no control from texts
        _give_harmony_its_vocabulary(tokenizer)
    try:
        settings: Any = renderers.config_from_name(family)
        fields = type(settings).model_fields
        chosen: dict[str, Any] = {}
        for name in ("enable_thinking", "thinking"):
            if name in fields:
                chosen[name] = config.thinking
        if config.keep_thinking == "always":
            chosen["thinking_retention"] = "all"
        renderer = renderers.create_renderer(tokenizer, type(settings)(**chosen))
    except Exception as error:  # a library's boundary: whatever it raises, this tokenizer is not of this family
        raise ConfigError(f"cannot render as family {family!r}: {type(error).__name__}: {error}") from error
    return Rendering(tokenizer, renderer, family)


def _give_harmony_its_vocabulary(tokenizer: GuardedTokenizer) -> None:
    """gpt-oss is rendered by OpenAI's library, which would download the vocabulary that the model already has."""
    if "TIKTOKEN_ENCODINGS_BASE" in os.environ:
        return
    lines = sorted(
        (token_id, base64.b64encode(bytes(_BYTES[c] for c in token)).decode())
        for token, token_id in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"].items()
        if isinstance(token, str) and all(c in _BYTES for c in token)
    )
    text = "".join(f"{encoded} {token_id}\n" for token_id, encoded in lines).encode()
    if hashlib.sha256(text).hexdigest() != _O200K_SHA256:
        raise ConfigError("cannot render as family 'gpt-oss': this is not gpt-oss's vocabulary")
    folder = Path(tempfile.gettempdir()) / f"miles-o200k-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to somebody else; remove it, or set TMPDIR")
    partial = folder / f"{os.getpid()}.partial"
    partial.write_bytes(text)
    partial.replace(folder / "o200k_base.tiktoken")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)


_O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # that openai-harmony insists on


def _byte_letters() -> dict[str, int]:
    """Letter -> byte, as byte-level BPE writes bytes (GPT-2's table): printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_letters()


_FEW = 64


def self_test(rendering: Rendering) -> None:
    """Render, parse and extend one tool conversation; ConfigError when any of it is not exact.

    Sets what was found out: whether sampled turns can be extended at all, and how far that looks back.
    """
    tools: list[ToolSpec] = [_PROBE_TOOL]
    user: Message = {"role": "user", "content": "go " * 2 * _FEW}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result: Message = {"role": "tool", "tool_call_id": _CALL["id"], "content": "ok"}
    try:
        prompt = rendering.full([user], tools)
        output = rendering.sampled_for([user], answer, tools)
        parsed = rendering.parse(output, tools, prompt)
        tail = rendering.bridge(prompt, output, [result], tools)
        short = (
            rendering.bridge(prompt[-_FEW:], output, [result], tools),
            rendering.parse(output, tools, prompt[-_FEW:]),
        )
    except (SessionError, AssertionError, ValueError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(
            f"family {rendering.family!r} fails its self-test: {type(error).__name__}: {error}"
        ) from error
    if [(name, json.loads(arguments)) for name, arguments in parsed.calls] != [("probe", {"x": "1"})]:
        raise ConfigError(
            f"this tokenizer does not survive its own tool call as family {rendering.family!r}: parsed {parsed}; "
            "set session.rendering.family"
        )
    if output[-1] not in rendering.stop_ids:
        raise ConfigError(f"family {rendering.family!r} does not end a turn with a token that stops generation")
    rendering.extends = bool(tail)
    if short == (tail, parsed):
        rendering.looks_back = _FEW
    rendering.streams = all(_only_grows(rendering, user, answer, tools) for answer in _SPOKEN)


_SPOKEN: list[Message] = [
    {"role": "assistant", "content": "It is done, all of it."},
    {"role": "assistant", "content": "It is done.", "reasoning_content": "Hm, let me see what it was."},
    {"role": "assistant", "content": "I will look.", "tool_calls": [_CALL]},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


def _only_grows(rendering: Rendering, user: Message, answer: Message, tools: list[ToolSpec]) -> bool:
    """Whether what could be streamed of each beginning of an answer begins the answer itself."""
    try:
        output, prompt = rendering.sampled_for([user], answer, tools), rendering.full([user], tools)
        whole = rendering.parse(output, tools, prompt)
        for count in range(1, len(output)):
            part = rendering.parse(output[:count], tools, prompt, partial=True)
            texts = ((part.content, whole.content), (part.reasoning, whole.reasoning))
            if not all(final.startswith(settled(text)) for text, final in texts):
                return False
    except SessionError:
        return True  # the template has no such answers
    return True
