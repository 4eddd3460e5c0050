"""What real agent programs send, literally, and what becomes of it. The number is the scenario's."""

import asyncio

import pytest

from tests.rollout.session.clients import (
    SHELL,
    SHELL_ANTHROPIC,
    SHELL_RESPONSES,
    THINK,
    call,
    codex_items,
    compact,
    function,
    linear,
    results,
    user,
)
from tests.rollout.session.conftest import until

BASIC = [THINK + "look" + call("ls"), THINK + call("cat a") + call("cat b"), THINK + "done"]


async def test_1_chat_clients_respell_arguments_of_parallel_calls(client_of):
    async with client_of(BASIC) as client:
        said = [user("task")]
        one = await client.chat(said, tools=[SHELL])
        said += [compact(one), *results(one, "a b")]
        two = await client.chat(said, tools=[SHELL])
        said += [compact(two), *results(two, "1", "2")]
        three = await client.chat(said, tools=[SHELL])
        assert (one["content"], two["content"], three["content"]) == ("look", None, "done")
        assert one["reasoning_content"].strip() == "let me see"
        linear(client, 3)
        assert client.session.report()["prefix_reused"] > 0.4


async def test_2_claude_moves_its_cache_marks_every_turn(client_of):
    mark = {"cache_control": {"type": "ephemeral"}}
    async with client_of(BASIC) as client:
        said = [{"role": "user", "content": [{"type": "text", "text": "task", **mark}]}]
        options = {"system": [{"type": "text", "text": "Be good.", **mark}], "tools": [SHELL_ANTHROPIC]}
        one = await client.messages(said, **options)
        said[0]["content"][0].pop("cache_control")
        result = {"type": "tool_result", "tool_use_id": one["content"][-1]["id"], "content": "a b"}
        said += [{"role": "assistant", "content": one["content"]}, {"role": "user", "content": [{**result, **mark}]}]
        two = await client.messages(said, **options)
        assert [block["type"] for block in two["content"]] == ["thinking", "tool_use", "tool_use"]
        said[-1]["content"] = [result]
        answers = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": [{"type": "text", "text": "1"}]}
            for b in two["content"][1:]
        ]
        said += [{"role": "assistant", "content": two["content"]}, {"role": "user", "content": answers}]
        three = await client.messages(said, **options)
        assert (three["stop_reason"], three["content"][-1]) == ("end_turn", {"type": "text", "text": "done"})
        linear(client, 3)


async def test_3_claude_sends_a_system_message_as_blocks_and_later_as_text(client_of):
    async with client_of([THINK + call("ls"), THINK + "done"]) as client:
        agents = {"role": "system", "content": [{"type": "text", "text": "Agents: none", "cache_control": {}}]}
        said = [user("task"), agents]
        one = await client.messages(said, tools=[SHELL_ANTHROPIC])
        agents["content"] = "Agents: none"
        result = {"type": "tool_result", "tool_use_id": one["content"][-1]["id"], "content": "a"}
        said += [{"role": "assistant", "content": one["content"]}, {"role": "user", "content": [result]}]
        await client.messages(said, tools=[SHELL_ANTHROPIC])
        linear(client, 2)


@pytest.mark.parametrize("names", [(), ("sort_tool_results",)])
async def test_4_claude_returns_parallel_results_as_they_finish(client_of, names):
    async with client_of([THINK + call("cat a") + call("cat b"), THINK + "done"], names=names) as client:
        said = [user("task")]
        one = await client.chat(said, tools=[SHELL])
        await client.chat([*said, one, *reversed(results(one, "first", "second"))], tools=[SHELL])
        linear(client, 2)
        order = [message["content"] for message in client.tree().turns[1].messages]
        assert order == (["first", "second"] if names else ["second", "first"])
        assert client.tree().turns[1].asked == ({"canonicalised": ["sort_tool_results"]} if names else {})


def kimi_items(reply):
    """As Kimi replays: without our item ids."""
    return [{name: value for name, value in item.items() if name != "id"} for item in reply["output"]]


@pytest.mark.parametrize("replayed", [codex_items, kimi_items])
async def test_5_and_6_responses_clients_replay_items_with_and_without_ids(client_of, replayed):
    async with client_of(BASIC) as client:
        said = [{"type": "message", "role": "user", "id": "msg_own", "content": [{"type": "input_text", "text": "go"}]}]
        options = {"tools": [SHELL_RESPONSES], "instructions": "Be good.", "store": False}
        for texts in (["a b"], ["1", "2"]):
            reply = await client.responses(said, **options)
            calls = [item for item in reply["output"] if item["type"] == "function_call"]
            said = [*said, *replayed(reply)]
            for item, text in zip(calls, texts, strict=True):
                said.append({"type": "function_call_output", "call_id": item["call_id"], "id": "fco", "output": text})
        last = await client.responses(said, **options)
        assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
        linear(client, 3)


