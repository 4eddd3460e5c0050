"""Real FSDP2 ranks over gloo: one rank, two ranks and one plain process agree; what is saved is what comes back."""

import os
import signal
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.errors import ConfigError, TrainerError
from miles.runs import RunFolder
from miles.trainer.algorithms.losses import loss_of
from miles.trainer.checkpoints import Checkpoints
from miles.trainer.model.layout import gather
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec
from miles.trainer.trainer import Trainer, TrainerConfig
from tests.trainer.conftest import plain_logprobs, rows_of, scaled

OPTIM = OptimConfig(lr=1e-3)
MUON = OptimConfig(kind="muon", lr=1e-3)
POLICY = StepSpec(loss="policy", version=1)


async def outcome(model, tmp_path, *, ranks, micro_tokens=8192, optim=OPTIM, steps=3, rows=rows_of, unit="episode"):
    """(metrics of each step, weights afterwards)."""
    config = TrainerConfig(ranks=ranks, compute=BackendConfig(micro_tokens=micro_tokens))
    async with Trainer(model, tmp_path, config) as trainer:
        metrics = [await trainer.step(scaled(rows(seed), unit), POLICY, optim) for seed in range(steps)]
        exported = await trainer.weights(1, tmp_path / f"out{ranks}")
    return metrics, AutoModelForCausalLM.from_pretrained(exported.directory, dtype=torch.float32).state_dict()


def assert_same(one, other, *, atol=2e-5):
    for left, right in zip(one[0], other[0], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=atol)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=10 * atol)
        assert left["tokens/trained"] == right["tokens/trained"]
    for name, tensor in one[1].items():
        assert torch.allclose(tensor, other[1][name], atol=atol), name


@pytest.mark.parametrize("optim", [OPTIM, pytest.param(MUON, marks=pytest.mark.slow)], ids=["adamw", "muon"])
async def test_two_ranks_and_small_micro_batches_equal_one_process(model, tmp_path, optim):
    alone = await outcome(model, tmp_path, ranks=0, optim=optim)
    shared = await outcome(model, tmp_path, ranks=2, micro_tokens=64, optim=optim)
    assert_same(alone, shared, atol=2e-5 if optim is OPTIM else 5e-4)  # Muon orthogonalises in bfloat16


def parted(row, choose):
    """The row owning only the owned tokens that `choose` (a mask over them) keeps."""
    owned = row.owned.copy()
    owned[owned] = choose
    return replace(row, owned=owned, logprobs=row.logprobs[choose], versions=row.versions[choose])


