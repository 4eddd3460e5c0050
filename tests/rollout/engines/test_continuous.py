"""The real batching loop: exact logprobs, exact versions, weights changed in mid-generation."""

import threading

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from miles.errors import EngineError
from miles.rollout.engines.continuous import ContinuousEngine
from miles.types import Finish, Weights


class Answers:
    """Collects replies from the dispatcher thread."""

    def __init__(self):
        self.items, self.done = {}, threading.Condition()

    def of(self, name):
        def reply(value=None, *, last=True, error=None):
            with self.done:
                self.items.setdefault(name, []).append(error if error is not None else value)
                if last or error is not None:
                    self.items[name].append("end")
                self.done.notify_all()

        return reply

    def wait(self, *names, count=None):
        def ready():
            return all(
                (self.items.get(n, [None])[-1] == "end") if count is None else len(self.items.get(n, [])) >= count
                for n in names
            )

        with self.done:
            assert self.done.wait_for(ready, timeout=60)
        return [self.items[name][-2] if count is None else self.items[name] for name in names]


@pytest.fixture
def engine_of(model):
    made = []

    def make(**settings):
        made.append(ContinuousEngine(model, cache_tokens=4096, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine, answers, name, prompt, max_tokens=20, stop=(), streaming=False):
    engine.generate(
        answers.of(name), id=name, prompt_ids=prompt, max_tokens=max_tokens, stop=list(stop), streaming=streaming
    )


def forward(model, prompt, output):
    """Logprobs of `output` after `prompt` by one plain forward pass."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
    return logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].tolist()


def reference(model, factor=1.0):
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(factor)
    return plain


def test_logprobs_equal_a_plain_forward_with_shared_prefixes_and_full_batches(model, engine_of):
    engine, answers, plain = engine_of(max_batch_requests=8, max_batch_tokens=64), Answers(), reference(model)
    prompts = {f"r{n}": [*range(40), n] for n in range(40)}
    for name, prompt in prompts.items():
        ask(engine, answers, name, prompt)
    for name, reply in zip(prompts, answers.wait(*prompts), strict=True):
        assert reply.finish is Finish.LENGTH
        assert len(reply.output_ids) == len(reply.logprobs) == len(reply.versions) == 20
        expected = forward(plain, prompts[name], reply.output_ids)
        assert max(abs(a - b) for a, b in zip(reply.logprobs, expected, strict=True)) <= 1e-5


def test_a_stop_token_is_the_last_one_and_says_stop(engine_of):
    engine, answers = engine_of(), Answers()
    ask(engine, answers, "all", [1, 2, 3], max_tokens=60, stop=range(0, 448, 4))
    (reply,) = answers.wait("all")
    assert reply.finish is Finish.STOP
    assert reply.output_ids[-1] % 4 == 0
    assert all(token % 4 for token in reply.output_ids[:-1])


def test_temperature_is_in_the_logprobs(model, engine_of):
    engine, answers, plain = engine_of(temperature=2.0), Answers(), reference(model)
    ask(engine, answers, "r", [1, 2, 3])
    (reply,) = answers.wait("r")
    ids = torch.tensor([[1, 2, 3, *reply.output_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1].float() / 2.0, -1)
    expected = logprobs.gather(-1, ids[0, 1:, None])[2:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(reply.logprobs, expected, strict=True)) <= 1e-5


def test_weights_change_in_mid_generation_and_every_token_belongs_to_its_version(model, engine_of, tmp_path):
    engine, answers = engine_of(max_batch_requests=4), Answers()
    plain = {0: reference(model), 1: reference(model, 1.3), 2: reference(model, 0.8)}
    names = [f"r{n}" for n in range(6)]
    for name in names:
        ask(engine, answers, name, [*range(30), int(name[1:])], max_tokens=200, streaming=True)
    for version in (1, 2):
        answers.wait(*names[:4], count=40 * version)
        directory = tmp_path / f"v{version}"
        directory.mkdir()
        save_file({k: v.contiguous() for k, v in plain[version].named_parameters()}, directory / "model.safetensors")
        engine.load_published(Weights(version=version, directory=directory))
    replies = answers.wait(*names)
    for name, reply in zip(names, replies, strict=True):
        assert list(reply.versions) == sorted(reply.versions)
        prompt = [*range(30), int(name[1:])]
        scores = {v: forward(m, prompt, reply.output_ids) for v, m in plain.items()}
        for place, (logprob, version) in enumerate(zip(reply.logprobs, reply.versions, strict=True)):
            assert abs(logprob - scores[version][place]) <= 1e-5
    assert {v for reply in replies[:4] for v in reply.versions} == {0, 1, 2}


def test_keep_mode_goes_on_with_old_keys_and_marks_the_versions(model, engine_of):
    engine, answers = engine_of(on_update="keep"), Answers()
    ask(engine, answers, "r", [1, 2, 3], max_tokens=200, streaming=True)
    answers.wait("r", count=20)
    engine.load_tensors(dict(reference(model, 1.3).named_parameters()), 1)
    (reply,) = answers.wait("r")
    assert len(reply.output_ids) == 200
    assert sorted(set(reply.versions)) == [0, 1]


def test_an_abort_answers_at_once_and_frees_the_place(engine_of):
    engine, answers = engine_of(max_batch_requests=1), Answers()
    ask(engine, answers, "long", [1, 2], max_tokens=2000)
    ask(engine, answers, "next", [1, 2], max_tokens=2)
    engine.abort("long")
    long, following = answers.wait("long", "next")
    assert (long.finish, long.output_ids) == (Finish.ABORT, ())
    assert len(following.output_ids) == 2
    engine.abort("never-asked")


def test_weights_of_another_model_are_refused(engine_of, tmp_path):
    engine = engine_of()
    with pytest.raises(EngineError, match="not in this model"):
        engine.load_tensors({"no.such.weight": torch.zeros(1)}, 1)
    with pytest.raises(EngineError, match=r"no \*.safetensors"):
        engine.load_published(Weights(version=1, directory=tmp_path))
