"""Habits of real clients that reviews and runs of the real programs brought up."""

import asyncio

import pytest

from miles.errors import EngineLost
from tests.rollout.session.clients import SHELL, SHELL_ANTHROPIC, SHELL_RESPONSES, THINK, call, function, linear, user
from tests.rollout.session.conftest import events, until


async def test_marks_in_what_tools_print_are_no_instructions(client_of):
    """mini-swe-agent sends output as the user; a source file may quote another agent's prompt."""
    quoted = user("<output>\nif (s.includes('<state_snapshot>')) ask('CRITICAL: Respond with TEXT ONLY')\n</output>")
    async with client_of([THINK + "look", THINK + "fix", THINK + "done"]) as client:
        said = [user("task")]
        for reply in (quoted, user("ok")):
            said += [await client.chat(said), reply]
        await client.chat(said)
        linear(client, 3)
        assert client.session.transcript().final_text == "done"


async def test_a_turn_taken_for_a_summary_that_is_simply_gone_on_from_was_none(client_of):
    async with client_of([THINK + "look", THINK + "fix", THINK + "done"]) as client:
        said = [user("task")]
        for reply in (user("You are about to run out of context, says the log."), user("go on")):
            said += [await client.chat(said), reply]
        await client.chat(said)
        linear(client, 3)
        assert client.session.report()["guess_taken_back"] == 1
        assert client.session.transcript().final_text == "done"


NUMBERS = [("10.0", 10), ("1e3", 1000), ("0.5", 0.5), ("9007199254740993", 9007199254740992)]


@pytest.mark.parametrize(("wrote", "said"), NUMBERS)
async def test_javascript_respells_numbers(client_of, wrote, said):
    text = f'<tool_call>\n{{"name": "shell", "arguments": {{"timeout": {wrote}}}}}\n</tool_call>'
    async with client_of([THINK + text, THINK + "done"]) as client:
        one = await client.messages([user("task")], tools=[SHELL_ANTHROPIC])
        one["content"][-1]["input"] = {"timeout": said}
        result = {"type": "tool_result", "tool_use_id": one["content"][-1]["id"], "content": "a"}
        said = [user("task"), {"role": "assistant", "content": one["content"]}, {"role": "user", "content": [result]}]
        await client.messages(said, tools=[SHELL_ANTHROPIC])
        linear(client, 2)


async def test_true_and_one_are_not_the_same_argument(client_of):
    def history(value):
        made = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": {"x": value}}}
        return [user("q"), {"role": "assistant", "content": "", "tool_calls": [made]}, user("r")]

    async with client_of([THINK + "a", THINK + "b"]) as client:
        await client.chat(history(1), tools=[SHELL])
        await client.chat(history(True), tools=[SHELL])
        first, second = (list(request.prompt_ids) for request in client.engine.requests)
        assert first != second
        assert client.shape()[1][1] == "branch"


async def test_a_previous_response_is_the_one_that_was_named(client_of):
    async with client_of([THINK + "hello", "<think>\nother\n</think>\n\nhello", THINK + "on"]) as client:
        one = await client.responses("a")
        await client.responses("a")
        await client.responses("b", previous_response_id=one["id"])
        assert client.shape() == [(None, "root"), (None, "retry"), (0, "extend")]
        client.exact()


async def test_item_ids_that_a_client_made_up_split_no_turn(client_of):
    async with client_of([THINK + "hello" + call("ls"), THINK + "done"]) as client:
        one = await client.responses("a", tools=[SHELL_RESPONSES])
        made_up = [{**item, "id": f"client_{place}"} for place, item in enumerate(one["output"])]
        done = {"type": "function_call_output", "call_id": one["output"][-1]["call_id"], "output": "x"}
        await client.responses([user("a"), *made_up, done], tools=[SHELL_RESPONSES])
        linear(client, 2)


async def test_sub_agents_with_one_prompt_are_two(client_of):
    launch = call("count the files", "Agent") + call("count the files", "Agent")
    async with client_of([THINK + launch, THINK + "3", THINK + "4", THINK + "7"], latency_s=0.02) as client:
        await client.chat([user("count")], tools=[function("Agent")])
        asked = [user("count the files")]
        answers = await asyncio.gather(
            *(client.chat(asked, tools=[SHELL], headers={"x-claude-code-agent-id": f"ag{n}"}) for n in (1, 2))
        )
        assert {answer["content"] for answer in answers} == {"3", "4"}
        more = [*asked, answers[1], user("sure?")]
        await client.chat(more, tools=[SHELL], headers={"x-claude-code-agent-id": "ag2"})
        tree = client.exact()
        assert [turn.edge.value for turn in tree.turns] == ["root", "subagent", "subagent", "extend"]
        assert all(turn.trainable for turn in tree.turns)


