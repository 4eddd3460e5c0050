import pytest

from miles.errors import EngineError
from miles.rollout.engines.scripted import ScriptedEngine
from miles.types import Finish, GenerateRequest, Weights


def request(session="s", max_tokens=10):
    return GenerateRequest(id="r", session=session, prompt_ids=[1], max_tokens=max_tokens)


async def test_each_session_walks_through_the_script():
    engine = ScriptedEngine([[5, 6], [7]])
    assert (await engine.generate(request("a"))).output_ids == (5, 6)
    assert (await engine.generate(request("b"))).output_ids == (5, 6)
    assert (await engine.generate(request("a"))).output_ids == (7,)
    with pytest.raises(EngineError, match="the script has 2 replies; session a asked for one more"):
        await engine.generate(request("a"))


async def test_lists_have_equal_length_and_tell_positions_apart():
    engine = ScriptedEngine([[5, 6, 7]])
    await engine.load(Weights(version=3))
    reply = await engine.generate(request(max_tokens=2))
    assert (reply.output_ids, reply.logprobs, reply.versions) == ((5, 6), (-1.0, -0.5), (3, 3))
    assert reply.finish is Finish.LENGTH