def one_step(model, rows, unit="episode", micro_tokens=8192):
    """Loss and gradients of one step in this process, without FSDP: the reference."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for row in scaled(rows, unit):
        tokens = gather((row,), torch.device("cpu")).computed({"logprobs": plain_logprobs(plain, row)})
        loss, _ = loss_of(POLICY)(tokens, POLICY)
        loss = (loss * row.scale).sum()
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    return total, float(norm)


@pytest.mark.parametrize("unit", ["episode", "token", "group", "constant"])
async def test_padding_packing_and_splitting_change_nothing(model, tmp_path, unit):
    rows = rows_of(5)
    loss, norm = one_step(model, rows, unit)

    def split(row):
        """The same episode as two rows: first half of the owned tokens, second half."""
        early = np.arange(row.n_owned) < row.n_owned // 2
        return [part for part in (parted(row, early), parted(row, ~early)) if part.n_owned]

    masked = parted(rows[0], np.zeros(rows[0].n_owned, dtype=bool))
    variants = [rows, rows[::-1], [part for row in rows for part in split(row)], [*rows, masked]]
    for micro_tokens, variant in zip((8192, 64, 100, 31), variants, strict=True):
        config = TrainerConfig(ranks=0, compute=BackendConfig(micro_tokens=micro_tokens))
        async with Trainer(model, tmp_path, config) as trainer:
            metrics = await trainer.step(scaled(variant, unit), POLICY, OptimConfig(lr=1e-9))
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


async def test_scores_are_a_plain_forwards_and_keep_the_order(model, tmp_path):
    rows = rows_of(1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0, compute=BackendConfig(micro_tokens=64))) as trainer:
        scores = await trainer.score(rows, ScoreSpec(temperature=0.5))
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(plain, row, 0.5).tolist()
        assert score["logprobs"].tolist() == pytest.approx(expected, abs=1e-5)


async def test_the_difference_to_the_engines_logprobs_is_measured_on_tokens_of_this_version(model, tmp_path):
    rows = rows_of(2)
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        scores = await trainer.score(rows)
        exact = [replace(row, logprobs=score["logprobs"]) for row, score in zip(rows, scores, strict=True)]
        off = replace(exact[0], logprobs=exact[0].logprobs - 0.25)
        older = replace(off, versions=off.versions * 0)
        still = OptimConfig(lr=1e-12)
        assert (await trainer.step(scaled(exact), POLICY, still))["logprob_diff/max"] <= 1e-5
        assert (await trainer.step(scaled([off, *exact[1:]]), POLICY, still))["logprob_diff/max"] == pytest.approx(
            0.25, abs=1e-4
        )
        assert (await trainer.step(scaled([older, *exact[1:]]), POLICY, still))["logprob_diff/max"] <= 1e-5
        assert "logprob_diff/max" not in await trainer.step(scaled([older]), POLICY, still)


@pytest.mark.parametrize("optim", [OPTIM, MUON], ids=["adamw", "muon"])
async def test_a_resumed_run_goes_on_bit_by_bit(model, tmp_path, optim):
    config = TrainerConfig(ranks=0)

    async def steps(trainer, seeds):
        return [await trainer.step(scaled(rows_of(seed)), POLICY, optim) for seed in seeds]

    async with Trainer(model, tmp_path, config) as trainer:
        await steps(trainer, [0, 1])
        await trainer.save(tmp_path / "saved")
        expected = await steps(trainer, [2, 3])  # while the checkpoint is being written
        assert await trainer.saved(wait=True)
    async with Trainer(model, tmp_path, config) as trainer:
        await trainer.load(tmp_path / "saved")
        assert await steps(trainer, [2, 3]) == expected


@pytest.mark.slow
async def test_checkpoints_move_between_numbers_of_ranks(model, tmp_path):
    """One rank saves, two ranks go on and save, one rank goes on: as if nothing had happened."""

    def same(found, expected):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)

    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        await trainer.step(scaled(rows_of(0)), POLICY, OPTIM)
        await trainer.save(tmp_path / "one")
        expected = [await trainer.step(scaled(rows_of(seed)), POLICY, OPTIM) for seed in (1, 2)]
        assert await trainer.saved(wait=True)
    async with Trainer(model, tmp_path, TrainerConfig(ranks=2)) as trainer:
        await trainer.load(tmp_path / "one")
        same(await trainer.step(scaled(rows_of(1)), POLICY, OPTIM), expected[0])
        await trainer.save(tmp_path / "two")
        same(await trainer.step(scaled(rows_of(2)), POLICY, OPTIM), expected[1])
        assert await trainer.saved(wait=True)
        # a step in which one of the ranks has nothing to compute
        alone = await trainer.step(scaled(rows_of(3)[:1]), POLICY, OPTIM)
        assert alone["tokens/trained"] == rows_of(3)[0].n_owned
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        await trainer.load(tmp_path / "two")
        same(await trainer.step(scaled(rows_of(2)), POLICY, OPTIM), expected[1])


async def test_after_a_trainer_that_could_not_start_another_one_starts(model, tmp_path):
    with pytest.raises(ConfigError, match="not a model directory"):
        async with Trainer(tmp_path / "no-model", tmp_path, TrainerConfig(ranks=0)):
            pass
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        assert await trainer.score(rows_of(0)[:1])


async def test_a_broken_checkpoint_says_so(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        await trainer.save(tmp_path / "saved")
        await trainer.saved(wait=True)
        for path in (tmp_path / "saved" / "dcp").iterdir():
            path.unlink()
        with pytest.raises(TrainerError, match="resume from an older one"):
            await trainer.load(tmp_path / "saved")


async def test_supervised_steps_lower_the_loss(model, tmp_path):
    rows = [replace(row, advantage=0.0) for row in rows_of(0)]
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        losses = [
            (await trainer.step(scaled(rows, "token"), StepSpec(loss="sft"), OptimConfig(kind="muon", lr=5e-3)))["loss"]
            for _ in range(8)
        ]
    assert losses[0] == pytest.approx(6.1, abs=0.3)  # about ln(448): nothing is known yet
    assert losses[-1] < losses[0] - 0.5


async def test_a_step_without_rows_or_with_nan_changes_nothing(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        before = (await trainer.tensors(0)).tensors
        assert (await trainer.step([], POLICY, OPTIM))["skipped_empty"] == 1.0
        poisoned = [replace(row, advantage=float("nan")) for row in rows_of(0)]
        assert (await trainer.step(scaled(poisoned), POLICY, OPTIM))["skipped_not_finite"] == 1.0
        after = (await trainer.tensors(0)).tensors
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_step_whose_tokens_are_all_left_out_changes_nothing_and_is_counted(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        await trainer.step(scaled(rows_of(0)), POLICY, OPTIM)  # now there is momentum
        before = (await trainer.tensors(0)).tensors
        far = [replace(row, logprobs=row.logprobs - 50) for row in rows_of(1)]
        metrics = await trainer.step(scaled(far), POLICY, OPTIM)
        after = (await trainer.tensors(0)).tensors
    assert (metrics["policy/masked"], metrics["skipped_all_masked"], metrics["lr"]) == (1.0, 1.0, 0.0)
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_checkpoint_that_could_not_be_written_never_counts(model, tmp_path):
    folder = RunFolder.create(tmp_path, "demo")
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        checkpoints = Checkpoints(trainer, folder, keep=1, tell=lambda kind, data: None)
        good = await checkpoints.begin(1, {"step": 1}, wait=True)
        await checkpoints.begin(2, {"step": 2}, wait=False)
        broken = trainer._ranks[0]._rank._writing
        broken.append(Future())
        broken[-1].set_exception(OSError("no space left"))
        with pytest.raises(TrainerError, match="is the disk full"):
            await checkpoints.complete(wait=True)
        assert await checkpoints.complete(wait=True) is None
        assert folder.checkpoints() == [good]
        assert await checkpoints.begin(3, {"step": 3}, wait=True)
    assert [path.name for path in folder.checkpoints()] == ["step-000003"]


async def test_a_dead_rank_ends_the_step_and_names_its_log(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=2)) as trainer:
        os.kill(trainer._ranks[1].pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"trainer rank 1 .*trainer-1\.log|trainer rank 0"):
            await trainer.step(scaled(rows_of(0)), POLICY, OPTIM)
        with pytest.raises(TrainerError, match="resume from the newest checkpoint"):
            await trainer.save(tmp_path / "saved")


async def test_other_settings_keep_the_optimizers_moments(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        await trainer.step(scaled(rows_of(0)), POLICY, OPTIM)
        inner = trainer._ranks[0]._rank.roles["policy"]
        first = inner.optimizer
        await trainer.step(scaled(rows_of(1)), POLICY, OptimConfig(lr=5e-4))
        assert inner.optimizer is first
        assert (first.steps, first.config.lr) == (2, 5e-4)
        await trainer.step(scaled(rows_of(1)), StepSpec(loss="sft"), OptimConfig(lr=5e-4))
        assert inner.optimizer is not first


async def test_an_exported_model_is_a_hugging_face_directory_with_its_tokenizer(model, tmp_path):
    async with Trainer(model, tmp_path, TrainerConfig(ranks=0)) as trainer:
        weights = await trainer.weights(4, tmp_path / "hf")
    from miles.rollout.rendering.families import load_rendering

    assert load_rendering(weights.directory).encode("amber")
    loaded = AutoModelForCausalLM.from_pretrained(weights.directory, dtype=torch.float32).state_dict()
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], original[name]) for name in original)
