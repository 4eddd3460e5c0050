import pytest
import torch

from miles.trainer.model.optim import Optimizer
from miles.trainer.settings import OptimConfig


def optimizer(**settings):
    weights = {
        "model.embed_tokens.weight": torch.nn.Parameter(torch.ones(4, 4)),
        "model.layers.0.q_proj.weight": torch.nn.Parameter(torch.eye(4)),
        "model.norm.weight": torch.nn.Parameter(torch.ones(4)),
    }
    return Optimizer(weights.items(), OptimConfig(**settings)), weights


def test_the_rate_rises_then_falls_to_its_floor():
    made, _ = optimizer(lr=1.0, warmup_steps=4, decay_steps=10, final_lr_ratio=0.2)
    rates = [made.learning_rate(step) for step in (0, 3, 5, 10, 100)]
    assert rates == pytest.approx([0.25, 0.76, 0.6, 0.2, 0.2])


def test_a_constant_rate_is_constant():
    made, _ = optimizer(lr=0.5)
    assert {made.learning_rate(step) for step in (0, 1, 1000)} == {0.5}


def test_muon_takes_the_matrices_and_adamw_the_rest():
    made, weights = optimizer(kind="muon", lr=0.1)
    assert [type(part).__name__ for part in made.parts] == ["Muon", "AdamW"]
    assert made.parts[0].param_groups[0]["params"] == [weights["model.layers.0.q_proj.weight"]]
    assert len(made.parts[1].param_groups[0]["params"]) == 2


def test_a_step_moves_every_weight_and_counts():
    made, weights = optimizer(kind="muon", lr=0.1)
    before = {name: p.detach().clone() for name, p in weights.items()}
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    assert made.step() == 0.1
    made.zero_grad()
    assert made.steps == 1
    assert all(not torch.equal(before[name], p) for name, p in weights.items())
    assert all(p.grad is None for p in weights.values())
