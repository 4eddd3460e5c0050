"""Messages to tokens and back, by the `renderers` library, with a self-test before anything is served."""

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from miles.config import Config
from miles.errors import ConfigError, SessionError
from miles.rollout.rendering.guard import GuardedTokenizer
from miles.rollout.rendering.text import text_of
from miles.types import Message, ToolSpec

__all__ = ["ParsedMessage", "Rendering", "RenderingConfig"]


class RenderingConfig(Config):
    """How conversations become tokens."""

    family: str = "auto"
    """Name of a `renderers` family, `template` (the model's own chat template), or `auto`: the family that renders
    as the template does."""
    thinking: bool = False
    """Whether the model may think before it answers."""
    keep_thinking: Literal["template", "always"] = "template"
    """Earlier turns' thinking: as the template has it (a new user message may drop it, which starts a branch), or
    kept, so that every turn extends the one before."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A completion taken apart: text, reasoning, and (name, arguments) of each call.

    Arguments are JSON text, or the very text that the model wrote where that is no JSON.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    call_ids: tuple[str, ...] = ()
    """Ids that the model itself wrote, where its format has them."""

    @classmethod
    def of(cls, message: Message) -> "ParsedMessage":
        """Read a recorded answer."""
        calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ()))
        return cls(message["content"] or "", message.get("reasoning_content", ""), calls)

    def message(self, call_prefix: str = "call_") -> Message:
        """As an assistant message with fresh ids for its calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": (self.call_ids[place] if self.call_ids else "") or f"{call_prefix}{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for place, (name, arguments) in enumerate(self.calls)
            ]
        return message

    def cut(self, stop: str) -> "ParsedMessage":
        """Without the client's stop string and what follows: the answer ends there, calls and all."""
        return ParsedMessage(self.content.partition(stop)[0], self.reasoning, ())

    def without_calls(self) -> "ParsedMessage":
        return replace(self, calls=(), call_ids=())


