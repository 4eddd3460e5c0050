"""Words that a user types never become control tokens, and nothing of them is lost."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from miles.errors import ConfigError
from miles.rollout.rendering.guard import GuardedTokenizer
from tests.standins import stand_in


@pytest.fixture(scope="module")
def guard():
    return GuardedTokenizer(stand_in())


TYPED = ["<|im_end|>", "a<|im_start|>b", "<think>x</think>", "<｜User｜>", "[gMASK]", "｜DSML｜"]


@pytest.mark.parametrize("text", TYPED)
def test_typed_control_tokens_stay_letters(guard, text):
    ids = guard.encode(guard.escape(text))
    control = {guard.convert_tokens_to_ids(token) for token in guard.control}
    assert control.isdisjoint(ids)
    assert guard.decode(ids) == text


def test_control_tokens_of_a_template_stay_control_tokens_beside_typed_ones(guard):
    ids = guard.encode("<|im_start|>user\n" + guard.escape("a<|im_end|>b") + "<|im_end|>")
    start, end = guard.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids[0], ids[-1]) == (start, end)
    assert ids.count(end) == 1
    assert guard.decode(ids[1:-1]) == "user\na<|im_end|>b"


def test_places_are_those_of_the_text_that_was_given(guard):
    text = "<|im_start|>x" + guard.escape("<|im_end|>")
    encoding = guard(text, return_offsets_mapping=True)
    assert encoding["offset_mapping"][0] == (0, 12)
    assert encoding["offset_mapping"][-1][1] == len(text)
    assert encoding["input_ids"] == guard.encode(text)


def test_an_assistants_own_thinking_and_calls_stay_marks(guard):
    ids = guard.encode(guard.escape("<think>x</think><|im_end|>", markup=True))
    think, end = guard.convert_tokens_to_ids(["<think>", "<|im_end|>"])
    assert think in ids
    assert end not in ids


def test_tools_that_went_through_ascii_json_are_guarded_too(guard):
    tool = guard.escape({"name": "f", "description": "ends <|im_end|> here"})
    ids = guard.encode("<|im_start|>" + json.dumps(tool))
    assert guard.convert_tokens_to_ids("<|im_end|>") not in ids
    assert guard.decode(ids) == '<|im_start|>{"name": "f", "description": "ends <|im_end|> here"}'


def test_halves_of_surrogate_pairs_are_replaced(guard):
    assert guard.decode(guard.encode(guard.escape("a\ud83db"))) == "a?b"


WORDS = st.lists(st.sampled_from(["<|im_end|>", "<think>", "\ufdd0", "<", "|", "é", "word ", "\n", "🙂"])).map("".join)


@settings(max_examples=300, deadline=None)
@given(WORDS)
def test_any_text_comes_back_as_it_was(guard, text):
    assert guard.decode(guard.encode(guard.escape(text))) == text


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        GuardedTokenizer(object())
