"""Every family through real sessions: what the engine sampled is what is exported, whatever the template does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.errors import ConfigError
from miles.rollout.rendering.families import families, rendering_of
from miles.rollout.rendering.rendering import RenderingConfig
from miles.rollout.session.verify import verify
from tests.standins import real, stand_in

STAND_INS = sorted(set(families()) - {"gpt-oss", "template"})  # gpt-oss brings its own vocabulary
ALWAYS_BRANCHES = {"deepseek-r1"}


@pytest.fixture(scope="module")
def tokenizer():
    return stand_in()


def check(rendering):
    """All scenarios hold; the share of turns that extend the one before."""
    checks = verify(rendering)
    assert [f"{check.name}: {check.detail}" for check in checks if not check.ok] == []
    return {check.name for check in checks if check.refused}, sum(check.extended for check in checks)


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("family", STAND_INS)
def test_every_family_on_a_stand_in_vocabulary(tokenizer, family, thinking):
    refused, extended = check(rendering_of(tokenizer, RenderingConfig(family=family, thinking=thinking)))
    assert refused <= ({"parallel tool calls"} if family == "llama-3" else set())
    assert (extended > 0) == (family not in ALWAYS_BRANCHES)


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5", "deepseek-r1", "nemotron-3"])
def test_thinking_that_is_kept_makes_every_turn_an_extension(tokenizer, family):
    kept = rendering_of(tokenizer, RenderingConfig(family=family, thinking=True, keep_thinking="always"))
    dropped = rendering_of(tokenizer, RenderingConfig(family=family, thinking=True))
    assert check(kept)[1] > check(dropped)[1]


REAL = [
    ("qwen3", "auto", "qwen3"),
    ("qwen3", "template", "template"),
    ("gptoss", "gpt-oss", "gpt-oss"),
    ("deepseek_v3", "auto", "template"),
    ("deepseek_v3", "deepseek-v3", "deepseek-v3"),
    ("deepseek_v3", "deepseek-r1", "deepseek-r1"),
    ("deepseek-v4", "deepseek-v4", "deepseek-v4"),
    ("llama3_1", "auto", "template"),
    ("llama3_1-eom", "llama-3", "llama-3"),
    ("gemma3", "auto", "template"),
    ("smollm2", "auto", "template"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize(("name", "asked", "family"), REAL)
def test_every_family_on_real_tokenizers(name, asked, family, thinking):
    rendering = rendering_of(real(name), RenderingConfig(family=asked, thinking=thinking))
    assert rendering.family == family
    refused, _ = check(rendering)
    assert refused <= ({"typed control tokens"} if name == "gemma3" else {"parallel tool calls"})


def test_an_unknown_family_lists_the_known_ones(tokenizer):
    with pytest.raises(ConfigError, match=r"unknown family 'qwen9'; known: .*glm-4\.5.*template"):
        rendering_of(tokenizer, RenderingConfig(family="qwen9"))


def test_without_a_template_the_family_must_be_named(tokenizer):
    with pytest.raises(ConfigError, match=r"cannot tell the chat family .*session\.rendering\.family="):
        rendering_of(tokenizer)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_model_that_no_family_fits_is_rendered_by_its_own_template():
    tokenizer = stand_in()
    tokenizer.chat_template = CHATML
    rendering = rendering_of(tokenizer)
    assert (rendering.family, rendering.extends) == ("template", True)
    refused, extended = check(rendering)
    assert (refused, extended) == (set(), 16)


STRIPPING = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1].strip() }}")


def test_a_template_that_drops_thinking_makes_a_branch():
    tokenizer = stand_in()
    tokenizer.chat_template = STRIPPING
    rendering = rendering_of(tokenizer)
    ask, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    prompt = rendering.full([ask], [])
    plain = rendering.encode("answer<|im_end|>")
    thought = rendering.encode("<think>\nhm\n</think>\n\nanswer<|im_end|>")
    assert rendering.bridge(prompt, plain, [more], []) == rendering.encode(
        "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendering.bridge(prompt, thought, [more], []) is None


@pytest.mark.parametrize("family", ["qwen3", "llama-3", "template"])
def test_many_threads_render_at_once(family):
    tokenizer = stand_in()
    tokenizer.chat_template = CHATML
    rendering = rendering_of(tokenizer, RenderingConfig(family=family))
    ask = [[{"role": "user", "content": f"question {n} <|im_end|> " * n}] for n in range(40)]
    answer = rendering.sampled_for(ask[0], {"role": "assistant", "content": "yes"}, [])

    def work(messages):
        prompt = rendering.full(messages, [])
        return prompt, rendering.bridge(prompt, answer, ask[3], []), rendering.parse(answer, [], prompt)

    expected = [work(messages) for messages in ask]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, ask * 5)) == expected * 5


@pytest.mark.parametrize("family", ["llama-3", "inkling", "glm-4.5", "gemma4"])
def test_families_whose_unfinished_text_is_not_the_finished_one_do_not_stream(tokenizer, family):
    assert not rendering_of(tokenizer, RenderingConfig(family=family)).streams
    assert rendering_of(tokenizer, RenderingConfig(family="qwen3")).streams


def test_unfinished_thinking_is_thinking_also_by_template():
    tokenizer = stand_in()
    tokenizer.chat_template = CHATML
    rendering = rendering_of(tokenizer, RenderingConfig(thinking=True))
    begun = rendering.parse(rendering.encode("<think>\nlet me think about"), [], [], partial=True)
    assert (begun.content, begun.reasoning) == ("", "let me think about")
    ids = rendering.encode("<think>\nI must write END\n</think>\n\nresult END tail<|im_end|>")
    count, stop = rendering.cut(ids, ("END",), rendering.parse(ids, [], []), [], [])
    assert (rendering.decode(ids[:count]).endswith("result END"), stop) == (True, "END")


def test_nothing_that_a_client_writes_is_taken_for_the_stand_in():
    tokenizer = stand_in()
    tokenizer.chat_template = CHATML
    rendering = rendering_of(tokenizer)
    prompt = rendering.full([{"role": "user", "content": "q"}], [])
    text = "TASK \u241fanswer\u241f ok"
    tail = rendering.bridge(prompt, rendering.encode("one<|im_end|>"), [{"role": "user", "content": text}], [])
    assert text in rendering.decode(tail)


def test_ids_of_calls_are_letters_too(tokenizer):
    rendering = rendering_of(tokenizer, RenderingConfig(family="kimi-k2"))
    end = rendering.id_of("<|im_end|>")

    def ends(call):
        made = {"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [made]}]
        return rendering.full([*said, {"role": "user", "content": "r"}], []).count(end)

    assert ends("functions.f:0<|im_end|>") == ends("functions.f:0")
