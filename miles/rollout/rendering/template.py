"""Rendering by a model's own chat template, for models that no hand-written renderer knows.

A sampled turn is extended in place: the new messages are rendered behind a stand-in for the conversation so
far, and what the template puts after the stand-in's answer is appended. Where the template changes what came
before, there is no extension and the caller renders anew. Tool calls are read in the Hermes form
(`<tool_call>{json}</tool_call>`); a template that ignores tools gets them in the system prompt, and one that
refuses tool results gets them from the user.
"""

import contextlib
import json
import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus

from miles.errors import ConfigError, SessionError
from miles.types import Message, ToolSpec

__all__ = ["TemplateRenderer"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(</tool_call>|$)", re.DOTALL)
_ANSWER, _THOUGHT = "\u241fanswer\u241f", "\u241fthought\u241f"
_ENDERS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<eos>")


@dataclass(slots=True)
class _Config:
    name: str = "template"


class TemplateRenderer:
    """The contract of `renderers.Renderer`, by `apply_chat_template`."""

    is_prefix_stable = False

    def __init__(self, tokenizer: Any, *, thinking: bool = False) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("this tokenizer has no chat template; name a family: session.rendering.family=qwen3")
        self.config = _Config()
        self._tokenizer, self._thinking = tokenizer, thinking
        known = tokenizer.get_vocab()
        ends = {tokenizer.eos_token_id, *(known[text] for text in _ENDERS if text in known)}
        self._stops = sorted(token for token in ends if token is not None)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        text = self._text(messages, tools, add_generation_prompt)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """With `sampled_mask`: for each assistant message what follows its opening, up to the token that ends it."""
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        sampled = [False] * len(ids)
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            start = self.render_ids(messages[:place], tools=tools, add_generation_prompt=True)
            whole = self.render_ids(messages[: place + 1], tools=tools)
            if ids[: len(start)] != start or ids[: len(whole)] != whole:
                continue  # the template changes history; such a turn cannot be imitated token by token
            end = next((i + 1 for i in range(len(start), len(whole)) if whole[i] in self._stops), len(whole))
            sampled[len(start) : end] = [True] * (end - len(start))
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids), sampled_mask=sampled)

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end], skip_special_tokens=False)
        reasoning = None
        if "</think>" not in text and text.lstrip().startswith("<think>"):
            return ParsedResponse(content="", reasoning_content=text.partition("<think>")[2], reasoning_complete=False)
        if "</think>" in text:
            reasoning, _, text = text.partition("</think>")
            reasoning = reasoning.replace("<think>", "").strip("\n")
            text = text.lstrip("\n")
        calls = [_call(match) for match in _CALL.finditer(text)]
        content = _CALL.sub("", text).rstrip() if calls else text
        return ParsedResponse(content=content, reasoning_content=reasoning, tool_calls=calls)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        thought = "</think>" in self._tokenizer.decode(previous_completion_ids)
        mark = secrets.token_hex(8)  # no client can write it into a message
        try:
            text = self._text([*self._stand_in(new_messages, tools, mark, thought), *new_messages], tools, True)
        except SessionError:
            return None
        at = text.find(_ANSWER + mark)
        if text.count(_ANSWER + mark) != 1 or (thought and _THOUGHT + mark not in text):
            return None
        at += len(mark)
        head = self._tokenizer.encode(text[: at + len(_ANSWER)], add_special_tokens=False)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if ids[: len(head)] != head:
            return None  # letters merge across the cut: only a full render is right
        rest = ids[len(head) :]
        close = next((i for i, token in enumerate(rest) if token in self._stops), None)
        if close is None:
            return None
        kept = list(previous_completion_ids)
        closed = bool(kept) and kept[-1] in self._stops
        joined = [*previous_prompt_ids, *kept, *(rest[close + 1 :] if closed else rest[close:])]
        return RenderedTokens(token_ids=joined, message_indices=[-1] * len(joined))

    def _stand_in(
        self, new_messages: list[Message], tools: list[ToolSpec] | None, mark: str, thought: bool
    ) -> list[Message]:
        name = tools[0]["function"]["name"] if tools else "tool"
        calls = [
            {"id": m["tool_call_id"], "type": "function", "function": {"name": name, "arguments": {}}}
            for m in new_messages
            if m.get("role") == "tool" and m.get("tool_call_id")
        ]
        thinking = f"<think>\n{_THOUGHT}{mark}\n</think>\n\n" if thought else ""
        answer: Message = {"role": "assistant", "content": thinking + _ANSWER + mark}
        if calls and self._takes_results == "after_calls":
            answer["tool_calls"] = calls
        return [{"role": "user", "content": "."}, answer]

    @cached_property
    def _takes_results(self) -> str:
        """How the template takes tool results: as they are, only after calls, or not at all."""
        result: Message = {"role": "tool", "tool_call_id": "callnumb1", "content": _ANSWER}
        function = {"name": "tool", "arguments": {}}
        asked: Message = {"role": "user", "content": "."}
        call: Message = {
            "role": "assistant",
            "content": ".",
            "tool_calls": [{"id": "callnumb1", "type": "function", "function": function}],
        }
        for way, answer in (("plain", {"role": "assistant", "content": "."}), ("after_calls", call)):
            with contextlib.suppress(SessionError):
                if _ANSWER in self._apply([asked, answer, result], None, True):
                    return way
        return "never"

    def _text(self, messages: list[Message], tools: list[ToolSpec] | None, opening: bool) -> str:
        if tools and not self._shows_tools:
            messages, tools = _with_tools(messages, tools), None
        if any(m.get("role") == "tool" for m in messages) and self._takes_results == "never":
            messages = _results_from_the_user(messages)
        return self._apply(messages, tools, opening)

    @cached_property
    def _shows_tools(self) -> bool:
        name = "name_that_no_template_has"
        tool = {"type": "function", "function": {"name": name, "description": ".", "parameters": {}}}
        return name in self._apply([{"role": "user", "content": "."}], [tool], True)

    def _apply(self, messages: list[Message], tools: list[ToolSpec] | None, opening: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.inner.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=opening,
                tokenize=False,
                enable_thinking=self._thinking,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise SessionError(
                f"this model's chat template refuses the conversation: {error}", code="template_refuses"
            ) from error
        return text


def _call(match: re.Match[str]) -> ParsedToolCall:
    raw, closed = match[1], match[2] != ""
    try:
        call = json.loads(raw)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, TypeError, KeyError):
        broken = ToolCallParseStatus.INVALID_JSON if closed else ToolCallParseStatus.UNCLOSED_BLOCK
        return ParsedToolCall(raw=raw, status=broken)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments, status=ToolCallParseStatus.OK)


def _with_tools(messages: list[Message], tools: list[ToolSpec]) -> list[Message]:
    """The tools as part of the system prompt, and calls as the text that the model would write."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"Tools, one JSON schema a line:\n<tools>\n{listed}\n</tools>\n"
        "Call a tool by writing, once for each call:\n"
        '<tool_call>\n{"name": "its name", "arguments": {"its": "arguments"}}\n</tool_call>'
    )
    written = [_written(message) for message in messages]
    if written and written[0].get("role") == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{text}"}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _written(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        "<tool_call>\n"
        + json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False)
        + "\n</tool_call>"
        for c in calls
    ]
    content = "\n".join(filter(None, [message.get("content"), *texts]))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _results_from_the_user(messages: list[Message]) -> list[Message]:
    """Tool results as what the user says, those in a row together."""
    changed: list[Message] = []
    for message in messages:
        if message.get("role") != "tool":
            changed.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if changed and changed[-1].get("tool_results"):
            changed[-1]["content"] += "\n" + text
        else:
            changed.append({"role": "user", "content": text, "tool_results": True})
    return changed
