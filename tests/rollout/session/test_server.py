"""The chat-completions dialect over HTTP, as the official SDK and as raw clients see it."""

import asyncio
import json
import socket

import httpx
import openai
import pytest

from miles.errors import ConfigError, EngineError, EngineLost
from miles.rollout.session.server import SessionConfig, SessionServer
from miles.sandboxes.shell import SHELL_TOOL

USER = {"role": "user", "content": "open amber"}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "cat amber"}}\n</tool_call>'


def client_of(server, session, **settings):
    return openai.AsyncOpenAI(base_url=server.base_url(session), api_key=session.key, max_retries=0, **settings)


async def test_the_sdk_gets_a_tool_call_and_true_usage(serve, engine_of, rendering):
    async with serve(engine_of([CALL])) as server:
        session = server.open()
        async with client_of(server, session) as client:
            reply = await client.chat.completions.create(model="any-name", messages=[USER], tools=[SHELL_TOOL])
    choice = reply.choices[0]
    assert (reply.model, choice.finish_reason, choice.message.content) == ("any-name", "tool_calls", None)
    assert choice.message.tool_calls[0].function.arguments == '{"command": "cat amber"}'
    assert reply.usage.prompt_tokens == len(rendering.full([USER], [SHELL_TOOL]))
    assert reply.usage.completion_tokens == len(rendering.encode(CALL)) + 1


async def test_a_stream_ends_with_the_same_message_as_a_whole_reply(serve, engine_of):
    text = "the answer is 42 and more"
    async with serve(engine_of([f"{text}{CALL}"])) as server:
        session = server.open()
        async with client_of(server, session) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[USER], tools=[SHELL_TOOL], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        (turn,) = session.tree().turns
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.id) for call in calls] == [
        (0, "shell", turn.message["tool_calls"][0]["id"])
    ]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(turn.output_ids)
    assert turn.trainable


async def test_text_streams_before_the_generation_ends(serve, engine_of, rendering):
    gate = asyncio.Event()
    engine = engine_of([])

    async def generate(request, on_tokens=None):
        ids = tuple(rendering.encode("hello world<|im_end|>"))
        on_tokens(ids[:7])
        await gate.wait()
        from miles.types import Finish, Generated

        return Generated(output_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), finish=Finish.STOP)

    engine.generate = generate
    async with serve(engine) as server, client_of(server, session := server.open()) as client:
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen:
                gate.set()
        assert seen == "hello world"
        assert len(session.tree().turns) == 1


async def test_a_waiting_stream_is_kept_alive(serve, engine_of):
    async with serve(engine_of(["answer 42"], latency_s=0.3), keepalive_s=0.05) as server:
        session = server.open()
        body = {"messages": [USER], "stream": True}
        async with httpx.AsyncClient(headers={"x-api-key": session.key}) as client:
            reply = await client.post(f"{server.base_url(session)}/chat/completions", json=body)
    assert reply.status_code == 200
    assert reply.text.count(": keepalive\n\n") >= 2
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_the_turn_is_there_when_the_client_reads_the_last_event(serve, engine_of):
    async with serve(engine_of(["answer 42"] * 50)) as server:
        for _ in range(50):
            session = server.open()
            headers = {"Authorization": f"Bearer {session.key}"}
            async with (
                httpx.AsyncClient() as client,
                client.stream(
                    "POST",
                    f"{server.base_url(session)}/chat/completions",
                    json={"messages": [USER], "stream": True},
                    headers=headers,
                ) as reply,
            ):
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        break
            tree = await session.close()
            assert [turn.trainable for turn in tree.turns] == [True]
            await server.end(session)


async def test_a_client_that_disconnects_aborts_its_generation(serve, engine_of):
    engine = engine_of(["answer 42"] * 2, latency_s=20)
    async with serve(engine) as server:
        for stream in (False, True):
            session = server.open()
            async with httpx.AsyncClient(timeout=0.3, headers={"x-api-key": session.key}) as client:
                with pytest.raises(httpx.TimeoutException):
                    await client.post(
                        f"{server.base_url(session)}/chat/completions", json={"messages": [USER], "stream": stream}
                    )
            await asyncio.sleep(0.3)
            assert not session.waiting_for_engine
    assert len(engine.aborted) == 2


