"""Many servers as one engine: updates in mid-flight, deaths, joining, routing by session, recorded experts."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.deltas import Snapshot, write_delta
from miles.errors import ConfigError, EngineError, EngineLost
from miles.models import load_model
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.routing import decode_routing
from miles.types import BroadcastPlan, Finish, GenerateRequest, Weights
from tests.emulators.sglang import Emulator, emulated

PROMPT = [5, 6, 7, 8]


def request(name="r", session="s", *, prompt=PROMPT, tokens=12, routing_from=0):
    return GenerateRequest(id=name, session=session, prompt_ids=prompt, max_tokens=tokens, routing_from=routing_from)


def engine_of(tmp_path, *servers, **settings):
    urls = tuple(server.url for server in servers)
    config = SGLangConfig(urls=urls, probe_s=0.05, start_s=5.0, **settings)
    return SGLangEngine(tmp_path, tmp_path / "logs", config)


def snapshot(model, tmp_path, version):
    """Weights that differ from those of every other version."""
    directory = tmp_path / f"v{version}"
    directory.mkdir()
    tensors = dict(load_model(model).state_dict())
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + version)
    tensors.pop("lm_head.weight", None)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Weights(version=version, directory=directory)


def logprobs_of(model, weights, ids, *, start):
    """What the weights say about `ids` from `start` on."""
    judge = load_model(model)
    judge.load_state_dict(load_file(weights.directory / "model.safetensors"), strict=False)
    judge.tie_weights()
    with torch.no_grad():
        logprobs = torch.log_softmax(judge(input_ids=torch.tensor([ids])).logits[0], -1)
    return [float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))]


async def until(true):
    """Wait, not for ever."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.005)


async def begun(*servers):
    """Wait until one of the servers has sampled a few tokens more."""
    before = [server.sampled for server in servers]
    await until(lambda: any(server.sampled > count + 3 for server, count in zip(servers, before, strict=True)))


def serving(engine, count):
    return lambda: engine.counters()["engine/servers"] == count


