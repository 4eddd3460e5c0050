import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from miles.deltas import Snapshot, write_delta
from miles.errors import ConfigError, EngineError, EngineLost
from miles.models import load_model
from miles.rollout.engines.embedded import EmbeddedConfig, EmbeddedEngine
from miles.types import GenerateRequest, Weights


def request(name="r", max_tokens=8):
    return GenerateRequest(id=name, session="s", prompt_ids=[1, 2, 3], max_tokens=max_tokens)


@pytest.fixture
async def engine(model, tmp_path):
    made = EmbeddedEngine(model, tmp_path, EmbeddedConfig(restarts=1))
    await made.start()
    yield made
    await made.close()


async def test_generate_stream_cancel_and_publish(engine, model):
    seen = []
    reply = await engine.generate(request(), seen.append)
    assert len(reply.output_ids) == 8
    assert seen[-1] == reply.output_ids[: len(seen[-1])]
    long = asyncio.create_task(engine.generate(request(max_tokens=400)))
    await asyncio.sleep(0.1)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    await engine.load(Weights(version=5, directory=model))
    assert engine.version == 5
    assert (await engine.generate(request())).versions == (5,) * 8


@pytest.mark.slow
async def test_a_killed_engine_comes_back_at_the_published_version_once(engine, model):
    await engine.load(Weights(version=3, directory=model))
    running = [asyncio.create_task(engine.generate(request(f"r{n}", 300))) for n in range(4)]
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    for result in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(result, EngineLost)
        assert "engine.log" in str(result)
    assert (await engine.generate(request())).versions == (3,) * 8
    assert engine.deaths == 1
    os.kill(engine.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    for _ in range(2):
        with pytest.raises(EngineError, match="died 2 times"):
            await engine.generate(request())


@pytest.mark.slow
async def test_a_killed_engine_comes_back_at_a_version_that_deltas_lead_to(engine, model, tmp_path):
    weights = load_file(model / "model.safetensors")
    moved = {name: tensor.clone() for name, tensor in weights.items()}
    moved["model.norm.weight"] *= 1.5
    write_delta(tmp_path / "d", Snapshot.of_tensors(weights), Snapshot.of_tensors(moved), version=2, base=1)
    await engine.load(Weights(version=1, directory=model))
    await engine.load(Weights(version=2, directory=model, deltas=(tmp_path / "d",)))

    async def matches():
        reply = await engine.generate(request())
        plain = load_model(model)
        plain.load_state_dict(moved, strict=False)
        ids = torch.tensor([[1, 2, 3, *reply.output_ids]])
        with torch.no_grad():
            every = torch.log_softmax(plain(input_ids=ids).logits[0, 2:-1], -1)
        expected = every.gather(-1, ids[0, 3:, None])[:, 0].tolist()
        return reply.versions == (2,) * 8 and list(reply.logprobs) == pytest.approx(expected, abs=1e-4)

    assert await matches()
    os.kill(engine.pid, signal.SIGKILL)
    await engine._worker.ended.wait()
    assert await matches()
    assert engine.deaths == 1


async def test_closing_leaves_no_process(model, tmp_path):
    engine = EmbeddedEngine(model, tmp_path)
    await engine.start()
    pid = engine.pid
    await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_weights_by_value_do_not_reach_another_process(engine):
    with pytest.raises(EngineError, match=r"publish\.kind=safetensors"):
        await engine.load(Weights(version=1, tensors={}))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        EmbeddedEngine(tmp_path, tmp_path)