async def test_a_drained_stream_is_delivered(client_of):
    async with client_of([THINK + "child"], latency_s=0.3, drain_s=5) as client:
        body = {"max_tokens": 99, "messages": [user("part")], "stream": True}
        child = asyncio.create_task(client.post("messages", body))
        await until(lambda: client.session.waiting_for_engine)
        tree = await client.session.close()
        assert (await child).text.count("message_stop") == 2
        assert tree.turns[0].trainable


CLAUDE_DEFAULTS = {
    "model": "policy",
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "{}"},
}


async def test_claude_asks_for_an_effort_and_is_answered(client_of):
    async with client_of([THINK + "ok"]) as client:
        await client.messages([user("q")], **CLAUDE_DEFAULTS)
        assert client.tree().turns[0].asked["output_config"] == {"effort": "high"}
        shaped = {**CLAUDE_DEFAULTS, "messages": [user("q")], "output_config": {"format": {"type": "json_schema"}}}
        refused = await client.post("messages", shaped)
        assert "output_config.format" in refused.json()["error"]["message"]
        assert client.session.report()["refused/unsupported_parameter"] == 1


async def test_claude_puts_reminders_before_a_sub_agents_prompt(client_of):
    reminders = [{"type": "text", "text": f"<system-reminder>{n}</system-reminder>"} for n in "ab"]
    launch = call("count the files", "Agent")
    async with client_of([THINK + launch, THINK + "4"]) as client:
        await client.messages([user("count")], tools=[{**SHELL_ANTHROPIC, "name": "Agent"}])
        prompt = {"role": "user", "content": [*reminders, {"type": "text", "text": "count the files"}]}
        await client.messages([prompt], tools=[SHELL_ANTHROPIC], headers={"x-claude-code-agent-id": "a1"})
        assert client.shape() == [(None, "root"), (None, "subagent")]
        assert client.tree().turns[1].origin == 0


def lost_in_mid_stream(client, ids, *, times):
    """The engine says some tokens and is gone, so often; then it answers."""
    honest, left = client.engine.generate, [times]

    async def generate(request, on_tokens=None):
        if not left[0]:
            return await honest(request, on_tokens)
        left[0] -= 1
        on_tokens(ids)
        await asyncio.sleep(0.05)
        raise EngineLost("gone")

    client.engine.generate = generate


async def test_codex_gets_no_done_item_of_a_response_that_fails(client_of, thinking):
    async with client_of([THINK + "done"]) as client:
        lost_in_mid_stream(client, tuple(thinking.encode(THINK + "half of it and more")), times=1)
        failed = [name for name, _ in events((await client.post("responses", {"input": "q", "stream": True})).text)]
        assert "response.reasoning_summary_text.delta" in failed
        assert "response.output_item.done" not in failed
        assert failed[-1] == "response.failed"
        again = [name for name, _ in events((await client.post("responses", {"input": "q", "stream": True})).text)]
        assert again[-1] == "response.completed"
        assert client.shape() == [(None, "root")]


async def test_text_without_thinking_streams_in_responses(client_of, thinking):
    async with client_of([]) as client:
        lost_in_mid_stream(client, tuple(thinking.encode("half of it and more")), times=1)
        failed = [name for name, _ in events((await client.post("responses", {"input": "q", "stream": True})).text)]
        assert "response.output_text.delta" in failed
        assert "response.output_item.done" not in failed


@pytest.mark.parametrize(("lang", "told"), [("js", False), ("python", True)])
async def test_chat_agents_try_again_when_a_stream_just_ends(client_of, thinking, lang, told):
    async with client_of([THINK + "done"]) as client:
        lost_in_mid_stream(client, tuple(thinking.encode(THINK + "half of it and more")), times=1)
        body = {"messages": [user("q")], "stream": True}
        text = (await client.post("chat/completions", body, x_stainless_lang=lang)).text
        assert ('"error"' in text) == told
        assert "[DONE]" not in text
        assert all(not data.get("choices") or not data["choices"][0]["finish_reason"] for _, data in events(text))
        assert (await client.chat([user("q")]))["content"] == "done"
        assert client.shape() == [(None, "root")]


async def test_a_compaction_leaves_nothing_abandoned(client_of):
    async with client_of([THINK + "one", THINK + "All is well so far.", THINK + "two"]) as client:
        said = [user("task")]
        said.append(await client.chat(said, tools=[SHELL]))
        await client.chat([*said, user("You are performing a CONTEXT CHECKPOINT COMPACTION.")])
        await client.chat([user("task"), user("Summary: All is well so far.")], tools=[SHELL])
        report = client.session.report()
        assert report["abandoned"] == 0
        assert not [name for name in report if name.startswith("replay")]
