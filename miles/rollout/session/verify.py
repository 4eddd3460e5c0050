"""Does a model's rendering keep every token? Conversations are played through real sessions and every id compared.

For each scenario: the ids that the engine sampled are the ids exported, each with a logprob; every prompt is
what the tree says it is; a turn extends the one before where the template allows, and where it does not, the
branch is a full render of what the client sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.errors import MilesError, SessionError
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.records import first_tokens
from miles.rollout.session.session import ChatRequest, Completion, Session
from miles.types import Finish, Generated, GenerateRequest, Message, ToolSpec, Tree

__all__ = ["Check", "verify"]

TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
_NOTHINGS: tuple[Any, ...] = (None, "", [])
_ODD = "naïve 你好 🙂 \u200bé\n\tfin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One scenario's result. `extended` and `branched` count turns after the first of a conversation.

    `as_template` counts the extended turns whose new tokens are those of a full render of the conversation.
    `refused` says that the model's template cannot hold such a conversation at all: a client gets a clear 400.
    """

    name: str
    ok: bool
    refused: bool = False
    extended: int = 0
    as_template: int = 0
    branched: int = 0
    detail: str = ""


def verify(rendering: Rendering) -> list[Check]:
    """Run every scenario; never raises for a model's faults."""
    return asyncio.run(_verify(rendering))


async def _verify(rendering: Rendering) -> list[Check]:
    return [await _check(rendering, name, scenario) for name, scenario in _SCENARIOS.items()]


async def _check(rendering: Rendering, name: str, scenario: "_Scenario") -> Check:
    play = _Play(rendering)
    try:
        await scenario(play)
        tree = await play.session.close()
        play.compare(tree)
    except SessionError as error:
        refused = error.code == "template_refuses"
        return Check(name=name, ok=refused, refused=refused, detail=str(error))
    except (MilesError, AssertionError, ValueError, KeyError, IndexError, TypeError) as error:
        return Check(name=name, ok=False, detail=f"{type(error).__name__}: {error}")
    later = [turn for turn in tree.turns[1:] if turn.edge.value != "retry"]
    extended = sum(turn.parent is not None for turn in later)
    return Check(name=name, ok=True, extended=extended, as_template=play.as_template, branched=len(later) - extended)


