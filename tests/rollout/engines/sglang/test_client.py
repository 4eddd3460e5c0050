"""The SGLang client against a server that speaks the wire format: whole and streamed, versions, faults, aborts."""

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from miles.errors import ConfigError, EngineError, EngineLost
from miles.rollout.engines.sglang.client import SGLangClient
from miles.types import BroadcastPlan, Finish, GenerateRequest, Weights

IDS = [5, 6, 7, 8]
CALLS = ["pause_generation", "continue_generation", "update_weights_from_disk", "update_weights_from_distributed"]
CALLS += ["init_weights_update_group", "load_lora_adapter", "unload_lora_adapter", "update_weight_version"]
NEWER = ["begin_weight_update", "end_weight_update"]


def answer(ids=IDS, *, finish="stop", **meta):
    pairs = [[-0.5 - place, token, None] for place, token in enumerate(ids)]
    told = {
        "finish_reason": {"type": finish},
        "completion_tokens": len(ids),
        "cached_tokens": 3,
        "output_token_logprobs": pairs,
        "weight_version": "7",
    }
    return {"text": "", "output_ids": list(ids), "meta_info": {**told, **meta}}


class Server:
    """Answers as it is told; keeps what it was asked."""

    def __init__(self, newer=False):
        self.asked, self.aborted, self.calls = [], [], []
        self.has_asked, self.has_aborted = asyncio.Event(), asyncio.Event()
        self.versions, self.version = [], "4"
        self.reply, self.status, self.incremental, self.hang = answer(), 200, False, None
        self.app = Starlette(
            routes=[
                Route("/server_info", self.info),
                Route("/get_model_info", lambda r: JSONResponse({"weight_version": self.version})),
                Route("/v1/models", lambda r: JSONResponse({"data": [{"max_model_len": 2000}]})),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
                *(Route(f"/{name}", self.other, methods=["POST"]) for name in (*CALLS, *(NEWER if newer else ()))),
            ]
        )

    async def info(self, request):
        return JSONResponse(
            {"enable_lora": True, "context_length": None, "max_total_num_tokens": 20000, "model_path": "/m"}
        )

    async def generate(self, request):
        body = await request.json()
        self.asked.append(body)
        self.has_asked.set()
        if self.hang is not None:
            await self.hang.wait()
        if not body["stream"] or self.status != 200:
            return JSONResponse(self.reply, status_code=self.status)
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self):
        ids = self.reply["output_ids"]
        for end in range(1, len(ids) + 1):
            first = end - 1 if self.incremental else 0
            part = {**self.reply, "output_ids": ids[first:end]}
            pairs = self.reply["meta_info"]["output_token_logprobs"][first:end]
            finish = self.reply["meta_info"]["finish_reason"] if end == len(ids) else None
            version = self.versions[end - 1] if self.versions else "4"
            meta = {**self.reply["meta_info"], "completion_tokens": end, "finish_reason": finish}
            meta["weight_version"] = version
            yield f"data: {json.dumps({**part, 'meta_info': {**meta, 'output_token_logprobs': pairs}})}\n\n"
        yield "data: [DONE]\n\n"

    async def abort(self, request):
        self.aborted.append((await request.json())["rid"])
        self.has_aborted.set()
        return JSONResponse({})

    async def other(self, request):
        name, body = request.url.path[1:], await request.json()
        self.calls.append((name, body))
        self.version = body.get("weight_version") or body.get("new_version") or self.version
        return JSONResponse({"success": True})


