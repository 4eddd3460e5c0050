"""The environment's tools over MCP, by the protocol's own client, and as one plain request."""

import asyncio

import httpx
import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from miles.envs.base import ACT_TOOL, BaseEnv
from miles.envs.toy import GuessNumberTaskset
from miles.errors import EnvError
from miles.harnesses.base import EnvTools
from miles.types import Step


@pytest.fixture
async def http():
    async with httpx.AsyncClient() as client:
        yield client


@pytest.fixture
async def open_tools(serve, engine_of, http):
    """A session whose environment guesses numbers (the secret is 36): (session, URL of its tools)."""
    async with serve(engine_of([])) as server:

        async def make(env=None):
            session = server.open()
            env = env or GuessNumberTaskset().env(GuessNumberTaskset().task("train", 30), None)
            session.tools = EnvTools(env, (await env.reset()).tools or (ACT_TOOL,))
            return session, f"{server.url}/s/{session.id}/mcp"

        yield make


def call(name="act", **arguments):
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


async def post(http, url, session, body, key=None):
    headers = {"Authorization": f"Bearer {key or session.key}", "Accept": "application/json, text/event-stream"}
    return await http.post(url, json=body, headers=headers)


async def told(http, url, session, body):
    """(Text, whether it is an error) of a call."""
    result = (await post(http, url, session, body)).json()["result"]
    return result["content"][0]["text"], result.get("isError", False)


async def test_the_protocols_own_client_lists_and_calls(open_tools):
    session, url = await open_tools()
    keyed = httpx2.AsyncClient(headers={"Authorization": f"Bearer {session.key}"})
    async with keyed, Client(streamable_http_client(url, http_client=keyed)) as client:
        listed = await client.list_tools()
        assert [(tool.name, tool.input_schema["required"]) for tool in listed.tools] == [("act", ["action"])]
        first = await client.call_tool("act", {"action": "50"})
        assert first.content[0].text == "lower"
        last = await client.call_tool("act", {"action": "36"})
        assert last.content[0].text == "right\n[The episode is over.]"
    assert session.tools.over


async def test_one_plain_request_is_enough_and_nothing_counts_after_the_end(open_tools, http):
    session, url = await open_tools()
    assert await told(http, url, session, call(action="1")) == ("higher", False)
    assert await told(http, url, session, call("look", action="1")) == ("there is no tool 'look'; offered: act", True)
    assert (await told(http, url, session, call(action="36")))[0].startswith("right")
    assert await told(http, url, session, call(action="1")) == (
        "The episode is over: no action changes it any more.",
        False,
    )


async def test_the_key_opens_its_own_environment_only(open_tools, http):
    (one, url), (other, _) = await open_tools(), await open_tools()
    assert (await post(http, url, one, call(action="1"), key=other.key)).status_code == 401
    assert (await post(http, url, one, call(action="1"), key="sk-none")).status_code == 401
    short = url.replace(f"/s/{one.id}", "")  # the key alone names the session
    assert (await told(http, short, other, call(action="36")))[0].startswith("right")
    assert (other.tools.over, one.tools.over) == (True, False)


async def test_a_broken_environment_is_remembered_and_told_without_its_words(open_tools, http):
    class Broken(BaseEnv):
        async def step(self, action):
            raise EnvError("the secret is 36")

    session, url = await open_tools(Broken(GuessNumberTaskset().task("train", 30)))
    text, is_error = await told(http, url, session, call(action="1"))
    assert (text, is_error) == ("the environment failed; the episode ends here", True)
    assert str(session.tools.failure) == "the secret is 36"


async def test_a_session_without_an_environment_offers_nothing(serve, engine_of, http):
    async with serve(engine_of([])) as server:
        session = server.open()
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        reply = await post(http, f"{server.url}/s/{session.id}/mcp", session, body)
        assert reply.json()["result"]["tools"] == []
        await server.end(session)
        gone = await post(http, f"{server.url}/s/{session.id}/mcp", session, body)
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "session_ended")


async def stepping(open_tools, http):
    """(Session, URL, the call in flight, what ends its step, whether it was cancelled)."""
    going, may_end, cancelled = asyncio.Event(), asyncio.Event(), []

    class Slow(BaseEnv):
        async def step(self, action):
            going.set()
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                cancelled.append(action)
                raise
            return Step(observation="done")

    session, url = await open_tools(Slow(GuessNumberTaskset().task("train", 30)))
    first = asyncio.create_task(post(http, url, session, call(action="1")))
    await going.wait()
    return session, url, first, may_end, cancelled


async def test_a_step_in_flight_is_waited_for_at_the_end_and_none_comes_after(open_tools, http):
    session, url, first, may_end, cancelled = await stepping(open_tools, http)
    closing = asyncio.create_task(session.tools.close(5))
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert (await first).json()["result"]["content"][0]["text"] == "done"
    assert (await told(http, url, session, call(action="2")))[0].startswith("The agent's time is over")
    assert cancelled == []


async def test_a_step_that_does_not_end_in_time_does_not_outlive_the_episode(open_tools, http):
    session, _, first, _, cancelled = await stepping(open_tools, http)
    with pytest.raises(TimeoutError):
        await session.tools.close(0.05)
    await first
    assert cancelled == ["1"]
