"""What a recipe decides about sessions: who answers, what is trained, what is canonical, how much."""

import pytest

from miles.errors import ConfigError
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.session.canonical import freeze_clock, sort_tool_results, strip_billing
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.session import Model, Session
from miles.types import Limits
from tests.rollout.session.clients import THINK, call, user


async def test_a_model_name_can_mean_the_policy_untrained(client_of):
    async with client_of([THINK + "a", THINK + "b"], models={"*haiku*": "untrained"}) as client:
        for model in ("claude-haiku-4", "claude-opus-4"):
            reply = await client.post("chat/completions", {"model": model, "messages": [user("q")]})
            assert reply.json()["model"] == model
        turns = client.exact().turns
        assert [(turn.trainable, turn.note) for turn in turns] == [(False, "untrained"), (True, "")]
        assert [turn.parent for turn in turns] == [None, None]


async def test_a_model_name_can_mean_another_engine(thinking):
    other = ScriptedEngine(["<think>\n</think>\n\njudge"], encode=thinking.encode, stop_token=thinking.stop_ids[0])
    policy = ScriptedEngine([], encode=thinking.encode)
    config = SessionConfig(models={"judge": "judge"})
    session = Session(policy, thinking, config, others={"judge": Model(other, thinking)})
    from miles.rollout.session.session import ChatRequest

    done = await session.complete(ChatRequest(messages=(user("q"),), model="judge"))
    done.delivered()
    assert (done.message["content"], policy.requests) == ("judge", [])
    assert not session.tree().turns[0].trainable


def test_an_unknown_engine_lists_the_known_ones(thinking):
    with pytest.raises(ConfigError, match=r"'judge'; there is: policy, untrained"):
        Session(ScriptedEngine([]), thinking, SessionConfig(models={"j": "judge"}))


async def test_side_calls_are_trained_when_switched_on(client_of):
    title = {"role": "system", "content": "You are a title generator."}
    async with client_of([THINK + "a"], train_side=True) as client:
        await client.chat([title, user("q")])
        assert client.tree().turns[0].trainable


async def test_wishes_that_cannot_be_honoured_are_recorded_when_told(client_of):
    wish = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    async with client_of([THINK + "a"], wishes="record") as client:
        await client.chat([user("q")], **wish)
        assert client.tree().turns[0].asked == wish


async def test_tools_that_must_not_be_called_are_not(client_of):
    async with client_of([THINK + "no" + call("ls"), THINK + "on"]) as client:
        answer = await client.chat([user("q")], tool_choice="none")
        assert answer == {"role": "assistant", "content": "no", "reasoning_content": "let me see"}
        await client.chat([user("q"), answer, user("r")])
        assert client.shape() == [(None, "root"), (0, "extend")]


async def test_a_context_budget_is_the_sessions_own(client_of):
    async with client_of([THINK + "a"], limits=Limits(context=60)) as client:
        reply = await client.post("chat/completions", {"messages": [user("word " * 80)]})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "> 60 maximum" in reply.json()["error"]["message"]
        await client.chat([user("q")])
        request = client.engine.requests[0]
        assert len(request.prompt_ids) + request.max_tokens == 60
        models = await client.http.get(f"{client.server.url}/v1/models", headers={"x-api-key": client.session.key})
        assert models.json()["data"][0]["max_model_len"] == 60


async def test_sessions_of_the_past_are_forgotten_but_still_refused(client_of):
    async with client_of([]) as client:
        client.session.expires = 0.0
        client.server._next_sweep = 0.0
        client.server.open()
        assert client.session.id not in client.server._sessions
        assert (await client.post("chat/completions", {"messages": [user("q")]})).json()["error"][
            "code"
        ] == "session_ended"


def test_canonicalisers_change_what_they_say_and_no_more():
    billing = {"role": "system", "content": "x-anthropic-billing-header: cc_version=2.1.136;\nBe good."}
    clock = {"role": "system", "content": "CURRENT_DATETIME 2026-11-29T10:20:30.123456+00:00, since 2020"}
    said = user("x-anthropic-billing-header: 2026-11-29T10:20:30")
    assert strip_billing([billing, said]) == [{"role": "system", "content": "Be good."}, said]
    assert freeze_clock([clock, said])[0]["content"] == "CURRENT_DATETIME 2000-01-01T00:00:00, since 2020"
    assert freeze_clock([said]) == [said]
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "function": {}}, {"id": "b", "function": {}}]}
    a, b, c = ({"role": "tool", "tool_call_id": name, "content": name} for name in "abc")
    assert sort_tool_results([calls, b, c, a, said]) == [calls, a, b, c, said]
    assert sort_tool_results([b, a]) == [b, a]


async def test_an_unknown_canonicaliser_lists_the_known_ones(thinking):
    with pytest.raises(ConfigError, match="freeze_clock, sort_tool_results, strip_billing"):
        Session(ScriptedEngine([]), thinking, canonicalisers=["sort"])


@pytest.mark.slow
async def test_a_long_session_costs_each_turn_its_own_tokens(client_of, thinking):
    """2,000 turns: what is kept is linear, and the flat path is the tree's."""
    ids = thinking.encode(THINK + "ok<|im_end|>")
    engine = ScriptedEngine(lambda request: ids)
    session = Session(engine, thinking, limits=Limits(turns=2000))
    from miles.rollout.session.session import ChatRequest

    messages = [user("go")]
    for turn in range(2000):
        done = await session.complete(ChatRequest(messages=tuple(messages)))
        done.delivered()
        messages += [done.message, user(f"{turn}")]
    records = session.recorder.records
    tokens = sum(len(record.prompt) + len(record.output) for record in records.all)
    assert records.bytes <= 16 * tokens
    assert max(len(record.prompt) for record in records.all[1:]) < 30
    assert len(records.path_ids(1999)) == tokens
    tree = await session.close()
    assert [turn.parent for turn in tree.turns] == [None, *range(1999)]
    assert list(records.path_ids(1000)) == [i for t in tree.path(1000) for i in (*t.prompt_ids, *t.output_ids)]