async def test_a_key_opens_its_own_session_by_path_or_alone_and_no_other(serve, engine_of):
    async with serve(engine_of(["answer 42"] * 3)) as server:
        mine, other = server.open(), server.open()
        body = {"messages": [USER]}
        async with httpx.AsyncClient() as client:

            async def status(path, key, method="POST"):
                reply = await client.request(
                    method, server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}
                )
                return reply.status_code, reply.json().get("error", {}).get("code")

            assert await status(f"/s/{mine.id}/v1/chat/completions", mine.key) == (200, None)
            assert await status("/v1/chat/completions", mine.key) == (200, None)
            assert await status(f"/s/{other.id}/v1/chat/completions", mine.key) == (401, "invalid_api_key")
            assert await status("/s/none/v1/chat/completions", mine.key) == (401, "invalid_api_key")
            assert await status("/v1/chat/completions", "none") == (401, "invalid_api_key")
            assert (await status(f"/s/{mine.id}/v1/generate", mine.key))[0] == 404
            assert (await status(f"/s/{mine.id}/update_weights_from_disk", mine.key))[0] == 404
            assert (await status("/v1/chat/completions", mine.key, "GET"))[0] == 405
            await server.end(mine)
            assert await status(f"/s/{mine.id}/v1/chat/completions", mine.key) == (400, "session_ended")
            assert await status("/v1/chat/completions", mine.key) == (400, "session_ended")
        assert other.tree().turns == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": "hi"}, "messages must be a non-empty list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be text or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"n": 2}, "n must be 1"),
        ({"tools": [{}]}, "tools must be a list"),
        ({"tool_choice": "required"}, "tool_choice.* cannot be honoured exactly"),
        ({"response_format": {"type": "json_object"}}, "response_format.* cannot be honoured exactly"),
        ({"stop": [5]}, "stop must be a string or a list"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer"),
        ({"max_tokens": "many"}, "max_tokens must be a positive integer"),
    ],
)
async def test_bad_requests_name_the_field_in_an_openai_envelope(serve, engine_of, change, message):
    engine = engine_of(["answer 42"])
    async with serve(engine) as server, client_of(server, server.open()) as client:
        body = {"messages": [USER], "model": "m", **change}
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.type == "invalid_request_error"
    assert engine.requests == []


async def test_bodies_that_are_no_json_or_too_large(serve, engine_of):
    async with serve(engine_of([]), max_body_mib=1) as server:
        session = server.open()
        url, headers = f"{server.base_url(session)}/chat/completions", {"x-api-key": session.key}
        async with httpx.AsyncClient(headers=headers) as client:
            assert (await client.post(url, content=b"{nope")).status_code == 400
            assert (await client.post(url, content=b"[1]")).json()["error"][
                "message"
            ] == "the body must be a JSON object"
            large = await client.post(url, content=b" " * (2 << 20))
            assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")


async def test_what_a_client_asks_of_sampling_is_recorded_not_obeyed(serve, engine_of):
    engine = engine_of(["answer 42"])
    async with serve(engine) as server, client_of(server, session := server.open()) as client:
        reply = await client.chat.completions.create(
            model="m", messages=[USER], temperature=0, logprobs=False, top_logprobs=None, seed=1, max_tokens=9999
        )
    assert reply.choices[0].logprobs is None
    asked = session.tree().turns[0].asked
    assert asked == {"temperature": 0, "logprobs": False, "seed": 1}
    assert engine.requests[0].max_tokens == 256


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures_have_their_status_also_before_a_stream(serve, engine_of, stream):
    engine = engine_of([EngineLost("gone"), EngineError("garbled")])
    async with serve(engine) as server, client_of(server, server.open()) as client:
        with pytest.raises(openai.InternalServerError) as lost:
            await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        assert (lost.value.status_code, lost.value.response.headers["retry-after"]) == (503, "1")
        with pytest.raises(openai.InternalServerError) as garbled:
            await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        assert garbled.value.status_code == 502


async def test_context_overflow_is_what_harnesses_recognise(serve, engine_of):
    async with serve(engine_of(["answer 42"], context_length=5)) as server, client_of(server, server.open()) as client:
        with pytest.raises(openai.BadRequestError, match=r"prompt is too long: \d+ tokens > 5 maximum") as overflow:
            await client.chat.completions.create(model="m", messages=[USER])
    assert overflow.value.code == "context_length_exceeded"


async def test_sdk_retries_find_the_first_answer(serve, engine_of):
    engine = engine_of([EngineLost("gone"), "answer 42"])
    async with serve(engine) as server:
        session = server.open()
        async with openai.AsyncOpenAI(base_url=server.base_url(session), api_key=session.key, max_retries=2) as client:
            reply = await client.chat.completions.create(model="m", messages=[USER])
        assert reply.choices[0].message.content == "answer 42"
        assert len(session.tree().turns) == 1


