"""The recorder by itself: people who have an SGLang server and want exact trajectories, nothing else."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from miles.errors import ConfigError
from miles.rollout.session.standalone import StandaloneConfig, standalone
from miles.trajectories import open_trajectories
from tests.rollout.engines.sglang.test_client import Server, answer, serving


@pytest.fixture
async def service(model, rendering, tmp_path):
    server = Server()
    server.reply = answer(rendering.encode("answer 42<|im_end|>"))
    async with serving(server) as url:
        config = StandaloneConfig(engine=url, model=model, port=0, output=tmp_path / "out.jsonl", admin_key="boss")
        async with standalone(config) as service:
            yield service


async def admin(service, method, path, body=None, key="boss"):
    async with httpx.AsyncClient(base_url=service.url) as http:
        return await http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})


async def test_a_session_from_opening_to_its_line_in_the_file(service, rendering):
    opened = (await admin(service, "POST", "/sessions", {"turns": 3})).json()
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as sdk:
        done = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        assert done.choices[0].message.content == "answer 42"
    async with anthropic.AsyncAnthropic(base_url=opened["anthropic_base_url"], api_key=opened["api_key"]) as sdk:
        stream = sdk.messages.stream(model="m", max_tokens=99, messages=[{"role": "user", "content": "r"}])
        async with stream as events:
            assert await events.get_final_text() == "answer 42"
    report = (await admin(service, "GET", f"/sessions/{opened['id']}")).json()
    assert report["turns"] == 2
    closed = await admin(service, "DELETE", f"/sessions/{opened['id']}", {"reward": 0.5, "meta": {"task": "t"}})
    with open_trajectories(service.output) as read:
        (trajectory,) = read
    assert json.loads(closed.text)["id"] == trajectory.id == opened["id"]
    assert (trajectory.reward, trajectory.meta) == (0.5, {"task": "t"})
    assert trajectory.tree.turns[0].output_ids == tuple(rendering.encode("answer 42<|im_end|>"))
    assert trajectory.tree.turns[0].logprobs[:2] == (-0.5, -1.5)
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}")).status_code == 404


async def test_sessions_are_opened_with_the_admin_key_alone_and_checked_limits(service):
    assert (await admin(service, "POST", "/sessions", key="no")).status_code == 401
    opened = (await admin(service, "POST", "/sessions")).json()
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}", key=opened["api_key"])).status_code == 401
    wrong = await admin(service, "POST", "/sessions", {"turn": 3})
    assert (wrong.status_code, "turn" in wrong.json()["error"]["message"]) == (400, True)
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}", {"reward": "much"})).status_code == 400
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}", {"meta": [1]})).status_code == 400
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}", {"reward": 1})).status_code == 200


async def test_sessions_that_nobody_closes_are_kept_at_the_end(service, model, tmp_path):
    opened = (await admin(service, "POST", "/sessions")).json()
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as sdk:
        await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
    await service.close()
    with open_trajectories(service.output) as read:
        assert [trajectory.meta for trajectory in read] == [{"outcome": "unclosed"}]


async def test_sessions_past_their_time_answer_nothing_and_are_still_written(service):
    opened = (await admin(service, "POST", "/sessions", {"wall_s": 2.0})).json()
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as sdk:
        await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        await asyncio.sleep(2.1)
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "r"}])
    service.server._next_sweep = 0.0
    await admin(service, "POST", "/sessions")
    assert (await admin(service, "DELETE", f"/sessions/{opened['id']}", {"reward": 0.0})).status_code == 200
    with open_trajectories(service.output) as read:
        assert [len(trajectory.tree.turns) for trajectory in read] == [1]


async def test_mistakes_in_opening_and_closing_are_told(service):
    wrong = await admin(service, "POST", "/sessions", {"canonicalisers": ["nope"]})
    assert (wrong.status_code, "strip_billing" in wrong.text) == (400, True)
    opened = (await admin(service, "POST", "/sessions")).json()
    async with httpx.AsyncClient(base_url=service.url, headers={"Authorization": "Bearer boss"}) as http:
        for body in (b'{"meta": {"x": NaN}}', b'{"reward": 1' + b"0" * 400 + b"}", b"[" * 100000, b'{"meta": 5}'):
            reply = await http.request("DELETE", f"/sessions/{opened['id']}", content=body)
            assert reply.status_code == 400, reply.text
    assert not service.output.exists()


async def test_without_an_engine_it_says_so(model, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.rollout.engines.sglang.client.SGLangClient.start", _never)
    config = StandaloneConfig(engine="http://127.0.0.1:9", model=model, port=0, output=tmp_path / "o")
    with pytest.raises(ConfigError, match="no SGLang server answers"):
        async with standalone(config):
            pass


async def _never(self):
    raise ConfigError(f"no SGLang server answers at {self.url}")