class _Play:
    """A client, an engine that says what the scenario wants, and the log of what really went over the wire."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self.log: list[tuple[list[int], Generated]] = []
        self.next: Generated | None = None
        self.as_template = 0
        self.session = Session(ScriptedEngine(self._sample), rendering, SessionConfig(), max_tokens=1 << 16)

    def _sample(self, request: GenerateRequest) -> Generated:
        assert self.next is not None
        self.log.append((list(request.prompt_ids), self.next))
        return self.next

    async def ask(
        self,
        messages: Sequence[Message],
        output: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        finish: Finish = Finish.STOP,
        stop: tuple[str, ...] = (),
    ) -> Completion:
        """One request that the engine answers with `output`."""
        logprobs = tuple(-1.0 / (2 + place + 7 * len(self.log)) for place in range(len(output)))
        versions = (len(self.log),) * len(output)
        self.next = Generated(output_ids=tuple(output), logprobs=logprobs, versions=versions, finish=finish)
        done = await self.session.complete(ChatRequest(messages=tuple(messages), tools=tuple(tools), stop=stop))
        done.delivered()
        self.as_template += self._as_template(done.turn, list(messages), list(tools))
        return done

    def _as_template(self, turn: int, messages: list[Message], tools: list[ToolSpec]) -> bool:
        """Whether an extended turn's new tokens end a full render, right behind the token that ended its parent."""
        records = self.session.recorder.records
        parent = records[turn].parent
        if parent is None:
            return False
        added, whole = list(records[turn].prompt), self.rendering.full(messages, tools)
        ended = records[parent].output[-1:].tolist()
        if ended[0] not in self.rendering.stop_ids:
            ended = []
        return whole[-len(added) - len(ended) :] == [*ended, *added]

    def sampled(self, before: list[Message], answer: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        ids = self.rendering.sampled_for(before, answer, list(tools))
        return ids or [*self.rendering.encode(answer["content"]), self.rendering.stop_ids[0]]

    def compare(self, tree: Tree) -> None:
        """Every turn against the engine's own log."""
        assert len(tree.turns) == len(self.log), f"{len(tree.turns)} turns recorded of {len(self.log)} sampled"
        for turn, (prompt, generated) in zip(tree.turns, self.log, strict=True):
            kept = len(turn.output_ids)
            assert turn.output_ids == generated.output_ids[:kept], f"turn {turn.id}: other ids than were sampled"
            assert turn.logprobs == generated.logprobs[:kept], f"turn {turn.id}: other logprobs"
            assert turn.versions == generated.versions[:kept], f"turn {turn.id}: other versions"
            assert turn.trainable, f"turn {turn.id} is not trainable: {turn.note}"
            path = tree.path(turn.id)
            said = [token for t in path[:-1] for token in (*t.prompt_ids, *t.output_ids)]
            assert [*said, *turn.prompt_ids] == prompt, f"turn {turn.id}: the tree disagrees with the prompt"


_Scenario = Callable[[_Play], Awaitable[None]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(number: int, what: str) -> dict[str, Any]:
    return {
        "id": f"functions.look:{number}",
        "type": "function",
        "function": {"name": "look", "arguments": {"what": what}},
    }


def _result(call: dict[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def _turns(play: _Play) -> None:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}]
    for number in range(3):
        messages.append(_user(f"question {number}"))
        answer: Message = {"role": "assistant", "content": f"answer {number}"}
        done = await play.ask(messages, play.sampled(messages, answer))
        assert done.message["content"].strip() == answer["content"], (
            f"the answer came out as {done.message['content']!r}"
        )
        messages.append(done.message)


async def _tools(play: _Play, *whats: str, text: str = "") -> None:
    """Calls, results, an answer, a new question."""
    messages: list[Message] = [_user("find out")]
    wanted: Message = {"role": "assistant", "content": text}
    wanted["tool_calls"] = [_call(number, what) for number, what in enumerate(whats)]
    done = await play.ask(messages, play.sampled(messages, wanted, [TOOL]), tools=[TOOL])
    calls = done.message.get("tool_calls", [])
    said = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert [name for name, _ in said] == ["look"] * len(whats), f"the calls came out as {said}"
    messages += [done.message, *(_result(call, f"found {what}") for call, what in zip(calls, whats, strict=True))]
    answer: Message = {"role": "assistant", "content": "it is there"}
    done = await play.ask(messages, play.sampled(messages, answer, [TOOL]), tools=[TOOL])
    messages += [done.message, _user("thanks")]
    await play.ask(messages, play.sampled(messages, answer, [TOOL]), tools=[TOOL])


async def _one_tool(play: _Play) -> None:
    await _tools(play, "birds")


async def _parallel_tools(play: _Play) -> None:
    await _tools(play, "birds", "bees", _ODD.replace("\n\t", " "))


async def _reasoning(play: _Play) -> None:
    """Thinking, dropped by the client, before a call and before an answer."""
    messages: list[Message] = [_user("think")]
    wanted: Message = {"role": "assistant", "content": "", "reasoning_content": "Hm, birds."}
    wanted["tool_calls"] = [_call(0, "birds")]
    done = await play.ask(messages, play.sampled(messages, wanted, [TOOL]), tools=[TOOL])
    messages.append({name: value for name, value in done.message.items() if name != "reasoning_content"})
    messages += [_result(call, "found") for call in done.message.get("tool_calls", [])]
    answer: Message = {"role": "assistant", "content": "yes", "reasoning_content": "So."}
    done = await play.ask(messages, play.sampled(messages, answer, [TOOL]), tools=[TOOL])
    messages += [done.message, _user("more")]
    await play.ask(messages, play.sampled(messages, answer, [TOOL]), tools=[TOOL])


async def _empty(play: _Play) -> None:
    messages: list[Message] = [_user("say nothing")]
    done = await play.ask(messages, play.rendering.stop_ids[:1])
    for nothing in _NOTHINGS:
        again = [*messages, {**done.message, "content": nothing}, _user(f"and now {nothing!r}?")]
        await play.ask(again, play.sampled(messages, {"role": "assistant", "content": "well"}))


async def _unicode(play: _Play) -> None:
    messages: list[Message] = [_user(_ODD)]
    answer: Message = {"role": "assistant", "content": _ODD.replace("\u200b", "")}
    done = await play.ask(messages, play.sampled(messages, answer))
    await play.ask([*messages, done.message, _user(_ODD * 3)], play.sampled(messages, answer))


async def _odd_tokens(play: _Play) -> None:
    """Letters one by one: the text would be encoded otherwise, the sampled ids must stay."""
    messages: list[Message] = [_user("spell")]
    letters = [token for letter in "tokenization" for token in play.rendering.encode(letter)]
    output = [*_opening(play, messages), *letters, play.rendering.stop_ids[0]]
    done = await play.ask(messages, output)
    await play.ask([*messages, done.message, _user("go on")], output)


def _opening(play: _Play, messages: list[Message]) -> list[int]:
    """What the family wants before an answer's text: closed thinking, a channel."""
    answer: Message = {"role": "assistant", "content": "tokenization"}
    ids = play.sampled(messages, answer)
    text = play.rendering.encode("tokenization")
    at = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), 0)
    return ids[:at]


