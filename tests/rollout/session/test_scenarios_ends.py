"""Scenarios 16 to 24: compaction, retries, cut answers, overflow, keys."""

import json

import httpx
import pytest

from miles.errors import EngineError
from miles.types import Finish, Generated
from tests.rollout.session.clients import SHELL_ANTHROPIC, SHELL_RESPONSES, THINK, call, codex_items, linear, user


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
        assert reply.status_code == 200
        assert reply.content.count(b"event: error") == 1
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
