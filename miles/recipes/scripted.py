"""A model that plays what a file says: exact ids, no weights, for trying environments and harnesses.

The file is JSON. A list holds the replies of every episode, in order. An object maps texts to such lists: an episode
plays the list whose text stands in its first prompt, else that of "*". A reply is a text, or {"tool": NAME,
"arguments": {…}}. After the last reply the model repeats it, unless it was a tool call: then it says nothing more."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.recipes.tiny_model import tiny_rendering
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.rendering.rendering import Rendering
from miles.types import GenerateRequest

__all__ = ["read_script", "scripted_model"]

Script = dict[str, list[Any]]


def read_script(path: Path) -> Script:
    """Replies by text of the prompt. ConfigError says what is wrong with the file."""
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"no script {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    script = {"*": told} if isinstance(told, list) else told
    if not isinstance(script, dict) or not all(isinstance(replies, list) for replies in script.values()):
        raise ConfigError(f"{path} must hold a list of replies, or an object of such lists")
    for reply in (reply for replies in script.values() for reply in replies):
        if not isinstance(reply, str) and not (isinstance(reply, dict) and isinstance(reply.get("tool"), str)):
            raise ConfigError(
                f'{path}: {json.dumps(reply)[:100]} is no reply: write a text, or {{"tool": …, "arguments": …}}'
            )
    return script


def scripted_model(script: Script) -> tuple[ScriptedEngine, Rendering]:
    """An engine that plays the script, and the rendering that goes with it (bytes, Qwen3's template)."""
    rendering = tiny_rendering()
    tokenizer = rendering.tokenizer
    chosen: dict[str, Sequence[Any]] = {}
    turn: dict[str, int] = {}

    def reply(request: GenerateRequest) -> list[int]:
        if request.session not in chosen:
            prompt = tokenizer.decode(list(request.prompt_ids))
            chosen[request.session] = next(
                (v for k, v in script.items() if k != "*" and k in prompt), script.get("*", [])
            )
        replies, place = chosen[request.session], turn.get(request.session, 0)
        turn[request.session] = place + 1
        text = _text(replies[place]) if place < len(replies) else _last(replies)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return [*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")]

    return ScriptedEngine(reply), rendering


def _text(reply: Any) -> str:
    if isinstance(reply, str):
        return reply
    call = {"name": reply["tool"], "arguments": reply.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _last(replies: Sequence[Any]) -> str:
    return replies[-1] if replies and isinstance(replies[-1], str) else ""