async def test_models_health_and_headers(serve, engine_of):
    async with serve(engine_of([])) as server:
        session = server.open()
        async with client_of(server, session) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
        async with httpx.AsyncClient() as client:
            for path in ("/", "/health", f"/s/{session.id}"):
                assert (await client.get(server.url + path)).json() == {"status": "ok"}
                assert (await client.head(server.url + path)).status_code == 200
            headers = (await client.get(server.url)).headers
            assert len(headers.get_list("server")) == len(headers.get_list("date")) == 1


async def test_many_sessions_never_mix(serve, engine_of, rendering):
    def answer(request):
        return [*request.prompt_ids[-8:-6], rendering.stop_ids[0]]

    async with serve(engine_of(answer)) as server:

        async def one(number):
            session = server.open()
            async with client_of(server, session) as client:
                for word in range(3):
                    messages = [{"role": "user", "content": f"open {number} {word}"}]
                    await client.chat.completions.create(model="m", messages=messages)
            tree = await session.close()
            await server.end(session)
            return [turn.messages[0]["content"] for turn in tree.turns]

        results = await asyncio.gather(*(one(n) for n in range(32)))
    assert results == [[f"open {n} {w}" for w in range(3)] for n in range(32)]


async def test_a_taken_port_says_how_to_get_a_free_one(rendering, engine_of):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"session\.port=0"):
            async with SessionServer(engine_of([]), rendering, SessionConfig(port=port)):
                pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": [{"type": "reasoning", "summary": 5}]}),
        ("responses", {"input": [{"type": "function_call", "name": "f", "call_id": [1], "arguments": 7}]}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [5]}, USER]}),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": {"name": 5}}]}),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
        ),
        ("messages", {"max_tokens": 9, "messages": [USER], "system": {"a": 1}}),
    ],
)
async def test_odd_bodies_are_the_clients_to_mend(serve, engine_of, path, body):
    async with serve(engine_of(["answer 42"])) as server, httpx.AsyncClient() as http:
        session = server.open()
        reply = await http.post(f"{server.base_url(session)}/{path}", json=body, headers={"x-api-key": session.key})
        assert reply.status_code in (200, 400), reply.text


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [100, 900])
async def test_deep_nesting_is_no_server_error(serve, engine_of, depth):
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": nested(depth)})}}
    async with serve(engine_of(["answer 42"] * 9)) as server, httpx.AsyncClient() as http:
        session = server.open()
        headers = {"x-api-key": session.key, "x-codex-turn-metadata": "[" * 5000}
        for more in ({"tools": [tool]}, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}):
            body = {"messages": [USER], **more}
            reply = await http.post(f"{server.base_url(session)}/chat/completions", json=body, headers=headers)
            assert reply.status_code in (200, 400), reply.text


async def test_keys_come_in_either_header_whatever_else_is_in_the_other(serve, engine_of):
    async with serve(engine_of(["answer 42"] * 3)) as server, httpx.AsyncClient() as http:
        session = server.open()
        for headers in (
            {"Authorization": "Basic abc", "x-api-key": session.key},
            {"Authorization": f"bearer {session.key}"},
            {"Authorization": f"Bearer  {session.key}"},
        ):
            assert (await http.get(f"{server.url}/v1/models", headers=headers)).status_code == 200


async def test_a_defect_in_mid_stream_is_told_to_the_client(serve, engine_of, rendering):
    engine = engine_of([])

    async def generate(request, on_tokens=None):
        on_tokens(tuple(rendering.encode("hello")))
        await asyncio.sleep(0.05)
        raise KeyError("meta_info")

    engine.generate = generate
    async with serve(engine) as server, client_of(server, session := server.open()) as client:
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            [chunk async for chunk in stream]
        assert "KeyError" in session.engine_failure


async def test_connections_outlive_an_agents_slow_tools(serve, engine_of):
    async with serve(engine_of(["answer 42"]), ttl_s=600) as server:
        assert server._server.config.timeout_keep_alive > 600


async def test_nothing_secret_is_logged(serve, engine_of, caplog):
    async with serve(engine_of(["answer 42"])) as server:
        session = server.open()
        async with client_of(server, session) as client:
            await client.chat.completions.create(model="m", messages=[USER])
    logged = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("miles"))
    assert session.key not in logged
    assert json.dumps(USER) not in logged