@pytest.mark.parametrize("nothing", [None, "", [], [{"type": "text", "text": ""}]])
async def test_7_pi_makes_nothing_of_an_empty_text(client_of, nothing):
    async with client_of([THINK + call("ls"), THINK + "done"]) as client:
        one = await client.chat([user("task")], tools=[SHELL])
        await client.chat([user("task"), {**one, "content": nothing}, *results(one, "a")], tools=[SHELL])
        linear(client, 2)


async def test_8_openhands_drops_reasoning(client_of):
    async with client_of([THINK + call("ls"), THINK + "done"]) as client:
        one = await client.chat([user("task")], tools=[SHELL])
        bare = {name: value for name, value in one.items() if name != "reasoning_content"}
        await client.chat([user("task"), bare, *results(one, "a")], tools=[SHELL])
        linear(client, 2)
        assert client.session.report()["reasoning_dropped"] == 1


BROKEN = '{"command": "echo unterminated'


@pytest.mark.parametrize(
    ("arguments", "edge", "cause"),
    [(BROKEN, "extend", None), ("{}", "branch", "calls"), ('{"command":"echo unterminated"}', "branch", "calls")],
    ids=["codex keeps it", "pi, kimi, cline empty it", "qwen repairs it"],
)
async def test_9_broken_arguments_come_back_in_many_ways(client_of, arguments, edge, cause):
    text = f'<tool_call>\n{{"name": "shell", "arguments": {BROKEN}\n</tool_call>'
    async with client_of([THINK + text, THINK + "done"]) as client:
        one = await client.chat([user("task")], tools=[SHELL])
        assert one["tool_calls"][0]["function"]["arguments"] == BROKEN
        again = {**one["tool_calls"][0], "function": {"name": "shell", "arguments": arguments}}
        await client.chat([user("task"), {**one, "tool_calls": [again]}, *results(one, "bad JSON")], tools=[SHELL])
        tree = client.exact()
        assert tree.turns[1].edge.value == edge
        assert all(turn.trainable for turn in tree.turns)
        assert client.session.report().get(f"replay_edited/{cause}", 0) == (1 if cause else 0)


async def test_9_claude_wraps_broken_arguments_and_they_still_match(client_of):
    text = f'<tool_call>\n{{"name": "shell", "arguments": {BROKEN}\n</tool_call>'
    async with client_of([THINK + text, THINK + "done"]) as client:
        one = await client.messages([user("task")], tools=[SHELL_ANTHROPIC])
        block = one["content"][-1]
        assert block["input"] == {"__unparsedToolInput": {"raw": BROKEN, "len": len(BROKEN)}}
        result = {"type": "tool_result", "tool_use_id": block["id"], "is_error": True, "content": "bad JSON"}
        said = [user("task"), {"role": "assistant", "content": one["content"]}, {"role": "user", "content": [result]}]
        await client.messages(said, tools=[SHELL_ANTHROPIC])
        linear(client, 2)


async def test_10_mini_drops_the_assistant_message_that_it_could_not_read(client_of):
    async with client_of([THINK + call("ls"), THINK + "no format", THINK + "done"]) as client:
        said = [user("task")]
        one = await client.chat(said, tools=[SHELL])
        said += [one, *results(one, "a")]
        await client.chat(said, tools=[SHELL])
        await client.chat([*said, user("Your last message had no action.")], tools=[SHELL])
        assert client.shape() == [(None, "root"), (0, "extend"), (0, "branch")]
        assert [turn.trainable for turn in client.exact().turns] == [True, True, True]
        assert client.session.report()["abandoned"] == 1


async def test_11_of_two_siblings_with_one_text_the_newest_is_continued(client_of):
    async with client_of([THINK + "same", THINK + "same", THINK + "done"]) as client:
        await client.chat([user("task")])
        await client.chat([user("task")])
        await client.chat([user("task"), {"role": "assistant", "content": "same"}, user("go on")])
        assert client.shape() == [(None, "root"), (None, "retry"), (1, "extend")]
        assert [turn.note for turn in client.exact().turns] == ["superseded", "", ""]


async def test_11_a_signature_names_the_older_sibling(client_of):
    async with client_of([THINK + "same", THINK + "same", THINK + "done"]) as client:
        older = await client.messages([user("task")])
        await client.messages([user("task")])
        await client.messages([user("task"), {"role": "assistant", "content": older["content"]}, user("go on")])
        assert client.shape()[2] == (0, "extend")


async def test_12_opencode_asks_for_a_title_first(client_of):
    async with client_of([THINK + "A title", THINK + call("ls"), THINK + "done"]) as client:
        system = {"role": "system", "content": "You are a title generator. You output ONLY a title."}
        await client.chat([system, user("Generate a title:"), user('"task"')], headers={"x-session-id": "ses_1"})
        one = await client.chat([user('"task"')], tools=[SHELL], headers={"x-session-id": "ses_1"})
        await client.chat([user('"task"'), one, *results(one, "a")], tools=[SHELL])
        assert client.shape() == [(None, "side"), (None, "root"), (1, "extend")]
        tree = client.exact()
        assert [(turn.trainable, turn.note) for turn in tree.turns] == [(False, "untrained"), (True, ""), (True, "")]
        assert [tree.line(turn.id) for turn in tree.turns] == ["side", "main", "main"]


