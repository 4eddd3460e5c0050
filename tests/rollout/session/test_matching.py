import pytest

from miles.errors import SessionError
from miles.rollout.rendering.text import text_of
from miles.rollout.session.matching import chain, root_key

ROOT = root_key([])
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def key(message):
    return chain(ROOT, [message])[0]


def assistant(**fields):
    return {"role": "assistant", "tool_calls": [CALL], **fields}


@pytest.mark.parametrize(
    "variant",
    [
        assistant(content=""),
        assistant(),
        assistant(content=[]),
        assistant(content=[{"type": "text", "text": ""}]),
        assistant(content=None, refusal=None, annotations=[], provider_specific_fields={}),
        assistant(content=None, reasoning_content="thought about it"),
        {**assistant(), "tool_calls": [{**CALL, "index": 0, "function": {"name": "f", "arguments": '{"a":1}'}}]},
    ],
)
def test_what_clients_change_without_meaning_it_is_the_same_message(variant):
    assert key(variant) == key(assistant(content=None))


@pytest.mark.parametrize(
    "variant",
    [
        assistant(content=" "),
        {**assistant(), "tool_calls": [{**CALL, "id": "call_2"}]},
        {**assistant(), "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 2}'}}]},
        {**assistant(), "tool_calls": []},
        {**assistant(), "role": "user"},
    ],
)
def test_a_meant_change_is_another_message(variant):
    assert key(variant) != key(assistant(content=None))


def test_text_equals_its_parts_and_order_matters():
    hello = {"role": "user", "content": "hello"}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo", "cache_control": 1}],
    }
    bye = {"role": "user", "content": "bye"}
    assert chain(ROOT, [hello]) == chain(ROOT, [parts])
    assert chain(ROOT, [hello, bye])[1] != chain(ROOT, [bye, hello])[1]


def test_other_tools_are_another_tree():
    assert root_key([{"function": {"name": "a"}}]) != root_key([])


def test_parts_that_cannot_be_read_are_named():
    with pytest.raises(SessionError, match="'image_url' is not supported"):
        text_of([{"type": "image_url", "image_url": {}}])
