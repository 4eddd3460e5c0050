"""What real agent programs send, literally, and what becomes of it. Each test names the program and its habit."""

import asyncio
import json

import httpx
import pytest

from miles.errors import EngineError, EngineLost
from miles.types import Finish, Generated
from tests.rollout.session.conftest import events

THINK = "<think>\nlet me see\n</think>\n\n"


def call(command, name="shell"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'command': command}})}\n</tool_call>"


def function(name):
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


SHELL = function("shell")
SHELL_ANTHROPIC = {"name": "shell", "description": "", "input_schema": SHELL["function"]["parameters"]}
SHELL_RESPONSES = {"type": "function", "name": "shell", "parameters": SHELL["function"]["parameters"], "strict": False}


def user(text):
    return {"role": "user", "content": text}


def compact(message):
    """As JavaScript clients replay a message: arguments through JSON.parse and JSON.stringify."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))}}
        for c in message.get("tool_calls", [])
    ]
    for c in calls:
        c["function"]["arguments"] = c["function"]["arguments"].replace(": ", ":")
    return {**message, "tool_calls": calls} if calls else message


def results(message, *texts):
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": text}
        for c, text in zip(message["tool_calls"], texts, strict=True)
    ]


def linear(client, turns):
    """One path, no forks, every id exact, everything trained."""
    tree = client.exact()
    assert client.shape() == [(None, "root"), *((n, "extend") for n in range(turns - 1))]
    assert all(turn.trainable for turn in tree.turns)


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


def codex_items(reply):
    """As Codex replays what we sent: status added, null content on reasoning, all ids kept."""
    items = []
    for item in reply["output"]:
        more = {"content": None} if item["type"] == "reasoning" else {"status": "completed"}
        items.append({**item, **more})
    return items


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
    async with client_of([THINK + "parent", THINK + "child"], latency_s=0.4, drain_s=0.05) as client:
        parent = await client.chat([user("task")])
        assert parent["content"] == "parent"
        headers = {"x_openai_subagent": "collab_spawn", "x_codex_parent_thread_id": "t0", "thread_id": "t1"}
        child = asyncio.create_task(client.post("responses", {"input": "part of it"}, **headers))
        await asyncio.sleep(0.1)
        tree = await asyncio.wait_for(client.session.close(), 1)
        assert [turn.note for turn in tree.turns] == [""]
        assert (await child).status_code == 400
        assert len(client.engine.aborted) == 1


async def test_15_a_drain_lets_the_child_finish(client_of):
    async with client_of([THINK + "child"], latency_s=0.1, drain_s=2) as client:
        child = asyncio.create_task(client.post("responses", {"input": "part of it"}))
        await asyncio.sleep(0.05)
        tree = await client.session.close()
        assert (await child).status_code == 200
        assert len(tree.turns[0].output_ids) > 1


async def test_16_claude_compacts_with_its_tools_and_goes_on_anew(client_of):
    summary = "<summary>\nWe looked around.\n</summary>"
    async with client_of([THINK + call("ls"), THINK + summary, THINK + "done"]) as client:
        options = {"tools": [SHELL_ANTHROPIC], "system": "Be good."}
        one = await client.messages([user("task")], **options)
        result = {"type": "tool_result", "tool_use_id": one["content"][-1]["id"], "content": "a"}
        ask = {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Summarise the conversation."}
        said = [
            user("task"),
            {"role": "assistant", "content": one["content"]},
            {"role": "user", "content": [result, ask]},
        ]
        await client.messages(said, **options)
        fresh = "This session is continued. Summary:\nWe looked around.\nGo on."
        await client.messages([user(fresh)], **{**options, "system": "Be good. (2)"})
        tree = client.exact()
        assert client.shape() == [(None, "root"), (0, "compaction_request"), (None, "compacted")]
        assert [turn.origin for turn in tree.turns] == [None, None, 1]
        assert [turn.trainable for turn in tree.turns] == [True, False, True]
        assert [tree.line(turn.id) for turn in tree.turns] == ["main", "compaction", "main"]


async def test_16_summaries_are_trained_when_switched_on(client_of):
    async with client_of([THINK + "The summary of it all."], train_compaction=True) as client:
        await client.chat([user("task"), user("You are about to run out of context. Summarise.")])
        assert client.tree().turns[0].trainable


async def test_16_a_summary_that_is_not_used_leaves_the_main_line_as_it_was(client_of):
    async with client_of([THINK + "one", THINK + "a summary of it", THINK + "two"]) as client:
        said = [user("task")]
        said.append(await client.chat(said))
        await client.chat([*said, user("You are about to run out of context. Summarise.")])
        await client.chat([*said, user("go on")])
        assert client.shape() == [(None, "root"), (0, "compaction_request"), (0, "extend")]


@pytest.mark.parametrize("headers", [True, False])
async def test_17_codex_compacts_without_tools(client_of, headers):
    told = {"request_kind": "compaction", "window_number": 1}
    named = {"x_codex_turn_metadata": json.dumps(told)} if headers else {}
    async with client_of([THINK + call("ls"), THINK + "All is well so far.", THINK + "done"]) as client:
        start = [{"role": "user", "content": "task"}]
        one = await client.responses(start, tools=[SHELL_RESPONSES])
        done = {"type": "function_call_output", "call_id": one["output"][-1]["call_id"], "output": "a"}
        words = "summarise" if headers else "You are performing a CONTEXT CHECKPOINT COMPACTION."
        said = [*start, *codex_items(one), done, {"role": "user", "content": words}]
        await client.responses(said, tools=[], headers=named)
        fresh = "Another language model started to solve this problem: All is well so far."
        await client.responses([*start, {"role": "user", "content": fresh}], tools=[SHELL_RESPONSES])
        tree = client.exact()
        assert client.shape() == [(None, "root"), (None, "compaction_request"), (None, "compacted")]
        assert [turn.origin for turn in tree.turns] == [None, 0, 1]
        assert tree.turns[1].wire.get("window_number") == ("1" if headers else None)


@pytest.mark.parametrize(
    "request_",
    [
        [{"role": "system", "content": "You are a context summarization agent."}, user("user: task ...")],
        [user("You are maintaining a context-aware state summary for an interactive agent. <EVENT>")],
        [{"role": "system", "content": "Write a <state_snapshot> of the history."}, user("history")],
    ],
    ids=["opencode", "openhands", "qwen"],
)
async def test_18_some_summarise_in_a_conversation_of_its_own(client_of, request_):
    async with client_of([THINK + "hm", THINK + "Summary: nothing yet.", THINK + "done"]) as client:
        await client.chat([user("task")])
        await client.chat(request_)
        await client.chat([user("What did we do so far?"), {"role": "assistant", "content": "Summary: nothing yet."}])
        tree = client.exact()
        assert client.shape() == [(None, "root"), (None, "compaction_request"), (None, "compacted")]
        assert [turn.origin for turn in tree.turns] == [None, 0, 1]


async def test_18_terminus_needs_three_calls_to_summarise(client_of):
    replies = ["hm", "Summary of it.", "What is where?", "All is in a.", "done"]
    async with client_of([THINK + text for text in replies]) as client:
        said = [user("task")]
        said.append(await client.chat(said))
        hand = [*said, user("You are about to hand off your work to another AI agent. Summarise.")]
        hand.append(await client.chat(hand))
        ask = user("You are picking up work from a previous AI agent on this task:\nSummary of it.\nAsk.")
        questions = await client.chat([ask])
        await client.chat([*hand, user("The next agent has a few questions for you, answer each.")])
        await client.chat([user("task"), ask, questions, user("Here are the answers the other agent provided.")])
        assert client.shape() == [
            (None, "root"),
            (0, "compaction_request"),
            (None, "compaction_request"),
            (1, "compaction_request"),
            (None, "compacted"),
        ]
        tree = client.exact()
        assert [tree.line(turn.id) for turn in tree.turns] == ["main", *["compaction"] * 3, "main"]


@pytest.mark.parametrize("stream", [False, True])
async def test_19_a_request_sent_again_after_a_failure_or_while_it_runs_makes_one_turn(client_of, stream):
    async with client_of([EngineError("boom"), THINK + "done"]) as client:
        body = {"messages": [user("task")], "stream": stream}
        assert (await client.post("chat/completions", body)).status_code == 502
        assert (await client.post("chat/completions", body)).status_code == 200
        assert client.shape() == [(None, "root")]
    async with client_of([THINK + "done"], latency_s=0.3, grace_s=1) as client:
        with pytest.raises(httpx.TimeoutException):
            await client.http.post(
                f"{client.server.base_url(client.session)}/chat/completions",
                json=body,
                headers={"x-api-key": client.session.key},
                timeout=0.1,
            )
        assert (await client.post("chat/completions", body)).status_code == 200
        assert client.shape() == [(None, "root")]
        assert len(client.engine.requests) == 1


async def test_20_a_request_sent_again_after_delivery_is_a_sibling(client_of):
    async with client_of([THINK + "one", THINK + "two", THINK + "done"]) as client:
        await client.chat([user("task")])
        two = await client.chat([user("task")])
        await client.chat([user("task"), two, user("go on")])
        assert client.shape() == [(None, "root"), (None, "retry"), (1, "extend")]
        assert [turn.note for turn in client.exact().turns] == ["superseded", "", ""]


async def test_21_a_stream_that_the_engine_cuts_is_kept_and_resumed(client_of, thinking):
    ids = tuple(thinking.encode("<think>\nhm\n</think>\n\nhalf an answer"))
    cut = Generated(output_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), finish=Finish.ABORT)
    async with client_of([cut, THINK + "the other half"]) as client:
        reply = await client.post("messages", {"max_tokens": 99, "messages": [user("task")], "stream": True})
        assert reply.status_code == 503
        resume = user("Your response was cut off mid-stream. Resume directly.")
        said = [user("task"), {"role": "assistant", "content": "half an answer"}, resume]
        await client.messages(said)
        tree = client.exact()
        assert client.shape() == [(None, "root"), (0, "extend")]
        assert [(turn.trainable, turn.note) for turn in tree.turns] == [(False, "aborted"), (True, "")]
        assert tree.turns[0].output_ids == ids


async def test_22_a_cut_answer_is_told_in_each_dialect(client_of):
    long = THINK + "one two three four five six"
    async with client_of([long] * 8) as client:
        chat = (await client.post("chat/completions", {"messages": [user("a")], "max_tokens": 4})).json()
        assert chat["choices"][0]["finish_reason"] == "length"
        assert (await client.messages([user("b")], max_tokens=4))["stop_reason"] == "max_tokens"
        incomplete = await client.responses("c", max_output_tokens=4)
        assert (incomplete["status"], incomplete["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        again = await client.post("chat/completions", {"messages": [user("a")], "max_tokens": 5})
        assert again.status_code == 200
        assert client.shape()[3] == (None, "retry")
        assert {turn.finish for turn in client.tree().turns} == {Finish.LENGTH}
    async with client_of([long], report_truncation=False) as client:
        done = await client.responses("c", max_output_tokens=4)
        assert (done["status"], client.tree().turns[0].finish) == ("completed", Finish.LENGTH)


async def test_22_claude_resumes_a_cut_answer(client_of, thinking):
    ids = tuple(thinking.encode(THINK + "half"))
    cut = Generated(output_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), finish=Finish.LENGTH)
    async with client_of([cut, THINK + "rest"]) as client:
        one = await client.messages([user("a")])
        await client.messages([user("a"), {"role": "assistant", "content": one["content"]}, user("Resume directly.")])
        linear(client, 2)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("chat/completions", {"messages": [user("word " * 99)]}, "invalid_request_error"),
        ("responses", {"input": "word " * 99}, "invalid_request_error"),
        ("messages", {"max_tokens": 9, "messages": [user("word " * 99)]}, "invalid_request_error"),
    ],
)
async def test_23_an_overflow_is_what_harnesses_recognise_and_the_session_goes_on(client_of, path, body, kind):
    async with client_of([THINK + "ok"], context_length=80) as client:
        refused = await client.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (400, kind)
        assert "prompt is too long: " in error["message"]
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        shorter = await client.chat([user("a")])
        assert shorter["content"] == "ok"
        assert client.session.report()["refused/context_length_exceeded"] == 1


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("chat/completions", {"messages": [user("a")]}, "invalid_request_error"),
        ("responses", {"input": "a"}, "invalid_request_error"),
        ("messages", {"max_tokens": 9, "messages": [user("a")]}, "authentication_error"),
    ],
)
async def test_24_keys_open_their_own_session_only(client_of, path, body, kind):
    async with client_of([THINK + "ok"]) as client:
        other = client.server.open()
        for session, key in ((client.session.id, other.key), (client.session.id, "sk-no"), ("nowhere", "sk-no")):
            reply = await client.http.post(
                f"{client.server.url}/s/{session}/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, kind)
        await client.server.end(client.session)
        ended = await client.post(path, body)
        assert (ended.status_code, ended.json()["error"]["type"]) == (400, "invalid_request_error")
        assert client.engine.requests == []


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
    async with client_of([THINK + "child"], latency_s=0.1, drain_s=2) as client:
        body = {"max_tokens": 99, "messages": [user("part")], "stream": True}
        child = asyncio.create_task(client.post("messages", body))
        await asyncio.sleep(0.05)
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
