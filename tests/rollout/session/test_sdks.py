"""The official SDKs against the session server: streams, parallel calls, typed errors, retries."""

import asyncio
import contextlib
import json

import anthropic
import httpx
import openai
import pytest

from miles.errors import EngineError, EngineLost
from tests.rollout.session.clients import SHELL, SHELL_ANTHROPIC, SHELL_RESPONSES, THINK, call, user
from tests.rollout.session.conftest import events, until

TEXT = THINK + "the answer is 42"
CALLS = THINK + "look" + call("cat a") + call("cat b")


@contextlib.asynccontextmanager
async def sdk(client_of, script, kind, **settings):
    async with client_of(script, **settings) as client:
        key, url = client.session.key, f"{client.server.url}/s/{client.session.id}"
        make = openai.AsyncOpenAI if kind == "openai" else anthropic.AsyncAnthropic
        base = f"{url}/v1" if kind == "openai" else url
        async with make(api_key=key, base_url=base, max_retries=settings.get("retries", 0)) as it:
            yield it, client


async def test_anthropic_messages_and_its_stream_say_the_same(client_of):
    options = {"model": "claude-any", "max_tokens": 500, "tools": [SHELL_ANTHROPIC], "system": "Be good."}
    async with sdk(client_of, [CALLS, CALLS], "anthropic") as (it, client):
        whole = await it.messages.create(messages=[user("a")], **options)
        async with it.messages.stream(messages=[user("b")], **options) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert (message.model, message.role, message.stop_reason) == ("claude-any", "assistant", "tool_use")
            thinking, text, one, two = message.content
            assert (thinking.thinking, text.text) == ("let me see", "look")
            assert (one.input, two.input) == ({"command": "cat a"}, {"command": "cat b"})
            assert one.id != two.id
            assert one.id.startswith("toolu_")
            turn = client.session.recorder.records[0 if message is whole else 1]
            assert thinking.signature == turn.token
            assert message.usage.input_tokens == turn.prompt_tokens
            assert message.usage.output_tokens == len(turn.output)
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"