async def test_13_claude_runs_two_sub_agents_beside_their_parent(client_of):
    launch = call("count the files", "Agent") + call("count the lines", "Agent")
    script = [THINK + launch, *[THINK + "waiting"], *[THINK + call("ls")] * 2, *[THINK + "4"] * 2, THINK + "8"]
    agent = function("Agent")
    async with client_of(script) as client:
        said = [user("count all")]
        one = await client.chat(said, tools=[agent, SHELL])
        said += [one, *results(one, "launched", "launched")]
        two = await client.chat(said, tools=[agent, SHELL])
        system = {"role": "system", "content": "x-anthropic-billing-header: cc_is_subagent=true;\nYou are an agent."}
        children = [
            ([system, user("count the files")], {"x-claude-code-agent-id": "a1"}),
            ([system, user("count the lines")], {"x-claude-code-agent-id": "a2"}),
        ]
        replies = [await client.chat(m, tools=[SHELL], headers=h) for m, h in children]
        for (messages, headers), reply in zip(children, replies, strict=True):
            await client.chat([*messages, reply, *results(reply, "f")], tools=[SHELL], headers=headers)
        said += [two, user("[SYSTEM NOTIFICATION] agents are done: 4, 4")]
        await client.chat(said, tools=[agent, SHELL])
        tree = client.exact()
        assert client.shape() == [
            (None, "root"),
            (0, "extend"),
            (None, "subagent"),
            (None, "subagent"),
            (2, "extend"),
            (3, "extend"),
            (1, "extend"),
        ]
        assert [turn.origin for turn in tree.turns[2:4]] == [0, 0]
        assert [tree.line(turn.id) for turn in tree.turns] == ["main", "main", *["subagent"] * 4, "main"]
        assert tree.turns[2].wire == {"agent": "a1"}
        assert all(turn.trainable for turn in tree.turns)
        assert client.session.transcript().final_text == "8"


async def test_14_a_child_without_marks_is_known_by_its_prompt(client_of):
    launch = call("write the poem about birds", "agent")
    async with client_of([THINK + launch, THINK + "tweet", THINK + "meow", THINK + "done"]) as client:
        one = await client.chat([user("poem")], tools=[function("agent")])
        system = {"role": "system", "content": "You work for another."}
        await client.chat([system, user("write the poem about birds")], tools=[SHELL])
        await client.chat([system, user("write a poem about cats")], tools=[SHELL])
        await client.chat([user("poem"), one, *results(one, "tweet")], tools=[function("agent")])
        tree = client.exact()
        assert client.shape() == [(None, "root"), (None, "subagent"), (None, "branch"), (0, "extend")]
        assert [turn.origin for turn in tree.turns] == [None, 0, None, None]


async def test_14_a_child_that_begins_with_its_parents_preamble_is_still_known(client_of):
    """Codex puts the same environment message before every conversation."""
    preamble = user("<environment_context>cwd /workspace</environment_context>")
    launch = call("count all the files", "spawn_agent")
    async with client_of([THINK + launch, THINK + "4"]) as client:
        await client.chat([preamble, user("task")], tools=[function("spawn_agent")])
        await client.chat([preamble, user("count all the files")], tools=[SHELL])
        assert client.shape() == [(None, "root"), (None, "subagent")]
        assert client.tree().turns[1].origin == 0


async def test_15_codex_ends_while_its_child_is_in_flight(client_of):
    async with client_of([THINK + "parent", THINK + "child"], latency_s=1.5, drain_s=0.05) as client:
        parent = await client.chat([user("task")])
        assert parent["content"] == "parent"
        headers = {"x_openai_subagent": "collab_spawn", "x_codex_parent_thread_id": "t0", "thread_id": "t1"}
        child = asyncio.create_task(client.post("responses", {"input": "part of it"}, **headers))
        await until(lambda: client.session.waiting_for_engine)
        tree = await asyncio.wait_for(client.session.close(), 1)
        assert [turn.note for turn in tree.turns] == [""]
        assert (await child).status_code == 400
        assert len(client.engine.aborted) == 1


async def test_15_a_drain_lets_the_child_finish(client_of):
    async with client_of([THINK + "child"], latency_s=0.3, drain_s=5) as client:
        child = asyncio.create_task(client.post("responses", {"input": "part of it"}))
        await until(lambda: client.session.waiting_for_engine)
        tree = await client.session.close()
        assert (await child).status_code == 200
        assert len(tree.turns[0].output_ids) > 1