async def _typed_control(play: _Play) -> None:
    """Control tokens typed into every place that a client can write to: none may become one."""
    control = play.rendering.control
    clean, typed = "harmless words", "".join(f"a{text}b" for text in control[:40])
    counts = []
    for text in (clean, typed):
        described = {**TOOL, "function": {**TOOL["function"], "description": text}}
        calls = [_call(0, text)]
        messages: list[Message] = [
            {"role": "system", "content": text},
            _user(text),
            {"role": "assistant", "content": "", "tool_calls": calls},
            _result(calls[0], text),
            _user(text),
        ]
        ids = play.rendering.full(messages, [described])
        known = {play.rendering.id_of(token) for token in control}
        counts.append(sum(token in known for token in ids))
        shown = play.rendering.decode(ids)
        assert text is clean or all(shown.count(token) >= 3 for token in control[:40]), "typed text was lost"
    assert counts[0] == counts[1], f"{counts[1] - counts[0]} control tokens came out of typed text"
    messages = [_user(typed)]
    answer: Message = {"role": "assistant", "content": "ok"}
    done = await play.ask(messages, play.sampled(messages, answer))
    await play.ask([*messages, done.message, _user(typed)], play.sampled(messages, answer))


async def _truncated(play: _Play) -> None:
    messages: list[Message] = [_user("talk")]
    whole = play.sampled(messages, {"role": "assistant", "content": "one two three four five six"})
    done = await play.ask(messages, whole[: max(1, len(whole) - 3)], finish=Finish.LENGTH)
    assert done.finish is Finish.LENGTH
    await play.ask([*messages, done.message, _user("go on")], whole)


async def _client_stop(play: _Play) -> None:
    messages: list[Message] = [_user("talk")]
    whole = play.sampled(messages, {"role": "assistant", "content": "one two </answer> three four"})
    done = await play.ask(messages, whole, stop=("</answer>",))
    assert done.stop == "</answer>", "the stop string was not seen"
    assert "answer" not in done.message["content"], f"the text was not cut: {done.message['content']!r}"
    play.log[-1] = (play.log[-1][0], first_tokens(play.log[-1][1], done.completion_tokens))
    await play.ask([*messages, done.message, _user("go on")], whole)


_SCENARIOS: dict[str, _Scenario] = {
    "three turns of text": _turns,
    "one tool call": _one_tool,
    "parallel tool calls": _parallel_tools,
    "dropped reasoning": _reasoning,
    "empty answer": _empty,
    "unicode": _unicode,
    "odd tokenization": _odd_tokens,
    "typed control tokens": _typed_control,
    "truncated turn": _truncated,
    "client stop string": _client_stop,
}
