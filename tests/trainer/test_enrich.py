"""Opinions of other models: reference, critic, teachers beside the policy and teachers behind a server."""

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from miles.errors import ConfigError, TrainerError
from miles.models import load_model
from miles.trainer.data.batch import Batch, Part
from miles.trainer.enrich import Enricher
from miles.trainer.settings import (
    AdvantageConfig,
    CorrectionConfig,
    DistillConfig,
    KlConfig,
    OptimConfig,
    ScoreSpec,
    StepSpec,
    TeacherConfig,
)
from miles.trainer.trainer import Trainer, TrainerConfig
from tests.trainer.conftest import assert_same_scores, plain_logprobs, rows_of, scaled

OTHER_TASK = {"g1": "code/7"}


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """A model that is not the policy."""
    plain = load_model(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("other")
    plain.save_pretrained(directory)
    return directory


def enricher(trainer, **settings):
    defaults = {
        "advantage": AdvantageConfig(),
        "correction": CorrectionConfig(),
        "kl": KlConfig(),
        "distill": DistillConfig(),
        "temperature": 1.0,
    }
    return Enricher(trainer, **{**defaults, **settings})


async def enriched(trainer, rows=None, tasks=None, **settings):
    batch = Batch(parts=[Part(rows=rows or rows_of(0))])
    return (await enricher(trainer, **settings).enrich(batch, tasks or {})).rows


def trainer_of(model, tmp_path, **others):
    return Trainer(model, tmp_path, TrainerConfig(ranks=0), others={n.replace("_", ":"): p for n, p in others.items()})


def logprobs_by(directory, rows):
    plain = load_model(directory)
    with torch.no_grad():
        return [plain_logprobs(plain, row).numpy() for row in rows]


async def test_nothing_asked_is_nothing_scored(model, tmp_path):
    async with trainer_of(model, tmp_path) as trainer:
        assert all(dict(row.tracks) == {} for row in await enriched(trainer))


async def test_reference_and_anchor_are_scored_and_trained_with(model, other, tmp_path):
    kl = KlConfig(coefficient=0.5)
    async with trainer_of(model, tmp_path, reference=other) as trainer:
        rows = await enriched(trainer, kl=kl, correction=CorrectionConfig(anchor="recomputed"))
        assert_same_scores([row.tracks for row in rows], logprobs_by(other, rows), key="reference")
        assert_same_scores([row.tracks for row in rows], logprobs_by(model, rows), key="anchor")
        spec = StepSpec(loss="policy", kl=kl, correction=CorrectionConfig(anchor="recomputed"), version=1)
        metrics = await trainer.step(scaled(rows), spec, OptimConfig(lr=1e-4))
    assert metrics["policy/kl_to_reference"] > 0
    assert metrics["policy/clipped"] == 0.0  # on the first step the anchor is the policy itself


async def test_distance_in_the_reward_becomes_credit(model, other, tmp_path):
    async with trainer_of(model, tmp_path, reference=other) as trainer:
        rows = await enriched(trainer, kl=KlConfig(coefficient=0.5, place="reward"))
    expected = -0.5 * (rows[0].logprobs - logprobs_by(other, rows)[0])
    assert np.allclose(rows[0].tracks["credit"], expected, atol=1e-5)


async def test_a_critic_gives_values_and_learns_returns(model, tmp_path):
    advantage = AdvantageConfig(estimator="gae", gae_lambda=1.0)
    async with trainer_of(model, tmp_path, critic=model) as trainer:
        errors = []
        for _ in range(12):
            rows = await enriched(trainer, rows_of(0), advantage=advantage)
            spec = StepSpec(loss="value", value_clip=10.0)
            metrics = await trainer.step(scaled(rows, "token"), spec, OptimConfig(lr=3e-3), role="critic")
            errors.append(metrics["critic/error"])
        assert rows[0].tracks["returns"].tolist() == pytest.approx([rows_of(0)[0].advantage] * rows[0].n_owned)
        await trainer.save(tmp_path / "saved")
        before = await trainer.score(rows, role="critic")
        await trainer.saved(wait=True)
    assert errors[-1] < 0.3 * errors[0]
    async with trainer_of(model, tmp_path, critic=model) as trainer:
        await trainer.load(tmp_path / "saved")
        assert_same_scores(await trainer.score(rows, role="critic"), before, key="values", atol=1e-6)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_critic_of_a_model_with_a_head_of_its_own_resumes(tmp_path, ranks):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "untied")

    def trainer():
        model = tmp_path / "untied"
        return Trainer(model, tmp_path, TrainerConfig(ranks=ranks), others={"critic": model})

    async def step(trainer):
        rows = await enriched(trainer, rows_of(0), advantage=AdvantageConfig(estimator="gae"))
        await trainer.step(scaled(rows), StepSpec(loss="policy", version=1), OptimConfig(lr=1e-3))
        value = StepSpec(loss="value")
        return await trainer.step(scaled(rows, "token"), value, OptimConfig(lr=1e-3), role="critic")

    async with trainer() as one:
        await step(one)
        await one.save(tmp_path / "saved")
        expected = await step(one)
        assert await asyncio.wait_for(one.saved(wait=True), 30)
    async with trainer() as other:
        await other.load(tmp_path / "saved")
        assert (await step(other))["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


async def test_teachers_are_asked_by_task_and_their_opinion_is_credit(model, other, tmp_path):
    teachers = {"code": TeacherConfig(path=other, tasks="code/*")}
    distill = DistillConfig(coefficient=1.0, teachers=teachers)
    async with trainer_of(model, tmp_path, teacher_code=other) as trainer:
        rows = await enriched(trainer, tasks=OTHER_TASK, distill=distill)
        metrics = await trainer.step(scaled(rows), StepSpec(loss="policy", version=1), OptimConfig(lr=1e-9))
    asked = [row for row in rows if row.group == "g1"]
    assert metrics["tokens/trained"] == sum(row.n_owned for row in rows)  # with and without a teacher in one batch
    assert [("credit" in row.tracks) for row in rows] == [row.group == "g1" for row in rows]
    for row, expected in zip(asked, logprobs_by(other, asked), strict=True):
        assert np.allclose(row.tracks["credit"], expected - row.logprobs, atol=1e-5)


async def test_distillation_on_candidates_brings_the_student_to_its_teacher(model, other, tmp_path):
    distill = DistillConfig(coefficient=1.0, on="candidates", candidates=8, teachers={"t": TeacherConfig(path=other)})
    spec = StepSpec(loss="policy", distill=1.0, version=1)
    async with trainer_of(model, tmp_path, teacher_t=other) as trainer:
        found = []
        for _ in range(15):
            rows = [row for row in await enriched(trainer, distill=distill)]
            still = [type(row)(**{f: getattr(row, f) for f in row.__slots__} | {"advantage": 0.0}) for row in rows]
            found.append((await trainer.step(scaled(still), spec, OptimConfig(lr=3e-3)))["policy/distill"])
    assert found[0] > 0.001
    assert found[-1] < 0.5 * found[0]


# a teacher behind a server


def served(model):
    """SGLang's answer to a request that asks for the logprobs of its prompt, computed by a real model."""
    plain = load_model(model)

    async def generate(request):
        body = await request.json()
        assert body["sampling_params"]["max_new_tokens"] == 0
        ids = torch.tensor(body["input_ids"])
        with torch.no_grad():
            every = torch.log_softmax(plain(input_ids=ids[None]).logits[0].float(), -1)
        scored = [[None, int(ids[0]), None]]
        scored += [[float(every[at, token]), int(token), None] for at, token in enumerate(ids[1:].tolist())]
        meta = {"input_token_logprobs": scored}
        if body["top_logprobs_num"]:
            best = every.topk(body["top_logprobs_num"], dim=-1)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            meta["input_top_logprobs"] = [None, *([[v, t, None] for v, t in zip(*p, strict=True)] for p in pairs)]
        return JSONResponse({"text": "", "meta_info": meta})

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


@contextmanager
def serving(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


async def test_a_teacher_behind_a_server_says_what_the_same_teacher_beside_the_policy_says(model, other, tmp_path):
    near = DistillConfig(coefficient=1.0, on="candidates", candidates=4, chosen_by="teacher", teachers={"t": TeacherConfig(path=other)})  # fmt: skip  # noqa: E501
    with serving(served(other)) as url:
        far = near.model_copy(update={"teachers": {"t": TeacherConfig(url=url)}})
        async with trainer_of(model, tmp_path, teacher_t=other) as trainer:
            here, there = await enriched(trainer, distill=near), await enriched(trainer, distill=far)
            for one, two in zip(here, there, strict=True):
                assert one.tracks["candidate_ids"].tolist() == two.tracks["candidate_ids"].tolist()
                assert np.allclose(one.tracks["candidate_logprobs"], two.tracks["candidate_logprobs"], atol=1e-5)
            sampled = DistillConfig(coefficient=1.0, teachers={"t": TeacherConfig(url=url)})
            rows = await enriched(trainer, distill=sampled)
            for row, expected in zip(rows, logprobs_by(other, rows), strict=True):
                assert np.allclose(row.tracks["credit"], expected - row.logprobs, atol=1e-5)


async def test_a_teacher_that_is_down_or_reads_other_tokens_says_so(model, tmp_path):
    async def other_tokens(request):
        return JSONResponse({"meta_info": {"input_token_logprobs": [[None, 0, None]]}})

    app = Starlette(routes=[Route("/generate", other_tokens, methods=["POST"])])
    async with trainer_of(model, tmp_path) as trainer:
        with serving(app) as url:
            distill = DistillConfig(coefficient=1.0, teachers={"t": TeacherConfig(url=url)})
            with pytest.raises(TrainerError, match="scored other tokens"):
                await enriched(trainer, distill=distill)
        with pytest.raises(TrainerError, match="is the server up"):
            await enriched(trainer, distill=distill)


def test_settings_that_cannot_work_are_refused():
    from miles.config import build

    with pytest.raises(ConfigError, match="distillation needs a teacher"):
        build(DistillConfig, {"coefficient": 1.0})
    with pytest.raises(ConfigError, match="chosen_by=teacher"):
        build(DistillConfig, {"coefficient": 1.0, "on": "candidates", "teachers": {"t": {"url": "http://x"}}})
    with pytest.raises(ConfigError, match="give either path"):
        build(TeacherConfig, {})
    assert ScoreSpec().top == 0