@pytest.mark.parametrize("newer", [False, True], ids=["0.5.17", "0.5.23"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_goes_on_over_an_update_with_exact_versions_and_logprobs(model, tmp_path, newer, stream):
    async with emulated(model, newer=newer, delay_s=0.01) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        weights = [snapshot(model, tmp_path, version) for version in (1, 2)]
        await engine.load(weights[0])
        seen = []
        task = asyncio.create_task(engine.generate(request(), seen.append if stream else None))
        await begun(server)
        pause_s = await engine.load(weights[1])
        done = await task
        await engine.close()
    assert done.finish is Finish.LENGTH
    assert len(done.output_ids) == len(done.logprobs) == 12
    assert set(done.versions) == {1, 2}
    assert list(done.versions) == sorted(done.versions)
    ids, first = [*PROMPT, *done.output_ids], done.versions.index(2)
    old = logprobs_of(model, weights[0], ids, start=len(PROMPT))[:first]
    new = logprobs_of(model, weights[1], ids, start=len(PROMPT))[first:]
    assert np.allclose(done.logprobs, old + new, atol=1e-4)
    assert 0 < pause_s < 5
    assert not stream or (seen[-1] == done.output_ids and all(b[: len(a)] == a for a, b in itertools.pairwise(seen)))
    keys = {asked["extra_key"][-2:] for asked in server.asked}
    assert keys == {"v1", "v2"}


async def test_modes_that_leave_requests_on_the_server(model, tmp_path):
    for mode, flushes in (("retract", True), ("in_place", False)):
        async with emulated(model, newer=True, delay_s=0.01) as server:
            engine = engine_of(tmp_path, server, on_update=mode)
            await engine.start()
            task = asyncio.create_task(engine.generate(request()))
            await begun(server)
            await engine.load(Weights(version=3, directory=model))
            done = await task
            await engine.close()
        assert set(done.versions) == {0, 3}  # newer servers tell which token is whose
        assert len(server.asked) == 1
        told = dict(server.calls)
        assert told["pause_generation"] == {"mode": mode}
        assert told["update_weights_from_disk"]["flush_cache"] is flushes


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_elsewhere_after_the_tokens_that_had_come(model, tmp_path, stream):
    async with emulated(model, delay_s=0.01) as one, emulated(model, delay_s=0.01) as two:
        engine = engine_of(tmp_path, one, two)
        await engine.start()
        seen = []
        task = asyncio.create_task(engine.generate(request(tokens=20), seen.append if stream else None))
        await begun(one, two)
        (dies, lives) = (one, two) if one.in_flight else (two, one)
        await dies.die()
        done = await task
        assert len(done.output_ids) == 20
        assert done.finish is Finish.LENGTH
        again = lives.asked[0]["input_ids"]
        assert (len(again) > len(PROMPT)) == stream
        assert again == [*PROMPT, *done.output_ids][: len(again)]
        counters = engine.counters()
        assert (counters["engine/servers"], counters["engine/requests_moved"]) == (1, 1)
        await engine.close()


@pytest.mark.slow
async def test_a_server_that_comes_back_gets_the_present_weights_before_its_first_request(model, tmp_path):
    weights = snapshot(model, tmp_path, 7)
    async with emulated(model) as one, emulated(model) as two:
        engine = engine_of(tmp_path, one, two)
        await engine.start()
        await engine.load(weights)
        await two.die()
        await until(serving(engine, 1))
        await engine.generate(request())
        fresh = Emulator(model)
        async with fresh.served(port=two.port):
            await until(serving(engine, 2))
            assert fresh.version == "7"
            for number in range(8):
                done = await engine.generate(request(f"r{number}", f"s{number}"))
                assert set(done.versions) == {7}
            assert {len(server.asked) > 0 for server in (one, fresh)} == {True}
            assert [name for name, _ in fresh.calls][:3] == [
                "continue_generation",
                "pause_generation",
                "update_weights_from_disk",
            ]
            await engine.close()


@pytest.mark.slow
async def test_a_server_that_was_started_anew_unnoticed_gives_no_token_of_other_weights(model, tmp_path):
    async with emulated(model) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        await engine.load(snapshot(model, tmp_path, 7))
        server.version = "default"  # as after a restart between two looks
        done = await engine.generate(request())
        assert set(done.versions) == {7}
        assert server.version == "7"
        await engine.close()


async def test_when_no_server_is_left_the_run_learns_it(model, tmp_path):
    async with emulated(model) as server:
        engine = engine_of(tmp_path, server, restarts=0)
        await engine.start()
        await server.die()
        with pytest.raises(EngineLost):
            await engine.generate(request())
        with pytest.raises(EngineLost, match="no SGLang server is left"):
            await engine.load(snapshot(model, tmp_path, 1))
        await engine.close()


@pytest.mark.slow
async def test_a_session_stays_where_its_cache_is(model, tmp_path):
    hits = []
    async with emulated(model) as one, emulated(model) as two:
        for affinity in (True, False):
            engine = engine_of(tmp_path, one, two, affinity=affinity)
            await engine.start()
            for server in (one, two):
                server.asked.clear()
            for session in ("a", "b", "c", "d"):
                prompt = [ord(session), *PROMPT]
                for turn in range(6):
                    done = await engine.generate(request(f"{session}{turn}", session, prompt=prompt, tokens=6))
                    prompt = [*prompt, *done.output_ids, 9, 10]
            where = [{asked["input_ids"][0] for asked in server.asked} for server in (one, two)]
            assert bool(where[0] & where[1]) is not affinity
            assert all(where)
            hits.append(engine.counters()["engine/prefix_hit"])
            await engine.close()
    assert hits[0] > hits[1] + 0.1


async def test_copies_of_the_model_in_one_server_are_seats_of_their_own(model, tmp_path):
    async with emulated(model, copies=2) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        for number in range(16):
            await engine.generate(request(f"r{number}", f"s{number}", tokens=2))
        assert {asked["routed_dp_rank"] for asked in server.asked} == {0, 1}
        await engine.close()


async def test_recorded_experts_cover_every_token_that_was_read_also_over_an_update(moe_models, tmp_path):
    directory = moe_models["qwen3-moe"]
    async with emulated(directory, delay_s=0.005) as server:
        engine = engine_of(tmp_path, server, record_routing=True)
        await engine.start()
        whole = await engine.generate(request())
        ids = [*PROMPT, *whole.output_ids]
        server.replay.recorded = {}
        with torch.no_grad():
            server.model(input_ids=torch.tensor([ids]))
        assert (decode_routing(whole.routing) == server.replay.experts()[:-1]).all()

        part = await engine.generate(request("p", prompt=ids, tokens=3, routing_from=len(ids) - 1))
        assert part.routing.tokens == 3

        task = asyncio.create_task(engine.generate(request("u")))
        await begun(server)
        await engine.load(Weights(version=1, directory=directory))
        done = await task
        assert set(done.versions) == {0, 1}
        assert done.routing.tokens == len(PROMPT) + 12 - 1
        assert (decode_routing(done.routing) >= 0).all()
        await engine.close()


async def test_deltas_reach_stock_servers_as_a_directory_that_is_kept_up_to_date(model, tmp_path):
    base, new = snapshot(model, tmp_path, 4), snapshot(model, tmp_path, 5)
    before, after = (load_file(weights.directory / "model.safetensors") for weights in (base, new))
    path = tmp_path / "v5.delta"
    write_delta(path, Snapshot.of_tensors(before), Snapshot.of_tensors(after), version=5, base=4)
    async with emulated(model) as one, emulated(model) as two:
        engine = engine_of(tmp_path, one, two)
        await engine.start()
        await engine.load(replace(base, version=5, deltas=(path,)))
        told = {body["model_path"] for server in (one, two) for name, body in server.calls if "disk" in name}
        assert len(told) == 1
        for server in (one, two):
            assert torch.equal(server.model.model.norm.weight, after["model.norm.weight"])
        await engine.close()
    assert not await asyncio.to_thread(Path(told.pop()).exists)


async def test_weights_by_value_go_in_pieces_and_only_small_ones(model, tmp_path, monkeypatch):
    async with emulated(model, newer=True) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        tensors = {"model.norm.weight": torch.full((64,), 2.0), "model.layers.0.input_layernorm.weight": torch.ones(64)}
        monkeypatch.setattr("miles.rollout.engines.sglang.updates._PIECE", 300)
        server.calls.clear()
        await engine.load(Weights(version=4, tensors=tensors))
        names = [name for name, _ in server.calls]
        update = ["begin_weight_update", *["update_weights_from_tensor"] * 2, "end_weight_update"]
        assert names == ["pause_generation", *update, "continue_generation"]
        assert server.model.model.norm.weight.tolist() == [2.0] * 64
        monkeypatch.setattr("miles.rollout.engines.sglang.updates._MOST", 300)
        with pytest.raises(EngineError, match=r"publish\.kind=safetensors or delta"):
            await engine.load(Weights(version=5, tensors=tensors))
        await engine.close()


async def test_what_cannot_be_served_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"run `miles engine install sglang"):
        SGLangEngine(tmp_path, tmp_path)
    config = SGLangConfig(python=tmp_path / "python", record_routing=True)
    monkeypatch.setattr("miles.rollout.engines.sglang.engine.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"without a GPU: engine\.sglang\.record_routing"):
        SGLangEngine(tmp_path, tmp_path, config)
    with pytest.raises(ConfigError, match="without a GPU: an adapter"):
        SGLangEngine(tmp_path, tmp_path, SGLangConfig(python=tmp_path / "python"), lora=(8, ("q_proj",)))


async def test_a_broadcast_waits_for_servers_and_refuses_others_than_were_planned(model, tmp_path):
    async with emulated(model) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        assert (await engine.receivers())[0] == 1
        where = {"group": "g", "address": "127.0.0.1", "port": 9, "backend": "gloo"}
        plan = BroadcastPlan(**where, world=3, names=(), dtypes=(), shapes=())
        with pytest.raises(EngineLost, match="came or went"):
            await engine.load(Weights(version=1, broadcast=plan))
        engine._weights = Weights(version=1, broadcast=plan)
        await server.die()
        coming = asyncio.create_task(engine.receivers())
        await until(serving(engine, 0))
        assert not coming.done()
        async with Emulator(model).served(port=server.port):
            async with asyncio.timeout(20):
                assert (await coming)[0] == 1  # it runs, and waits for weights
                await engine.wants_weights.wait()
            await engine.close()


async def test_a_stream_that_breaks_off_after_its_end_is_an_end(model, tmp_path):
    async with emulated(model) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        whole = server.events

        async def breaking(body):
            async for event in whole(body):
                yield event
                if event["meta_info"]["finish_reason"] is not None:
                    await server.die()
                    await asyncio.Event().wait()

        server.events = breaking
        done = await asyncio.wait_for(engine.generate(request(tokens=3), lambda ids: None), 10)
        assert (len(done.output_ids), done.finish) == (3, Finish.LENGTH)
        await engine.close()


async def test_several_copies_take_weights_from_directories_only(model, tmp_path):
    async with emulated(model, copies=2) as server:
        engine = engine_of(tmp_path, server)
        await engine.start()
        with pytest.raises(EngineError, match=r"more servers instead of engine\.sglang\.dp"):
            await engine.load(Weights(version=1, directory=model, adapter="policy"))
        await engine.load(Weights(version=1, directory=model))
        await engine.close()


async def test_servers_that_were_left_in_the_middle_of_a_broadcast_serve_nobody(model, tmp_path):
    async with emulated(model) as server:
        server.silent = "update_weights_from_distributed"
        engine = engine_of(tmp_path, server)
        await engine.start()
        where = {"group": "g", "address": "127.0.0.1", "port": 9, "backend": "gloo"}
        plan = BroadcastPlan(**where, world=2, names=(), dtypes=(), shapes=())
        loading = asyncio.create_task(engine.load(Weights(version=1, broadcast=plan)))
        await until(lambda: any(name == server.silent for name, _ in server.calls))
        assert serving(engine, 1)()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert serving(engine, 0)()
        await engine.close()
