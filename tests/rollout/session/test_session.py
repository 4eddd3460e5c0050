"""The tree: what is recorded, whatever clients do to the text."""

import asyncio
import time

import pytest

from miles.errors import ContextOverflow, EngineError, SessionError
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.session import ChatRequest, Session
from miles.types import Edge, Finish, Generated, Limits

USER = {"role": "user", "content": "open amber"}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "cat amber"}}\n</tool_call>'


def ask(*messages, **options):
    return ChatRequest(messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def session_of(engine_of, rendering):
    def make(script, **settings):
        latency = settings.pop("latency_s", 0.0)
        context = settings.pop("context_length", 4096)
        limits, names = settings.pop("limits", None), settings.pop("canonicalisers", ())
        engine = engine_of(script, latency_s=latency, context_length=context)
        config = SessionConfig(**{"grace_s": 0.05, **settings})
        return Session(engine, rendering, config, limits=limits, max_tokens=64, canonicalisers=names), engine

    return make


async def told(session, *messages, **options):
    """Ask as a client that received the answer."""
    done = await session.complete(ask(*messages, **options))
    done.delivered()
    return done


async def test_turns_extend_each_other_with_the_very_ids_that_were_sampled(session_of, rendering):
    session, engine = session_of([CALL, "answer 42"])
    first = await told(session, USER)
    again = {**first.message, "content": None, "extra": 1}
    again["tool_calls"] = [{**first.message["tool_calls"][0]}]
    again["tool_calls"][0]["function"] = {"name": "shell", "arguments": '{"command":"cat amber"}'}
    result = {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "key 42"}
    await told(session, USER, again, result)
    tree = await session.close()
    one, two = tree.turns
    assert (two.parent, two.edge) == (0, Edge.EXTEND)
    assert list(one.output_ids) == rendering.encode(CALL + "<|im_end|>")
    asked = list(engine.requests[1].prompt_ids)
    assert asked == [*one.prompt_ids, *one.output_ids, *two.prompt_ids]
    assert [turn.trainable for turn in tree.turns] == [True, True]
    assert two.messages == (result,)


async def test_text_that_would_encode_differently_keeps_the_sampled_ids(session_of, rendering):
    odd = [rendering.encode(letter)[0] for letter in "amber"]  # the word has a token of its own
    assert rendering.encode("amber") != odd
    session, engine = session_of([[*odd, rendering.stop_ids[0]], "answer 42"])
    first = await told(session, USER)
    assert first.message["content"] == "amber"
    await told(session, USER, {"role": "assistant", "content": "amber"}, user("go on"))
    prompt = list(engine.requests[1].prompt_ids)
    start = len(engine.requests[0].prompt_ids)
    assert prompt[start : start + 5] == odd


async def test_an_edited_answer_is_context_and_the_sampled_one_stays_trainable(session_of, rendering):
    session, _ = session_of(["answer 42", "answer 43"])
    await told(session, USER)
    await told(session, USER, {"role": "assistant", "content": "answer 41"}, user("go on"))
    first, second = (await session.close()).turns
    assert (second.parent, second.edge) == (None, Edge.BRANCH)
    assert rendering.encode("answer 41") == [t for t in second.prompt_ids if t in rendering.encode("answer 41")]
    assert first.trainable
    assert second.trainable


async def test_the_first_turn_can_be_asked_again_and_differently(session_of):
    session, _ = session_of(["answer 1", "answer 2", "answer 3", "answer 4"])
    await told(session, USER)
    await told(session, USER)
    await told(session, user("open birch"))
    await told(session, {"role": "system", "content": "s"}, USER)
    tree = await session.close()
    assert [(t.parent, t.edge) for t in tree.turns] == [
        (None, Edge.ROOT),
        (None, Edge.RETRY),
        (None, Edge.BRANCH),
        (None, Edge.BRANCH),
    ]


async def test_a_retry_that_is_continued_supersedes_the_older_answer(session_of):
    session, _ = session_of(["answer 1", "answer 2", "answer 3"])
    await told(session, USER)
    second = await told(session, USER)
    await told(session, USER, second.message, user("go on"))
    tree = await session.close()
    assert [turn.note for turn in tree.turns] == ["superseded", "", ""]
    assert tree.turns[2].parent == 1


async def test_identical_requests_in_flight_share_one_generation(session_of):
    session, engine = session_of(["answer 1", "answer 2"], latency_s=0.05)
    one, two = await asyncio.gather(session.complete(ask(USER)), session.complete(ask(USER)))
    assert one.message == two.message
    assert len(engine.requests) == 1
    assert len((await session.close()).turns) == 1


async def test_a_lost_reply_is_replayed_not_sampled_again(session_of):
    session, engine = session_of(["answer 1", "answer 2"])
    lost = await session.complete(ask(USER))
    again = await told(session, USER)
    assert again.message == lost.message
    assert len(engine.requests) == 1
    assert (await session.close()).turns[0].trainable


async def test_a_failed_attempt_is_not_remembered(session_of):
    session, _ = session_of([EngineError("boom"), "answer 1"])
    with pytest.raises(EngineError, match="boom"):
        await session.complete(ask(USER))
    assert session.engine_failure == "EngineError: boom"
    await told(session, USER)
    assert session.engine_failure is None
    assert [turn.edge for turn in (await session.close()).turns] == [Edge.ROOT]


async def test_parallel_requests_from_one_turn_are_siblings(session_of):
    session, _ = session_of(["answer 0", *(f"answer {n}" for n in range(1, 9))])
    first = await told(session, USER)
    await asyncio.gather(*(told(session, USER, first.message, user(f"open {n}")) for n in range(8)))
    tree = await session.close()
    assert [turn.parent for turn in tree.turns[1:]] == [0] * 8
    assert len({turn.output_ids for turn in tree.turns[1:]}) == 8


async def test_an_answer_nobody_received_is_not_trained(session_of):
    session, _ = session_of(["answer 1"])
    await session.complete(ask(USER))
    (turn,) = (await session.close()).turns
    assert (turn.trainable, turn.note) == (False, "undelivered")


async def test_a_client_that_leaves_aborts_the_generation_after_the_grace_time(session_of):
    session, engine = session_of(["answer 1", "answer 2"], latency_s=5)
    task = asyncio.create_task(session.complete(ask(USER)))
    await asyncio.sleep(0.02)
    assert session.waiting_for_engine
    task.cancel()
    await asyncio.sleep(0.15)
    assert engine.aborted == [engine.requests[0].id]
    (turn,) = (await session.close()).turns
    assert (turn.trainable, turn.note, turn.output_ids, turn.finish) == (False, "aborted", (), Finish.ABORT)


async def test_closing_does_not_wait_for_a_slow_engine(session_of):
    session, engine = session_of(["answer 1"], latency_s=30)
    task = asyncio.create_task(session.complete(ask(USER)))
    await asyncio.sleep(0.02)
    tree = await asyncio.wait_for(session.close(), 1)
    with pytest.raises(SessionError, match="this session has ended"):
        await task
    assert tree.turns == ()
    assert len(engine.aborted) == 1


async def test_an_ended_session_refuses_for_good(session_of):
    session, engine = session_of(["answer 1"])
    await session.close()
    with pytest.raises(SessionError) as refused:
        await session.complete(ask(USER))
    assert (refused.value.status, refused.value.code) == (400, "session_ended")
    assert engine.requests == []


async def test_a_session_has_an_end_of_life(session_of):
    session, engine = session_of(["answer 1"])
    session.expires = time.monotonic() - 1
    with pytest.raises(SessionError, match="this session has ended"):
        await session.complete(ask(USER))
    assert engine.requests == []


def generated(ids=(1, 2), logprobs=(-1.0, -1.0), versions=(0, 0), finish=Finish.STOP):
    return Generated(output_ids=ids, logprobs=logprobs, versions=versions, finish=finish)


@pytest.mark.parametrize(
    "reply",
    [
        generated(logprobs=(-1.0,)),
        generated(versions=(0, 0, 0)),
        generated(ids=(), logprobs=(), versions=()),
        generated(ids=(1, 2), logprobs=(), versions=()),
    ],
)
async def test_a_reply_whose_lists_disagree_is_refused_not_repaired(session_of, reply):
    session, _ = session_of([reply])
    with pytest.raises(EngineError, match="engine returned"):
        await session.complete(ask(USER))
    assert (await session.close()).turns == ()


async def test_an_aborted_generation_is_kept_and_asked_again(session_of):
    session, _ = session_of([generated(ids=(), logprobs=(), versions=(), finish=Finish.ABORT), "answer 1"])
    with pytest.raises(SessionError) as aborted:
        await session.complete(ask(USER))
    assert aborted.value.status == 503
    await told(session, USER)
    assert [turn.note for turn in (await session.close()).turns] == ["aborted", ""]


async def test_versions_are_kept_per_token(session_of, rendering):
    ids = tuple(rendering.encode("answer 42<|im_end|>"))
    session, _ = session_of([generated(ids=ids, logprobs=(-1.0,) * len(ids), versions=(7, *(8,) * (len(ids) - 1)))])
    await told(session, USER)
    tree = await session.close()
    assert tree.turns[0].versions == (7, *(8,) * (len(ids) - 1))
    assert tree.oldest_version == 7


async def test_limits_of_turns_tokens_and_flights(session_of):
    session, _ = session_of(["answer 1"] * 9, limits=Limits(turns=2, tokens=100))
    await told(session, user("a"))
    await told(session, user("b"))
    with pytest.raises(SessionError, match="2 model calls are used up"):
        await told(session, user("c"))
    session, _ = session_of(["answer 1"] * 9, limits=Limits(turns=9, tokens=3))
    await told(session, user("a"))
    with pytest.raises(SessionError, match="3 sampled tokens are used up"):
        await told(session, user("b"))
    session, _ = session_of(["answer 1"] * 9, latency_s=0.2, in_flight=2)
    results = await asyncio.gather(*(session.complete(ask(user(c))) for c in "abc"), return_exceptions=True)
    assert [getattr(r, "status", 200) for r in results] == [200, 200, 429]
    assert session.refused == {"rate_limit_exceeded": 1}


async def test_new_tokens_are_clamped_to_what_is_left(session_of):
    session, engine = session_of(["answer 1"] * 3, limits=Limits(tokens=10))
    await told(session, USER, max_tokens=1000)
    await told(session, user("b"), max_tokens=4)
    assert [request.max_tokens for request in engine.requests] == [10, 4]


async def test_a_prompt_that_fills_the_context_is_an_overflow(session_of, rendering):
    length = len(rendering.full([USER], []))
    session, engine = session_of(["answer 1"], context_length=length + 2)
    await told(session, USER)
    assert engine.requests[0].max_tokens == 2
    session, _ = session_of(["answer 1"], context_length=length)
    with pytest.raises(ContextOverflow, match=f"{length} tokens > {length} maximum"):
        await session.complete(ask(USER))


async def test_other_tools_start_another_root(session_of):
    from miles.sandboxes.shell import SHELL_TOOL

    session, _ = session_of(["answer 1", "answer 2"])
    first = await told(session, USER)
    await told(session, USER, first.message, user("go on"), tools=(SHELL_TOOL,))
    assert [turn.parent for turn in (await session.close()).turns] == [None, None]


async def test_the_transcript_is_the_line_of_the_newest_turn(session_of):
    session, _ = session_of([CALL, "answer 42"])
    first = await told(session, USER)
    result = {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "key 42"}
    await told(session, USER, first.message, result)
    transcript = session.transcript()
    assert (transcript.final_text, transcript.turns) == ("answer 42", 2)
    assert [m["role"] for m in transcript.messages] == ["user", "assistant", "tool", "assistant"]


async def test_the_grace_time_is_counted_from_the_last_client(session_of):
    session, engine = session_of(["answer 1"], latency_s=3.0, grace_s=1.0)
    first = asyncio.create_task(session.complete(ask(USER)))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0.7)
    second = asyncio.create_task(session.complete(ask(USER)))
    await asyncio.sleep(0.5)
    second.cancel()
    await asyncio.sleep(0.05)  # the first client's grace time is over long since
    assert (await session.complete(ask(USER))).message["content"] == "answer 1"
    assert len(engine.requests) == 1


async def test_who_asks_while_a_flight_is_given_up_gets_another(session_of):
    session, _ = session_of(["answer 1", "answer 2"], latency_s=0.1, grace_s=0)
    first = asyncio.create_task(session.complete(ask(USER)))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0)
    assert (await told(session, USER)).message["content"] in ("answer 1", "answer 2")
    assert not session.waiting_for_engine


async def test_tokens_that_calls_in_flight_hold_may_come_back(session_of):
    session, _ = session_of(["answer 1"] * 3, latency_s=1.0, limits=Limits(tokens=64))
    first = asyncio.create_task(told(session, user("a")))
    await asyncio.sleep(0.02)
    with pytest.raises(SessionError) as busy:
        await told(session, user("b"))
    assert busy.value.status == 429
    await first
    await told(session, user("b"))


async def test_an_agent_that_got_over_a_failure_has_not_failed(session_of):
    session, _ = session_of([EngineError("boom"), "answer 1"])
    with pytest.raises(EngineError):
        await told(session, USER)
    assert session.engine_failure == "EngineError: boom"
    await told(session, USER, user("shorter"))
    assert session.engine_failure is None
