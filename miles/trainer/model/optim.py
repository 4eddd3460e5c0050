"""Optimizers: AdamW, or Muon for the matrices and AdamW for the rest; learning rate by schedule."""

from collections.abc import Iterable

import torch
from torch import Tensor

from miles.trainer.settings import OptimConfig

__all__ = ["Optimizer"]


class Optimizer:
    """Steps one or two torch optimizers together, with the schedule of `config`."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        matrices = [p for name, p in named if config.kind == "muon" and _is_matrix(name, p)]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        betas = (config.beta1, config.beta2)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=0.95,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=config.lr, betas=betas, weight_decay=config.weight_decay))

    def step(self) -> float:
        """Apply the gradients; returns the learning rate used."""
        lr = self.learning_rate(self.steps)
        if self.config.offload:
            self._move_moments(None)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        if self.config.offload:
            self._move_moments(torch.device("cpu"))
        self.steps += 1
        return lr

    def _move_moments(self, device: torch.device | None) -> None:
        """To a device, or (None) to where each parameter is. AdamW's step counters stay on the CPU."""
        for part in self.parts:
            for parameter, moments in part.state.items():
                for key, value in moments.items():
                    if key != "step":
                        moments[key] = value.to(parameter.device if device is None else device)

    def fill(self) -> None:
        """Make the state tensors that the first update would make, so that a checkpoint can be read into them."""
        for part in self.parts:
            for parameter in (p for group in part.param_groups for p in group["params"]):
                names = ("momentum_buffer",) if isinstance(part, torch.optim.Muon) else ("exp_avg", "exp_avg_sq")
                part.state[parameter] |= {name: torch.zeros_like(parameter) for name in names}
                if "exp_avg" in names:
                    part.state[parameter]["step"] = torch.tensor(0.0)

    def adjust(self, config: OptimConfig) -> None:
        """Go on with other settings and the same moments; the kind must stay."""
        self.config = config
        for part in self.parts:
            for group in part.param_groups:
                group["weight_decay"] = config.weight_decay
                if "betas" in group:
                    group["betas"] = (config.beta1, config.beta2)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def learning_rate(self, step: int) -> float:
        """Rate of the `step`-th update, counted from 0."""
        config = self.config
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        done = min(1.0, step / config.decay_steps) if config.decay_steps else 0.0
        return config.lr * rise * (1.0 - (1.0 - config.final_lr_ratio) * done)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