async def test_anthropic_events_come_in_the_strictest_order(client_of):
    async with client_of([CALLS]) as client:
        reply = await client.post(
            "messages", {"max_tokens": 500, "messages": [user("a")], "tools": [SHELL_ANTHROPIC], "stream": True}
        )
    names = [name for name, data in events(reply.text) if data["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    runs = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert runs == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events(reply.text))
    deltas = [data["delta"]["type"] for name, data in events(reply.text) if name == "content_block_delta"]
    assert deltas[deltas.index("signature_delta") - 1] == "thinking_delta"
    indexes = [data["index"] for name, data in events(reply.text) if name == "content_block_start"]
    assert indexes == [0, 1, 2, 3]


async def test_anthropic_counts_tokens_as_they_would_be_sampled(client_of):
    async with sdk(client_of, [TEXT], "anthropic") as (it, client):
        counted = await it.messages.count_tokens(model="m", messages=[user("a")], tools=[SHELL_ANTHROPIC])
        assert client.engine.requests == []
        done = await it.messages.create(model="m", max_tokens=99, messages=[user("a")], tools=[SHELL_ANTHROPIC])
        assert counted.input_tokens == done.usage.input_tokens


async def test_anthropic_stop_sequences(client_of):
    async with sdk(client_of, [THINK + "one two STOP three", TEXT], "anthropic") as (it, client):
        done = await it.messages.create(model="m", max_tokens=99, messages=[user("a")], stop_sequences=["STOP"])
        assert (done.stop_reason, done.stop_sequence, done.content[-1].text) == ("stop_sequence", "STOP", "one two ")
        kept = client.session.recorder.records[0]
        assert 0 < len(kept.output) < len(client.server._rendering.encode(THINK + "one two STOP three"))
        said = [user("a"), {"role": "assistant", "content": done.content}, user("b")]
        await it.messages.create(model="m", max_tokens=99, messages=said)
        assert client.shape() == [(None, "root"), (0, "extend")]
        client.exact()


async def test_openai_stop_strings_in_a_stream_never_show(client_of):
    async with sdk(client_of, [THINK + "one two STOP three"], "openai") as (it, _):
        stream = await it.chat.completions.create(model="m", messages=[user("a")], stop=["STOP", "\n\n"], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "one two "


async def test_responses_and_their_stream_say_the_same(client_of):
    async with sdk(client_of, [CALLS, CALLS], "openai") as (it, client):
        whole = await it.responses.create(model="m", input="a", tools=[SHELL_RESPONSES])
        async with it.responses.stream(model="m", input="b", tools=[SHELL_RESPONSES]) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for place, response in enumerate((whole, streamed)):
            reasoning, message, one, two = response.output
            assert reasoning.summary[0].text == "let me see"
            assert (message.content[0].text, response.output_text) == ("look", "look")
            assert (one.arguments, two.arguments) == ('{"command": "cat a"}', '{"command": "cat b"}')
            turn = client.session.recorder.records[place]
            assert reasoning.encrypted_content == turn.token
            assert response.usage.input_tokens == turn.prompt_tokens
            assert response.status == "completed"
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 4


async def test_responses_go_on_from_a_previous_one(client_of):
    async with sdk(client_of, [TEXT] * 3, "openai") as (it, client):
        one = await it.responses.create(model="m", input="a", instructions="Be good.")
        two = await it.responses.create(model="m", input="b", instructions="Be good.", previous_response_id=one.id)
        three = await it.responses.create(model="m", input="c", previous_response_id=two.id)
        assert client.shape() == [(None, "root"), (0, "extend"), (None, "branch")]
        roles = [message["role"] for message in client.exact().turns[2].messages]
        assert roles == ["user", "assistant", "user", "assistant", "user"]  # instructions are not inherited
        stored = await it.responses.retrieve(three.id)
        assert stored.output_text == three.output_text
        with pytest.raises(openai.BadRequestError) as refused:
            await it.responses.create(model="m", input="c", previous_response_id="resp_none")
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            await it.responses.retrieve("resp_none")


async def test_responses_tools_of_other_kinds(client_of):
    patch = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin"}})
    spawn = json.dumps({"name": "spawn", "arguments": {}})
    script = [THINK + f"<tool_call>\n{patch}\n</tool_call><tool_call>\n{spawn}\n</tool_call>", TEXT]
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {"type": "text"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
        {"type": "web_search"},
    ]
    async with client_of(script) as client:
        reply = await client.responses("edit", tools=tools)
        _, custom, spawned = reply["output"]
        assert (custom["type"], custom["input"]) == ("custom_tool_call", "*** Begin")
        assert (spawned["type"], spawned["namespace"]) == ("function_call", "agents")
        assert client.tree().turns[0].asked == {"tools_dropped": ["web_search"]}
        outputs = [
            {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "ok"},
            {
                "type": "function_call_output",
                "call_id": spawned["call_id"],
                "output": [{"type": "input_text", "text": "up"}],
            },
        ]
        await client.responses([user("edit"), *reply["output"], *outputs], tools=tools)
        assert client.shape() == [(None, "root"), (0, "extend")]


@pytest.mark.parametrize(
    ("failure", "openais", "anthropics"),
    [
        (EngineLost("gone"), openai.InternalServerError, anthropic.InternalServerError),
        (EngineError("garbled"), openai.InternalServerError, anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures_are_typed_in_each_sdk(client_of, failure, openais, anthropics, stream):
    async with sdk(client_of, [failure] * 3, "openai") as (it, _):
        with pytest.raises(openais):
            await it.chat.completions.create(model="m", messages=[user("a")], stream=stream)
        with pytest.raises(openais):
            await it.responses.create(model="m", input="a", stream=stream)
    async with sdk(client_of, [failure], "anthropic") as (it, _):
        with pytest.raises(anthropics):
            await it.messages.create(model="m", max_tokens=9, messages=[user("a")], stream=stream)


async def test_other_errors_are_typed_in_each_sdk(client_of):
    async with sdk(client_of, [TEXT], "anthropic", latency_s=1.5, in_flight=1) as (it, client):
        with pytest.raises(anthropic.BadRequestError, match="messages must be a non-empty list"):
            await it.messages.create(model="m", max_tokens=9, messages=[])
        with pytest.raises(anthropic.AuthenticationError):
            await it.with_options(api_key="sk-no").messages.create(model="m", max_tokens=9, messages=[user("a")])
        with pytest.raises(anthropic.BadRequestError, match="cannot be honoured"):
            await it.messages.create(model="m", max_tokens=9, messages=[user("a")], tool_choice={"type": "any"})
        first = asyncio.create_task(it.messages.create(model="m", max_tokens=9, messages=[user("a")]))
        await until(lambda: client.session.waiting_for_engine)
        with pytest.raises(anthropic.RateLimitError, match="in flight"):
            await it.messages.create(model="m", max_tokens=9, messages=[user("b")])
        await first
    async with sdk(client_of, [TEXT], "openai", context_length=5) as (it, _):
        with pytest.raises(openai.BadRequestError) as overflow:
            await it.responses.create(model="m", input="a")
        assert overflow.value.code == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
async def test_a_failure_in_mid_stream_is_an_error_event(client_of, thinking, kind):
    ids = tuple(thinking.encode(THINK + "half of it"))

    async def generate(request, on_tokens=None):
        on_tokens(ids)
        await asyncio.sleep(0.1)
        raise EngineLost("gone")

    async with sdk(client_of, [], "anthropic" if kind == "messages" else "openai") as (it, client):
        client.engine.generate = generate
        if kind == "messages":
            with pytest.raises(anthropic.APIStatusError, match="gone"):
                async with it.messages.stream(model="m", max_tokens=9, messages=[user("a")]) as stream:
                    await stream.until_done()
        elif kind == "chat":
            stream = await it.chat.completions.create(model="m", messages=[user("a")], stream=True)
            with pytest.raises(openai.APIError, match="gone"):
                [chunk async for chunk in stream]
        else:
            stream = await it.responses.create(model="m", input="a", stream=True)
            last = [event async for event in stream][-1]
            assert (last.type, last.response.error.message) == ("response.failed", "gone")
        assert client.tree().turns == ()
        assert client.session.engine_failure == "EngineLost: gone"


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_sdk_retries_make_one_turn(client_of, kind):
    async with sdk(client_of, [EngineLost("gone"), TEXT], kind) as (it, client):
        it = it.with_options(max_retries=2)
        if kind == "openai":
            assert (await it.responses.create(model="m", input="a")).output_text == "the answer is 42"
        else:
            done = await it.messages.create(model="m", max_tokens=99, messages=[user("a")])
            assert done.content[-1].text == "the answer is 42"
        assert client.shape() == [(None, "root")]


async def test_both_sdks_list_the_models(client_of):
    async with sdk(client_of, [], "openai") as (it, _):
        assert [model.id async for model in it.models.list()] == ["policy"]
        assert (await it.models.retrieve("claude-any")).id == "claude-any"
    async with sdk(client_of, [], "anthropic") as (it, _):
        assert [model.id async for model in it.models.list()] == ["policy"]
        assert (await it.models.retrieve("any/name")).id == "any/name"


async def test_bodies_may_be_compressed(client_of):
    import gzip
    import zlib

    async with client_of([TEXT, TEXT]) as client:
        url = f"{client.server.base_url(client.session)}/chat/completions"

        async def send(body, encoding):
            headers = {"x-api-key": client.session.key, "content-encoding": encoding}
            return await client.http.post(url, content=body, headers=headers)

        body = json.dumps({"messages": [user("a")]}).encode()
        assert (await send(gzip.compress(body), "gzip")).status_code == 200
        assert (await send(zlib.compress(body), "deflate")).status_code == 200
        assert (await send(b"no gzip", "gzip")).status_code == 400
        assert (await send(body, "br")).status_code == 415
    async with client_of([], max_body_mib=1) as client:
        url = f"{client.server.base_url(client.session)}/chat/completions"
        bomb = gzip.compress(b" " * (2 << 20))
        reply = await client.http.post(
            url, content=bomb, headers={"x-api-key": client.session.key, "content-encoding": "gzip"}
        )
        assert reply.status_code == 413


async def test_health_paths_need_no_key(client_of):
    async with client_of([]) as client, httpx.AsyncClient(base_url=client.server.url) as http:
        for path in ("/", "/health", "/api/hello", f"/s/{client.session.id}/api/hello"):
            assert (await http.get(path)).status_code == (await http.head(path)).status_code == 200
        assert (await http.get("/openapi.json")).json()["openapi"] == "3.1.0"


def test_the_tools_of_the_three_dialects_are_one(client_of):
    assert SHELL["function"]["parameters"] == SHELL_ANTHROPIC["input_schema"] == SHELL_RESPONSES["parameters"]