@contextlib.asynccontextmanager
async def serving(server):
    """The server on a free port; yields its base URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        runner = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))
        task = asyncio.create_task(runner.serve(sockets=[sock]))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        runner.should_exit = runner.force_exit = True
        await task


@pytest.fixture
async def pair():
    async with serving(server := Server()) as url:
        engine = SGLangClient(url + "/", follow=True, on_update="retract")
        await engine.start()
        yield engine, server
        await engine.close()


def request(**more):
    return GenerateRequest(
        id="r1", session="s", prompt_ids=[1, 2, 3], **{"max_tokens": 9, "stop_token_ids": (8,), **more}
    )


async def test_what_is_asked_and_what_comes_back(pair):
    engine, server = pair
    assert (engine.context_length, engine.version, engine.model_path) == (2000, 4, "/m")
    done = await engine.generate(request())
    assert (done.output_ids, done.logprobs) == (tuple(IDS), (-0.5, -1.5, -2.5, -3.5))
    assert (done.finish, done.cached_tokens) == (Finish.STOP, 3)
    asked = server.asked[0]
    assert (asked["input_ids"], asked["return_logprob"]) == ([1, 2, 3], True)
    assert asked["rid"].endswith("-r1")
    assert asked["sampling_params"]["stop_token_ids"] == [8]
    assert (asked["sampling_params"]["temperature"], asked["sampling_params"]["top_k"]) == (1.0, -1)


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_gives_the_ids_so_far_whichever_way_the_server_sends_them(pair, incremental):
    engine, server = pair
    server.incremental = incremental
    seen = []
    done = await engine.generate(request(), seen.append)
    assert seen == [tuple(IDS[:end]) for end in range(1, 5)]
    assert done == await engine.generate(request())


async def test_spans_give_each_token_its_version_and_without_them_the_oldest_counts(pair):
    engine, server = pair
    spans = [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 4}]
    server.reply = answer(weight_versions=spans)
    assert (await engine.generate(request())).versions == (4, 4, 4, 5)
    server.reply = answer(weight_version="9")
    assert (await engine.generate(request())).versions == (4,) * 4


async def test_a_stream_tells_each_tokens_version(pair):
    engine, server = pair
    server.versions = ["4", "4", "5", "5"]
    assert (await engine.generate(request(), lambda ids: None)).versions == (4, 4, 5, 5)


async def test_an_error_inside_a_stream_is_the_engines(pair):
    engine, server = pair

    async def events():
        yield 'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'

    server.events = events
    with pytest.raises(EngineError, match="SGLang: too long"):
        await engine.generate(request(), lambda ids: None)


async def test_an_aborted_request_keeps_what_was_sampled(pair):
    engine, server = pair
    server.reply = answer([5, 6], finish="abort")
    done = await engine.generate(request())
    assert (done.output_ids, done.finish) == ((5, 6), Finish.ABORT)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(completion_tokens=12), "for 12 completion tokens"),
        (answer(output_token_logprobs=[[-1.0, 5, None]]), "4 ids and 1 logprobs"),
        (answer(output_token_logprobs=None), "4 ids and 0 logprobs"),
        (answer(output_token_logprobs=[[-1.0, t, None] for t in (5, 6, 7, 9)]), "logprobs of other tokens"),
    ],
)
async def test_replies_that_disagree_with_themselves_are_refused(pair, reply, message):
    engine, server = pair
    server.reply = reply
    with pytest.raises(EngineError, match=message):
        await engine.generate(request())


@pytest.mark.parametrize("stream", [None, lambda ids: None])
@pytest.mark.parametrize(("status", "kind"), [(400, EngineError), (503, EngineLost)])
async def test_http_errors_say_whether_to_try_again(pair, status, kind, stream):
    engine, server = pair
    server.status = status
    with pytest.raises(kind, match=f"SGLang answered {status}"):
        await engine.generate(request(), stream)


async def test_cancelling_aborts_on_the_server(pair):
    engine, server = pair
    server.hang = asyncio.Event()
    task = asyncio.create_task(engine.generate(request()))
    await asyncio.wait_for(server.has_asked.wait(), 5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.has_aborted.wait(), 5)
    assert server.aborted == [server.asked[0]["rid"]]
    server.hang.set()


async def test_new_weights_are_loaded_while_requests_pause(pair, tmp_path):
    engine, server = pair
    await engine.load(Weights(version=5, directory=tmp_path))
    assert [name for name, _ in server.calls] == [
        "pause_generation",
        "update_weights_from_disk",
        "continue_generation",
    ]
    assert server.calls[1][1]["weight_version"] == "5"
    assert server.calls[1][1]["flush_cache"] is False
    assert engine.version == 5


async def test_each_version_has_a_part_of_the_prefix_cache_of_its_own(pair, tmp_path):
    engine, server = pair
    await engine.generate(request())
    await engine.load(Weights(version=5, directory=tmp_path))
    await engine.generate(request())
    keys = [asked["extra_key"] for asked in server.asked]
    assert [key[-2:] for key in keys] == ["v4", "v5"]
    assert keys[0][:-2] == keys[1][:-2] != ""  # and each client: an earlier run had a version 4 too


async def test_an_adapter_has_a_new_name_for_every_version_and_the_old_ones_go(pair, tmp_path):
    engine, server = pair
    for version in (5, 6, 7):
        await engine.load(Weights(version=version, directory=tmp_path, adapter="policy"))
    done = await engine.generate(request())
    assert done.versions == (7, 7, 7, 7)  # the server knows only its base's
    loaded = [body["lora_name"] for name, body in server.calls if name == "load_lora_adapter"]
    assert [name.rpartition("-")[2] for name in loaded] == ["v5", "v6", "v7"]
    assert server.asked[0]["lora_path"] == loaded[-1]
    assert [body["lora_name"] for name, body in server.calls if name == "unload_lora_adapter"] == loaded[:1]
    await engine.close()
    assert [body["lora_name"] for name, body in server.calls if name == "unload_lora_adapter"] == loaded


@pytest.mark.parametrize("newer", [False, True])
async def test_a_broadcast_is_received_between_the_calls_that_newer_servers_want(newer):
    async with serving(server := Server(newer)) as url:
        engine = SGLangClient(url, on_update="retract")
        await engine.start()
        assert server.calls == [("continue_generation", {})]  # whoever was there before may have left it paused
        server.calls.clear()
        await received(engine, server, newer)
        await engine.close()


async def received(engine, server, newer):
    where = {"group": "g", "address": "127.0.0.1", "port": 9, "world": 2, "backend": "gloo"}
    plan = BroadcastPlan(**where, names=("w",), dtypes=("bfloat16",), shapes=((8,),))
    for version in (5, 6):
        await engine.load(Weights(version=version, broadcast=plan))
    update = ["update_weights_from_distributed"]
    update = ["begin_weight_update", *update, "end_weight_update"] if newer else update
    update = ["pause_generation", *update, "continue_generation"]
    assert [name for name, _ in server.calls] == ["init_weights_update_group", *update, *update]
    assert server.calls[0][1]["world_size"] == 2
    told = next(body for name, body in server.calls if name == "update_weights_from_distributed")
    assert told | {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[8]]} == told
    assert engine.version == 6


async def test_a_server_that_is_not_there_is_named():
    engine = SGLangClient("http://127.0.0.1:9", start_s=0.1)
    with pytest.raises(ConfigError, match=r"no SGLang server answers at http://127\.0\.0\.1:9"):
        await engine.start()
    await engine.close()


async def test_a_server_that_has_gone_is_lost():
    async with serving(Server()) as url:
        engine = SGLangClient(url)
        await engine.start()
    with pytest.raises(EngineLost, match="is gone"):
        await engine.generate(request())
    assert not await engine.serves()
    await engine.close()
