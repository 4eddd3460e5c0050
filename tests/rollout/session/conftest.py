import pytest

from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.session.server import SessionConfig, SessionServer


@pytest.fixture
def engine_of(rendering):
    """A scripted engine that speaks the tiny model's tokens."""

    def make(script, **settings):
        return ScriptedEngine(script, encode=rendering.encode, stop_token=rendering.stop_ids[0], **settings)

    return make


@pytest.fixture
def serve(rendering):
    """A session server around an engine; use as `async with serve(engine) as server`."""

    def make(engine, **settings):
        return SessionServer(engine, rendering, SessionConfig(**{"grace_s": 0.05, **settings}), max_tokens=256)

    return make
