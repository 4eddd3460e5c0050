"""The real SGLang server, on this machine's CPU: installed by `miles engine install`, under the session server.

Takes minutes and 2.4 GB the first time.
"""

import asyncio
import json
import os
import shutil
import signal

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from miles.errors import EngineError
from miles.recipes.compose import launch
from miles.recipes.config import load_recipe
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.rollout.engines.sglang.install import install
from miles.rollout.engines.sglang.process import has_gpu
from miles.rollout.session.server import SessionServer
from miles.types import Finish, GenerateRequest, Weights
from tests.rollout.engines.sglang.test_engine import PROMPT, logprobs_of, snapshot

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def python():
    if has_gpu():
        pytest.skip("these tests use the CPU's stand-ins; on a GPU run scripts/validate_gpu.sh")
    try:
        return install(cpu=True) / "bin" / "python"
    except EngineError as error:
        pytest.skip(f"SGLang cannot be installed here: {error}")


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def endless(model, tmp_path_factory):
    """The model without a token that ends: servers stop at one whatever a request says."""
    directory = shutil.copytree(model, tmp_path_factory.mktemp("endless") / "model")
    (directory / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return directory


@pytest.fixture
async def engine(endless, tmp_path, python):
    made = SGLangEngine(
        endless, tmp_path / "logs", SGLangConfig(python=python, context=500, probe_s=1.0), dtype="float32"
    )
    await made.start()
    yield made
    await made.close()


def request(name, *, tokens=12, session="s", prompt=PROMPT):
    return GenerateRequest(id=name, session=session, prompt_ids=prompt, max_tokens=tokens)


async def test_updates_aborts_and_deaths_on_one_server(model, tmp_path, engine):
    weights = [snapshot(model, tmp_path, version) for version in (1, 2)]
    await engine.load(weights[0])

    # an update in mid-generation: every token by the weights that its version names
    seen = []
    task = asyncio.create_task(engine.generate(request("long", tokens=300), seen.append))
    while len(seen) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await engine.load(weights[1])
    done = await task
    assert (len(done.output_ids), done.finish, set(done.versions)) == (300, Finish.LENGTH, {1, 2})
    ids, first = [*PROMPT, *done.output_ids], done.versions.index(2)
    old = logprobs_of(model, weights[0], ids, start=len(PROMPT))[:first]
    new = logprobs_of(model, weights[1], ids, start=len(PROMPT))[first:]
    assert np.allclose(done.logprobs, old + new, atol=1e-4)
    assert seen[-1] == done.output_ids

    # the next turn finds its prefix in the cache, another version does not
    again = await engine.generate(request("next", prompt=ids[:200]))
    once_more = await engine.generate(request("next2", prompt=ids[:210]))
    assert again.cached_tokens < 200 <= once_more.cached_tokens + 10

    # a cancelled request leaves the server
    task = asyncio.create_task(engine.generate(request("gone", tokens=400)))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (member,) = engine._fleet.members.values()
    async with asyncio.timeout(20):
        while (await running(member)) != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    # a killed server comes back with the present weights, and its request goes on
    task = asyncio.create_task(engine.generate(request("moved", tokens=200), seen.append))
    await asyncio.sleep(0.5)
    os.kill(engine.pids["sglang-0"], signal.SIGKILL)
    done = await task
    assert (len(done.output_ids), set(done.versions)) == (200, {2})
    assert np.allclose(
        done.logprobs, logprobs_of(model, weights[1], [*PROMPT, *done.output_ids], start=len(PROMPT)), atol=1e-4
    )
    counters = engine.counters()
    assert (counters["engine/servers_lost"], counters["engine/servers_back"]) == (1, 1)

    # small weights by value
    from safetensors.torch import load_file

    norm = {"model.norm.weight": load_file(weights[0].directory / "model.safetensors")["model.norm.weight"]}
    await engine.load(Weights(version=3, tensors=norm))
    done = await engine.generate(request("by value"))
    assert np.allclose(
        done.logprobs, logprobs_of(model, weights[0], [*PROMPT, *done.output_ids], start=len(PROMPT)), atol=1e-4
    )


async def running(member):
    loads = (await member.client._http.get("/v1/loads")).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def test_three_dialects_through_the_session_server(model, engine, rendering):
    await engine.load(Weights(version=5, directory=model))
    async with SessionServer(engine, rendering, max_tokens=24) as server:
        session = server.open()
        chat = AsyncOpenAI(base_url=server.base_url(session), api_key=session.key, max_retries=0)
        messages = [{"role": "user", "content": "open amber"}]
        reply = await chat.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        stream = await chat.chat.completions.create(model="m", messages=messages, stream=True)
        async for _ in stream:
            pass
        await chat.responses.create(model="m", input="open amber")
        await chat.close()
        claude = AsyncAnthropic(
            base_url=server.base_url(session).removesuffix("/v1"), api_key=session.key, max_retries=0
        )
        await claude.messages.create(model="m", max_tokens=24, messages=[{"role": "user", "content": "open birch"}])
        await claude.close()
        tree = await session.close()
    assert [turn.parent for turn in tree.turns] == [None, 0, None, None]
    for turn in tree.turns:
        ids = [token for part in tree.path(turn.id) for token in (*part.prompt_ids, *part.output_ids)]
        start = len(ids) - len(turn.output_ids)
        assert set(turn.versions) == {5}
        expected = logprobs_of(model, Weights(version=5, directory=model), ids, start=start)
        assert np.allclose(turn.logprobs, expected, atol=1e-4)


class Quiet:
    def event(self, kind, data):
        pass


async def test_a_run_broadcasts_its_weights_to_the_server(tmp_path, python):
    settings = [
        "engine.name=sglang",
        f"engine.sglang.python={python}",
        "publish.kind=broadcast",
        f"run.root={tmp_path}",
    ]
    settings += ["train.warm_start.steps=20", "train.steps=3", "rollout.groups_per_step=2", "rollout.group_size=4"]
    folder = await launch(load_recipe("quickstart", [*settings, "rollout.max_episodes=8", "eval.tasks=4"]), Quiet())
    steps = folder.metrics("step")
    assert len(steps) == 3
    assert all(line["logprob_diff/mean"] < 1e-4 for line in steps if "logprob_diff/mean" in line)
    assert [line["version"] for line in folder.metrics("eval")] == [0, 3]