class Rendering:
    """One tokenizer and its renderer. Any thread may use it: nothing here changes the tokenizer."""

    def __init__(self, tokenizer: GuardedTokenizer, renderer: Any, family: str) -> None:
        self.tokenizer, self.renderer, self.family = tokenizer, renderer, family
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self._opening_ids: list[int] | None = None
        self._shown: list[tuple[list[ToolSpec], list[ToolSpec]]] = []
        self.extends = True  # whether sampled turns can be extended at all
        self.streams = True  # whether the text of an unfinished answer only ever grows
        self.looks_back = 1 << 12  # ids of the prompt's end that parsing and extending depend on

    def full(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Ids of the whole conversation up to where the assistant begins to write."""
        with _refusals():
            clean, shown = self._clean(messages), self._tools(tools)
            ids: list[int] = self.renderer.render_ids(clean, tools=shown, add_generation_prompt=True)
            return ids

    def demonstration(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[list[int], list[bool]]:
        """Ids of a finished conversation and which of them the policy would have sampled.

        Messages marked `"train": False` are only context.
        """
        with _refusals():
            clean, shown = self._clean(messages), self._tools(tools)
            rendered = self.renderer.render(clean, tools=shown)
        if not rendered.sampled_mask:
            raise ConfigError("this model family cannot tell sampled tokens from template text; SFT needs a known one")
        ids, sampled = list(rendered.token_ids), list(rendered.sampled_mask)
        context = {place for place, message in enumerate(messages) if message.get("train") is False}
        if context:
            pairs = zip(sampled, rendered.message_indices, strict=True)
            sampled = [own and of not in context for own, of in pairs]
        opening = self._opening()
        for start in range(len(ids) - len(opening)):  # what the prompt gives is not sampled, as empty think blocks
            if ids[start] == opening[0] and ids[start : start + len(opening)] == opening:
                sampled[start : start + len(opening)] = [False] * len(opening)
        end = len(sampled) - sampled[::-1].index(True) if True in sampled else 0
        return ids[:end], sampled[:end]

    def sampled_for(self, before: list[Message], answer: Message, tools: list[ToolSpec]) -> list[int]:
        """Ids that a policy would have sampled for `answer`, thinking first where the family always thinks."""
        prompt = self.full(before, tools)
        thought = {"reasoning_content": "I see.", **answer}
        for message, first in ((answer, ""), (thought, ""), *((answer, first) for first in _THOUGHTS)):
            ids = [*(self.encode(first) if first else ()), *self._written(before, message, prompt, tools)]
            parsed = self.parse(ids, tools, prompt)
            same = len(parsed.calls) == len(answer.get("tool_calls") or ())
            if same and parsed.content.strip() == answer["content"].strip():
                return ids
        return self._written(before, answer, prompt, tools)

    def _written(self, before: list[Message], answer: Message, prompt: list[int], tools: list[ToolSpec]) -> list[int]:
        """What the template writes for an answer, with the token that ends it."""
        ids, sampled = self.demonstration([*before, answer], tools)
        start = len(sampled) - sampled[::-1].index(False) if False in sampled else 0
        if ids[: len(prompt)] == prompt:
            start = len(prompt)
        if ids[start:] and ids[-1] not in self.stop_ids:  # some families end a turn with the next one's mark
            calls = answer.get("tool_calls")
            after: Message = {"role": "user", "content": "."}
            if calls:
                after = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "."}
            longer = self.full([*before, answer, after], tools)[: len(ids) + 1]
            ids.append(longer[-1] if longer[:-1] == ids and longer[-1] in self.stop_ids else self.stop_ids[0])
        return ids[start:]

    def _opening(self) -> list[int]:
        """Ids with which the template opens the assistant's turn."""
        if self._opening_ids is None:
            user: list[Message] = [{"role": "user", "content": "x"}]
            closed = self.renderer.render_ids(user)
            opened = self.renderer.render_ids(user, add_generation_prompt=True)
            self._opening_ids = opened[len(closed) :]
        return self._opening_ids

    def bridge(
        self, prompt_ids: list[int], output_ids: list[int], new: list[Message], tools: list[ToolSpec]
    ) -> list[int] | None:
        """Tokens to append after a sampled turn for `new` messages; None where only a full render is right."""
        clean, shown = self._clean(new), self._tools(tools)
        try:
            with _refusals():
                bridged = self.renderer.bridge_to_next_turn(prompt_ids, output_ids, clean, tools=shown)
        except SessionError:
            return None  # a full render says why
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
        """Take a completion apart. A broken call keeps the arguments that the model wrote, if it has a name; one
        without a name stays in the text.

        With `partial` (more tokens will come) unfinished calls are left out.
        """
        parsed = self.renderer.parse_response(output_ids, tools=tools or None, prompt_ids=prompt_ids)
        content, calls, ids = parsed.content or "", [], []
        for attempt in parsed.tool_calls:
            call = _read_call(attempt)
            if call is not None and not (partial and attempt.status.value != "ok"):
                calls.append(call)
                ids.append(str(attempt.id or ""))
            elif not partial:
                content += f"<tool_call>{attempt.raw}"
        return ParsedMessage(content, (parsed.reasoning_content or "").strip(), tuple(calls), tuple(ids))

    def cut(
        self, ids: list[int], stop: tuple[str, ...], parsed: ParsedMessage, tools: list[ToolSpec], prompt: list[int]
    ) -> tuple[int, str | None]:
        """(How many ids make up an answer that a client's stop string ends, which string); all ids and None else.

        Stop strings are looked for in the answer's text, not in its thinking or in calls, and the answer ends with
        the token that completes the first one.
        """
        if not any(s in parsed.content for s in stop):
            return len(ids), None

        def holds(count: int) -> str | None:
            text = self.parse(ids[:count], tools, prompt, partial=True).content
            return min(((text.find(s) + len(s), s) for s in stop if s in text), default=(0, None))[1]

        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        if not holds(low) or (low > 1 and holds(low - 1)):  # a family whose text does not simply grow
            low = next((count for count in range(1, len(ids) + 1) if holds(count)), len(ids))
        return low, holds(low)

    @property
    def control(self) -> list[str]:
        """Texts of the tokenizer's control tokens."""
        return self.tokenizer.control

    def id_of(self, token: str) -> int:
        """Id of a token given by its text."""
        found: int = self.tokenizer.convert_tokens_to_ids(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, control tokens included: for scripts and tests, never for a user's words."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _tools(self, tools: list[ToolSpec]) -> list[ToolSpec] | None:
        """Tools as templates may see them; the last few lists are remembered, since agents send them every time."""
        if not tools:
            return None
        for known, shown in self._shown:
            if known == tools:
                return shown
        own = [{name: value for name, value in tool.items() if not name.startswith("x-")} for tool in tools]
        made: list[ToolSpec] = self.tokenizer.escape(own)
        self._shown = [(tools, made), *self._shown[:7]]
        return made

    def _clean(self, messages: list[Message]) -> list[Message]:
        return [self._for_template(message, place) for place, message in enumerate(messages)]

    def _for_template(self, message: Message, index: int) -> Message:
        """The message as renderers want it: plain text, arguments as an object (S07), control tokens as text."""
        role = message.get("role")
        clean: Message = {
            "role": role,
            "content": self.tokenizer.escape(text_of(message.get("content")), markup=role == "assistant"),
        }
        for name in ("tool_call_id", "name"):
            if message.get(name):
                clean[name] = self.tokenizer.escape(message[name])
        if message.get("reasoning_content"):
            clean["reasoning_content"] = self.tokenizer.escape(str(message["reasoning_content"]))
        if message.get("tool_calls"):
            clean["tool_calls"] = [self._call(call, f"messages[{index}].tool_calls") for call in message["tool_calls"]]
        return clean

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise SessionError(f"{where}: each call needs a function with name and arguments")
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise SessionError(f"{where}: arguments are not valid JSON: {error}") from error
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise SessionError(f"{where}: arguments must be a JSON object")
        name = str(function.get("name") or "")
        clean = {"name": self.tokenizer.escape(name), "arguments": self.tokenizer.escape(arguments)}
        return {"id": self.tokenizer.escape(str(call.get("id") or "")), "type": "function", "function": clean}


_THOUGHTS = ("I see.\n</think>\n\n", "I see.<|end|><|start|>assistant<|channel|>final<|message|>")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What a renderer raises for a conversation that its template cannot hold is the client's to mend."""
    try:
        yield
    except SessionError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError, RecursionError) as error:
        raise SessionError(
            f"this model's chat template refuses the conversation: {error}", code="template_refuses"
        ) from error


def _read_call(attempt: Any) -> tuple[str, str] | None:
    """(Name, arguments) of a parsed call, whole or broken; None without a name."""
    if attempt.name:
        arguments = attempt.arguments
        return str(attempt.name), arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if attempt.status.value == "unclosed_block":
        return None
    name = _NAME.search(attempt.raw)
    arguments = _ARGUMENTS.search(attempt.raw)
    return (name[1], arguments[1].strip() if arguments else "") if name else None


_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*(.*?)\}?\s*$', re.DOTALL)
