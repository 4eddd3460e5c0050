import pytest

from miles.errors import ConfigError, SessionError
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import RenderingConfig
from miles.sandboxes.shell import SHELL_TOOL

USER = {"role": "user", "content": "open amber"}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "cat amber"}}\n</tool_call>'


def tool(content, call="c"):
    return {"role": "tool", "tool_call_id": call, "content": content}


def assistant(arguments, call="c"):
    function = {"name": "shell", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": call, "type": "function", "function": function}]}


def test_a_bridge_equals_a_render_of_the_whole_conversation(rendering):
    prompt = rendering.full([USER], [SHELL_TOOL])
    output = rendering.encode(CALL + "<|im_end|>")
    added = rendering.bridge(prompt, output, [tool("see birch")], [SHELL_TOOL])
    whole = rendering.full([USER, assistant('{"command": "cat amber"}'), tool("see birch")], [SHELL_TOOL])
    assert prompt + output + added == whole


def test_the_newline_after_the_end_of_turn_is_there_once_and_not_sampled(rendering):
    prompt, output = rendering.full([USER], []), rendering.encode("answer 42<|im_end|>")
    added = rendering.bridge(prompt, output, [tool("42")], [])
    assert rendering.decode(added).startswith("\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n")


def test_two_results_in_a_row_share_one_turn_in_their_order(rendering):
    prompt, output = rendering.full([USER], []), rendering.encode(CALL + "<|im_end|>")
    text = rendering.decode(rendering.bridge(prompt, output, [tool("A", "2"), tool("B", "1")], []))
    assert text.count("<|im_start|>user") == 1
    assert "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>" in text


def test_a_truncated_turn_is_closed_with_tokens_that_were_not_sampled(rendering):
    prompt, output = rendering.full([USER], []), rendering.encode("answer")
    added = rendering.bridge(prompt, output, [{"role": "user", "content": "go on"}], [])
    assert rendering.decode(added).startswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("arguments", ['{"command": "cat amber"}', {"command": "cat amber"}])
def test_arguments_as_text_or_object_render_the_same(rendering, arguments):
    assert rendering.decode(rendering.full([USER, assistant(arguments)], [])).count('{"command": "cat amber"}') == 1


@pytest.mark.parametrize("arguments", ["", "{}", None])
def test_no_arguments_are_an_empty_object(rendering, arguments):
    assert '"arguments": {}' in rendering.decode(rendering.full([USER, assistant(arguments)], []))


@pytest.mark.parametrize("arguments", ["not json", "[1]"])
def test_arguments_that_are_no_object_are_refused_by_message_index(rendering, arguments):
    with pytest.raises(SessionError, match=r"messages\[1\].tool_calls: arguments"):
        rendering.full([USER, assistant(arguments)], [])


def test_a_broken_call_keeps_what_the_model_wrote_and_a_nameless_one_stays_text(rendering):
    broken = '<tool_call>\n{"name": "shell", "arguments": {"comm\n</tool_call>'
    nameless = "<tool_call>\n{oops\n</tool_call>"
    parsed = rendering.parse(rendering.encode(CALL + broken + nameless + "<|im_end|>"), [SHELL_TOOL], [])
    assert parsed.calls == (("shell", '{"command": "cat amber"}'), ("shell", '{"comm'))
    assert parsed.content == "<tool_call>{oops"


def test_demonstrations_own_what_the_policy_would_sample_and_no_more(rendering):
    conversation = [
        USER,
        assistant('{"command": "cat amber"}'),
        tool("key 42"),
        {"role": "assistant", "content": "answer 42"},
    ]
    ids, owned = rendering.demonstration(conversation, [SHELL_TOOL])
    sampled = rendering.decode([token for token, own in zip(ids, owned, strict=True) if own])
    assert sampled == CALL + "<|im_end|>answer 42<|im_end|>"
    assert owned[-1]


def test_text_of_any_language_survives(rendering):
    for text in ("naïve 日本 🎉", "a\u0000b", "tab\tnew\nline"):
        assert rendering.decode(rendering.encode(text)) == text


def test_a_model_without_tokenizer_says_what_to_copy(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_rendering(tmp_path)


def test_an_unknown_family_must_be_named(model, tmp_path):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    with pytest.raises(ConfigError, match=r"model_type 'mystery'.*session.rendering.family=.*qwen3"):
        load_rendering(tmp_path)


def test_a_family_that_does_not_fit_the_tokenizer_is_refused(model):
    with pytest.raises(ConfigError, match="family 'llama-3'"):
        load_rendering(model, RenderingConfig(family="llama-3"))
