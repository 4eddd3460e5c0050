"""The FSDP2 backend: one code path for gloo on CPUs and NCCL on GPUs, one rank or many."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from miles.errors import TrainerError
from miles.models import load_model
from miles.trainer.losses import policy_loss, sft_loss, token_logprobs
from miles.trainer.optim import Optimizer
from miles.trainer.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig, StepSpec

__all__ = ["FsdpBackend"]


class FsdpBackend:
    """One rank. The process group must be up before `init`."""

    def init(self, model: Path, config: BackendConfig, *, rank: int, world: int, seed: int = 0) -> None:
        disable_progress_bar()
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config, self.rank, self.world = config, rank, world
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.model: Any = load_model(model)
        self.model.config.use_cache = False
        self.model.to(self.device)
        mesh = init_device_mesh(self.device.type, (world,), mesh_dim_names=("dp",))
        compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer: Optimizer | None = None
        self._phase = ""  # the loss that the optimizer's moments belong to

    def score(self, batches: Sequence[Sequence[Row]], *, temperature: float) -> list[list[list[float]]]:
        self.model.eval()
        scores = []
        with torch.no_grad():
            for rows in batches:
                logprobs = self._logprobs(self._padded(rows), temperature).tolist()
                scores.append([[0.0, *line[: len(row.ids) - 1]] for row, line in zip(rows, logprobs, strict=False)])
        return scores

    def step(self, batches: Sequence[Sequence[Row]], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        if self.optimizer is None or (self._phase, self.optimizer.config.kind) != (spec.loss, optim.kind):
            self.optimizer, self._phase = Optimizer(self.model.named_parameters(), optim), spec.loss
        elif self.optimizer.config != optim:
            self.optimizer.adjust(optim)
        self.model.train()
        sums: dict[str, float] = {}
        diff_max = 0.0
        for number, rows in enumerate(batches):
            self.model.set_requires_gradient_sync(number == len(batches) - 1)
            loss, found, diff = self._loss(rows, spec)
            (loss * self.world).backward()  # type: ignore[no-untyped-call]  # FSDP averages over ranks, the loss is a sum
            sums["loss"] = sums.get("loss", 0.0) + loss.item()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.item()
            diff_max = max(diff_max, diff)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = torch.isfinite(torch.tensor(grad_norm)).item()
        lr = self.optimizer.step() if finite else 0.0
        self.optimizer.zero_grad()
        return self._reduced(sums, diff_max) | {
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_not_finite": float(not finite),
        }

    def _loss(self, rows: Sequence[Row], spec: StepSpec) -> tuple[Tensor, dict[str, Tensor], float]:
        """(scaled sum of token losses, sums for metrics, largest logprob difference to the engine's)."""
        batch = self._padded(rows)
        logprobs = self._logprobs(batch, spec.temperature)
        owned = batch["owned"]
        if spec.loss == "sft":
            loss, sums = sft_loss(logprobs, owned)
        else:
            loss, sums = policy_loss(logprobs, batch["old"], batch["advantages"], owned, spec.policy)
        same = owned & (batch["versions"] == spec.version)
        diff = torch.where(same, (logprobs.detach() - batch["old"]).abs(), torch.zeros_like(logprobs))
        sums |= {"tokens": owned.sum(), "same": same.sum(), "diff": diff.sum()}
        return (loss * batch["scales"][:, None]).sum(), sums, float(diff.max()) if diff.numel() else 0.0

    def _padded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Right-padded tensors; target-aligned ones drop the first token: owned, old, versions are (B, T-1)."""
        rows = rows or [Row(ids=[0, 0], owned=[False] * 2, logprobs=[0.0] * 2, versions=[0, 0])]
        width = max(len(row.ids) for row in rows)

        def pad(values: list[list[Any]], dtype: torch.dtype) -> Tensor:
            filled = [line + [0] * (width - len(line)) for line in values]
            return torch.tensor(filled, dtype=dtype, device=self.device)

        return {
            "ids": pad([row.ids for row in rows], torch.long),
            "attend": pad([[1] * len(row.ids) for row in rows], torch.long),
            "owned": pad([row.owned for row in rows], torch.bool)[:, 1:],
            "old": pad([row.logprobs for row in rows], torch.float32)[:, 1:],
            "versions": pad([row.versions for row in rows], torch.long)[:, 1:],
            "advantages": torch.tensor([row.advantage for row in rows], device=self.device),
            "scales": torch.tensor([row.scale for row in rows], device=self.device),
        }

    def _logprobs(self, batch: dict[str, Tensor], temperature: float) -> Tensor:
        # Right padding under a causal mask: no real token can see a padded one, so no mask is needed.
        logits = self.model(input_ids=batch["ids"]).logits
        return token_logprobs(logits, batch["ids"], temperature)

    def _reduced(self, sums: dict[str, float], diff_max: float) -> dict[str, float]:
        names = sorted(sums)
        total = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        peak = torch.tensor([diff_max], dtype=torch.float64)
        dist.all_reduce(total)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        every = dict(zip(names, total.tolist(), strict=True))
        tokens, same = max(1.0, every["tokens"]), every["same"]
        metrics = {"loss": every["loss"], "tokens/trained": every["tokens"]}
        if "clipped" in every:
            metrics |= {
                "policy/clipped": every["clipped"] / tokens,
                "policy/masked": every["masked"] / tokens,
                "policy/kl_to_behaviour": every["kl"] / tokens,
                "logprob_diff/tokens": same,
            }
            if same:
                metrics |= {"logprob_diff/mean": every["diff"] / same, "logprob_diff/max": float(peak.item())}
        return metrics

    def weights(self, since: int | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, full.detach()

    def save(self, directory: Path) -> None:
        save_sharded(self._state(), checkpoint_id=str(directory / "dcp"))
        extra: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self.optimizer is not None:
            extra |= {"optim": self.optimizer.config.model_dump(), "steps": self.optimizer.steps, "phase": self._phase}
        torch.save(extra, directory / f"rank{self.rank}.pt")

    def load(self, directory: Path) -> None:
        mine = directory / f"rank{self.rank}.pt"
        extra = torch.load(mine if mine.exists() else directory / "rank0.pt", weights_only=True)
        if "optim" in extra:
            self.optimizer = Optimizer(self.model.named_parameters(), OptimConfig(**extra["optim"]))
            self.optimizer.steps, self._phase = extra["steps"], extra["phase"]
            if self.optimizer.steps:  # moments exist from the first update on
                _fill(self.optimizer)
        try:
            state = self._state()
            load_sharded(state, checkpoint_id=str(directory / "dcp"))
        except (CheckpointException, FileNotFoundError) as error:
            raise TrainerError(f"checkpoint {directory} cannot be read: {error}; resume from an older one") from error
        set_model_state_dict(self.model, state["model"])
        if mine.exists():
            torch.set_rng_state(extra["rng"])

    def _state(self) -> dict[str, Any]:
        """Everything sharded, by name. Optimizer tensors are written and read in place."""
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.optimizer is not None:
            names = {id(p): name for name, p in self.model.named_parameters()}
            state["optim"] = {
                f"{names[id(p)]}.{key}": value
                for part in self.optimizer.parts
                for p, moments in part.state.items()
                for key, value in moments.items()
                if isinstance(value, Tensor)
            }
        return state


def _fill(optimizer: Optimizer) -> None:
    """Give a new optimizer its state tensors, so that a checkpoint can be read into them."""
    for part in optimizer.parts:
        for group in part.param_groups:
            for parameter in group["params"]:
                if isinstance(part, torch.optim.Muon):
                    part.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                else:
                    part.state[parameter] |= {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
