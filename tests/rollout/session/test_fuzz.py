"""Fuzzed against its own OpenAPI: whatever comes in, no 500, no hang, an envelope that the spec names."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck

from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.session.server import SessionServer
from miles.types import Limits


@pytest.mark.parametrize("examples", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(rendering, examples):
    ids = rendering.encode("answer 42<|im_end|>")
    server = SessionServer(ScriptedEngine(lambda request: ids, context_length=2048), rendering)
    session = server.open(Limits(turns=1 << 20))
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
    seen = set()

    for operation in (result.ok() for result in schema.get_all_operations()):
        strategy = operation.as_strategy()
        if operation.method == "post":
            strategy |= operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @hypothesis.given(case=strategy)
        @hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        def attack(case):
            case.headers = {**(case.headers or {}), "x-api-key": session.key}
            response = case.call()
            seen.add((case.path, response.status_code))
            assert response.status_code != 500, response.text
            assert response.status_code in {200, 400, 401, 404, 405, 413, 415}, response.text
            if response.status_code != 200:
                assert "error" in response.json()

        attack()
    statuses = {status for _, status in seen}
    assert {200, 400} <= statuses
    assert {path for path, status in seen if status == 200} >= {"/v1/chat/completions", "/v1/messages", "/v1/models"}
