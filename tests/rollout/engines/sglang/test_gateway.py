"""One address for many servers: bytes, stickiness, deaths, updates, workers that come and go."""

import asyncio
import base64
import contextlib
import json
import pickle

import httpx
import pytest
import uvicorn

from miles.errors import EngineError
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.rollout.engines.sglang.gateway import Gateway
from miles.rollout.engines.sglang.sampling import Sampling
from miles.types import GenerateRequest, Weights
from tests.emulators.sglang import Emulator, emulated

pytestmark = pytest.mark.slow
BODY = {"rid": "r", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 1.0}}


@contextlib.asynccontextmanager
async def gateway_of(tmp_path, *servers):
    """(the gateway, an HTTP client of its address)."""
    config = SGLangConfig(urls=tuple(server.url for server in servers), probe_s=0.05, start_s=5.0)
    gateway = Gateway(config, python=tmp_path, arguments=[], log_dir=tmp_path)
    await gateway.fleet.start()
    runner = uvicorn.Server(uvicorn.Config(gateway.app, port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(runner.serve())
    while not runner.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            yield gateway, http
    finally:
        runner.should_exit = runner.force_exit = True
        await serving
        await gateway.close()


async def test_bodies_and_answers_go_through_as_they_are(model, tmp_path):
    async with emulated(model) as server, gateway_of(tmp_path, server) as (_, http):
        reply = await http.post("/generate", json={**BODY, "return_logprob": True, "a field of tomorrow": [1, {}]})
        assert server.asked[0]["a field of tomorrow"] == [1, {}]
        assert len(reply.json()["output_ids"]) == 4
        assert "server" in reply.headers
        async with http.stream("POST", "/generate", json={**BODY, "stream": True}) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert len(lines) == 5
        assert lines[-1] == "data: [DONE]"
        assert (await http.get("/model_info")).json() == {"weight_version": "default"}
        assert (await http.get("/nothing")).status_code == 404


async def test_a_session_stays_on_its_server_and_a_dying_one_is_replaced(model, tmp_path):
    async with emulated(model) as one, emulated(model, delay_s=0.02) as two:  # noqa: SIM117
        async with gateway_of(tmp_path, one, two) as (_, http):
            for session in [*"abcdefghijkl"] * 2:
                await http.post("/generate", json=BODY | {"rid": session}, headers={"x-smg-routing-key": session})
            where = [{asked["rid"] for asked in server.asked} for server in (one, two)]
            assert where[0] | where[1] == {*"abcdefghijkl"}
            assert not where[0] & where[1]
            session = next(iter(where[1]))
            task = asyncio.create_task(http.post("/generate", json=BODY, headers={"x-miles-session": session}))
            while not two.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await two.die()
            assert (await task).status_code == 200
            states = {row["name"]: row["state"] for row in (await http.get("/workers")).json()["workers"]}
            assert states == {one.url: "up", two.url: "down"}
            metrics = (await http.get("/metrics")).text
            assert "miles_gateway_moved_total" in metrics
            assert f'miles_gateway_load{{server="{one.url}",copy="0"}}' in metrics


async def until_second(http, state):
    """Wait until the second worker is in a state."""
    async with asyncio.timeout(10):
        while (await http.get("/workers")).json()["workers"][1]["state"] != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_updates_reach_all_and_a_server_that_comes_back_is_told_them_first(model, tmp_path):
    async with emulated(model) as one, emulated(model) as two, gateway_of(tmp_path, one, two) as (gateway, http):
        update = {"model_path": str(model), "weight_version": "5", "flush_cache": False}
        assert (await http.post("/update_weights_from_disk", json=update)).json()["success"] is True
        assert (one.version, two.version) == ("5", "5")
        await two.die()
        fresh = Emulator(model)
        await until_second(http, "down")
        async with fresh.served(port=two.port):
            await until_second(http, "up")
            assert fresh.version == "5"
            refused = {"model_path": "/no/such", "weight_version": "6"}
            reply = await http.post("/update_weights_from_disk", json=refused)
            assert reply.status_code == 502
            assert set(reply.json()["servers"]) == {one.url, two.url}
            part = {"serialized_named_tensors": [EMPTY], "weight_version": "7"}
            assert (await http.post("/update_weights_from_tensor", json=part)).status_code == 200
        assert gateway._whole is False  # nobody could tell a new server what it was: it waits for a whole update


EMPTY = base64.b64encode(pickle.dumps([])).decode()


async def test_a_client_of_one_server_works_through_the_gateway(model, tmp_path):
    async with emulated(model) as one, emulated(model) as two, gateway_of(tmp_path, one, two) as (_, http):
        client = SGLangClient(str(http.base_url), follow=True)
        await client.start()
        await client.load(Weights(version=8, directory=model))
        assert (one.version, two.version) == ("8", "8")
        sampling = Sampling(GenerateRequest(id="r", session="s", prompt_ids=[5, 6], max_tokens=3))
        await client.sample(sampling, headers={"x-miles-session": "s"})
        assert sampling.generated().versions == (8, 8, 8)
        await client.close()


async def test_an_engine_behind_a_router_updates_the_servers_and_generates_through_it(model, tmp_path):
    async with emulated(model, delay_s=0.01) as one, emulated(model, delay_s=0.01) as two:  # noqa: SIM117
        async with gateway_of(tmp_path, one, two) as (_, http):
            settings = {"urls": (one.url, two.url), "router": str(http.base_url), "probe_s": 0.1, "start_s": 5.0}
            engine = SGLangEngine(tmp_path, tmp_path, SGLangConfig(**settings))
            await engine.start()
            await engine.load(Weights(version=1, directory=model))
            asked = [GenerateRequest(id=f"r{n}", session=f"s{n}", prompt_ids=[5, 6], max_tokens=30) for n in range(8)]
            tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
            while one.in_flight + two.in_flight < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await engine.load(Weights(version=2, directory=model))
            done = await asyncio.gather(*tasks)
            assert all(len(found.output_ids) == 30 for found in done)
            assert {version for found in done for version in found.versions} == {1, 2}
            assert one.asked
            assert two.asked
            with pytest.raises(EngineError, match=r"leave engine\.sglang\.router empty"):
                await engine.load(Weights(version=3, directory=model, adapter="policy"))
            await engine.close()


async def test_a_client_that_goes_is_let_go(model, tmp_path):
    async with emulated(model, delay_s=0.05) as server, gateway_of(tmp_path, server) as (gateway, http):
        body = BODY | {"sampling_params": {"max_new_tokens": 500, "temperature": 1.0}}
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/generate", json=body, timeout=0.5)
        (seat,) = gateway.fleet.placement.seats()
        async with asyncio.timeout(5):
            while seat.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_copy_that_has_the_sessions_cache_is_named_to_the_server(model, tmp_path):
    async with emulated(model, copies=2) as server, gateway_of(tmp_path, server) as (_, http):
        for n in range(12):
            await http.post("/generate", json=BODY, headers={"x-miles-session": f"s{n % 6}"})
        copies = [asked["routed_dp_rank"] for asked in server.asked]
        assert set(copies) == {0, 1}
        assert copies[:6] == copies[6:]


async def test_workers_come_drain_and_go(model, tmp_path):
    async with emulated(model) as one, emulated(model) as two, gateway_of(tmp_path, one) as (_, http):
        assert (await http.post("/workers", json={"url": two.url + "/"})).status_code == 200
        assert (await http.post("/workers", json={"url": two.url})).status_code == 400
        await http.post("/workers/drain", json={"name": one.url})
        for n in range(4):
            await http.post("/generate", json=BODY, headers={"x-miles-session": f"s{n}"})
        assert (len(one.asked), len(two.asked)) == (0, 4)
        assert (await http.request("DELETE", f"/workers/{two.url}")).json() == {"success": True}
        assert (await http.request("DELETE", "/workers/nobody")).status_code == 404
        names = [row["name"] for row in (await http.get("/workers")).json()["workers"]]
        assert names == [one.url]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_server_has_places_of_its_own_in_a_process_group(ranks):
    from types import SimpleNamespace

    from miles.rollout.engines.sglang.gateway import _group_places

    members = [SimpleNamespace(facts=SimpleNamespace(ranks=ranks)) for _ in range(3)]
    bodies = [json.loads(body) for body in _group_places(members, b'{"rank_offset": 1, "world_size": 7}')]
    assert [body["rank_offset"] for body in bodies] == [1, 1 + ranks, 1 + 2 * ranks]
