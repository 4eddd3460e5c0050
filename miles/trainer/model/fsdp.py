"""The FSDP2 backend: one code path for gloo on CPUs and NCCL on GPUs, one rank or many."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from miles.errors import ConfigError
from miles.models import checkpoint_tensors, load_model
from miles.trainer.algorithms.losses import loss_of
from miles.trainer.algorithms.metrics import step_metrics
from miles.trainer.algorithms.tokens import Tokens
from miles.trainer.backend import BackendInfo, Scores
from miles.trainer.data.packing import Costs, MicroBatch
from miles.trainer.data.rows import Row
from miles.trainer.model import checkpoint, lora
from miles.trainer.model.attention import FLEX_MULTIPLE, tree_mask, why_not_packed
from miles.trainer.model.head import Policy
from miles.trainer.model.layout import Layout, gather, lay_out
from miles.trainer.model.optim import Optimizer
from miles.trainer.model.replay import RoutingReplay
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec

__all__ = ["FsdpBackend"]

_FLEX_PAIR = 1.6
"""A pair in FlexAttention over one in the causal kernel, forward and backward, on an H200 (docs/validation/h200.md)."""
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference in logprobs between two ways to compute the same thing; a wrong mask is far beyond."""


class FsdpBackend:
    """One rank. The process group must be up before `init`."""

    def init(
        self, model: Path, config: BackendConfig, *, rank: int, world: int, seed: int = 0, critic: bool = False
    ) -> BackendInfo:
        disable_progress_bar()
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config, self.rank, self.world = config, rank, world
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self._tree_attention = "flex_attention" if cuda else "sdpa"
        lm = load_model(model)
        lm.config.use_cache = False
        if config.lora is not None and not critic:
            lora.inject(lm, config.lora)
        if config.checkpoint_activations:
            lm.activation_checkpointing_enable({"use_reentrant": False})
        self.replay = RoutingReplay(lm)
        self.policy: Any = Policy(lm, chunk=config.head_chunk, kind=_head(config, cuda=cuda), critic=critic)
        self.lm = lm
        self._shard()
        self.optimizer: Optimizer | None = None
        self._phase = ""  # the loss that the optimizer's moments belong to
        return self._self_test(critic)

    def _shard(self) -> None:
        config, mesh = self.config, self._mesh()
        compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
        if not config.cpu_offload:
            self.policy.to(self.device)
        for layer in self.lm.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(self.policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
        if config.cpu_offload:  # what FSDP does not manage
            for buffer in self.policy.buffers():
                buffer.data = buffer.data.to(self.device)

    def _mesh(self) -> DeviceMesh:
        shard = self.config.shard or self.world
        if self.world % shard:
            raise ConfigError(f"trainer.compute.shard={shard} does not divide trainer.ranks={self.world}")
        if shard == self.world:
            return init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("shard",))
        names = ("replicate", "shard")
        return init_device_mesh(self.device.type, (self.world // shard, shard), mesh_dim_names=names)

    def _self_test(self, critic: bool) -> BackendInfo:
        """Whether the chunked head and the packed layout give this model's own answers."""
        counts = [p.numel() for p in self.policy.parameters() if p.requires_grad]
        total = sum(p.numel() for p in self.policy.parameters())
        facts: dict[str, Any] = {"parameters": total, "trainable": sum(counts), "costs": self._costs()}
        facts["routers"] = len(self.replay.layers)
        reason = why_not_packed(self.lm.config) or ("the recipe says rows" if self.config.layout == "rows" else "")
        if critic:
            return BackendInfo(packs=not reason, note=reason, **facts)
        rows = _probe(self.lm.config.vocab_size)
        self.policy.plain = True
        expected = self._probe_logprobs(rows, packed=False)
        self.policy.plain = False
        tolerance = _TOLERANCE[self.config.dtype]
        note = ""
        if float(np.abs(self._probe_logprobs(rows, packed=False) - expected).max()) > tolerance:
            self.policy.plain, note = True, "its head is more than a matrix: all logits are computed; "
        if not reason:
            off = float(np.abs(self._probe_logprobs(rows, packed=True) - expected).max())
            reason = "" if off <= tolerance else f"packed logprobs differ by {off:.3g} from those of rows"
        return BackendInfo(packs=not reason, note=note + reason, **facts)

    def _costs(self) -> Costs:
        """Floating-point operations of a forward pass: two for every weight of a layer, four for a pair's width."""
        config = self.lm.config
        layers = sum(p.numel() for layer in self.lm.base_model.layers for p in layer.parameters())
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        pair = 4.0 * config.num_hidden_layers * width
        flex = self._tree_attention == "flex_attention"
        return Costs(token=2.0 * layers, pair=pair, dense=not flex, trie=_FLEX_PAIR if flex else 1.0)

    def _probe_logprobs(self, rows: tuple[Row, ...], *, packed: bool) -> Any:
        scores = self.score([MicroBatch(rows=rows, packed=packed)], ScoreSpec())
        return np.concatenate([row["logprobs"] for row in scores[0]])

    def score(self, batches: Sequence[MicroBatch], ask: ScoreSpec) -> list[list[Scores]]:
        self.policy.eval()
        scores = []
        with torch.no_grad(), nullcontext() if ask.adapter else lora.without_adapter(self.lm):
            for batch in batches:
                layout = self._laid_out(batch, replay=ask.replay)
                found = self._forward(layout, temperature=ask.temperature, top=ask.top)
                scores.append(_by_row(batch.rows, {name: value.cpu().numpy() for name, value in found.items()}))
        self.policy.reshard()  # the root stays gathered after a forward pass; optimizers hold the shards
        return scores

    def step(self, batches: Sequence[MicroBatch], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        optimizer = self._optimizer_for(spec, optim)
        self.policy.train()
        self.replay.flipped = self.replay.replayed = 0.0
        sums: dict[str, Tensor] = {}
        diff_max = torch.zeros((), device=self.device)
        # Everything is copied to the device first: a copy between forward and backward would wait for the forward.
        ready = [self._prepared(batch) for batch in batches]
        for number, (layout, tokens) in enumerate(ready):
            self.policy.set_requires_gradient_sync(number == len(ready) - 1)
            loss, found, diff = self._loss(layout, tokens, spec)
            (loss * self.world).backward()  # type: ignore[no-untyped-call]  # FSDP averages over ranks, the loss is a sum
            for name, value in {"loss": loss.detach(), **found}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=self.device)) + value
            diff_max = torch.maximum(diff_max, diff)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), optim.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = bool(np.isfinite(grad_norm))
        every, peak = self._reduced(sums, diff_max)
        used = every.get("used", 1.0) > 0  # else the gradient is zero, and momentum alone would move the weights
        lr = optimizer.step() if finite and used else 0.0
        optimizer.zero_grad()
        skipped = {"skipped_not_finite": float(not finite), "skipped_all_masked": float(not used)}
        return step_metrics(every, peak) | {"grad_norm": grad_norm, "lr": lr, **skipped}

    def _optimizer_for(self, spec: StepSpec, optim: OptimConfig) -> Optimizer:
        if self.optimizer is None or (self._phase, self.optimizer.config.kind) != (spec.loss, optim.kind):
            self.optimizer, self._phase = Optimizer(self.policy.named_parameters(), optim), spec.loss
        elif self.optimizer.config != optim:
            self.optimizer.adjust(optim)
        return self.optimizer

    def _loss(self, layout: Layout, tokens: Tokens, spec: StepSpec) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """(scaled sum of token losses, sums for metrics, largest logprob difference to the engine's)."""
        entropy = spec.loss == "policy" and spec.policy.entropy != 0
        found = self._forward(layout, temperature=spec.temperature, entropy=entropy)
        anchor = sum((value.sum() * 0.0 for value in found.values()), torch.zeros((), device=self.device))
        if not tokens.rows:
            return anchor, {}, torch.zeros((), device=self.device)
        tokens = tokens.computed(found)
        loss, sums = loss_of(spec)(tokens, spec)
        same = tokens.versions == spec.version
        away = torch.where(same, (tokens.logprobs.detach() - tokens.old).abs(), torch.zeros_like(tokens.old))
        sums |= {"tokens": same.new_tensor(same.numel(), dtype=torch.float64), "same": same.sum(), "diff": away.sum()}
        diff = away.max() if away.numel() else torch.zeros((), device=self.device)
        return (loss * tokens.scales).sum() + anchor, sums, diff

    def _prepared(self, batch: MicroBatch) -> tuple[Layout, Tokens]:
        return self._laid_out(batch), gather(batch.rows, self.device)

    def _laid_out(self, batch: MicroBatch, *, replay: bool = True) -> Layout:
        multiple = FLEX_MULTIPLE if self._tree_attention == "flex_attention" else 1
        routing = bool(self.replay.layers) and replay and self.config.replay_routing
        return lay_out(batch, self.device, multiple=multiple, routing=routing)

    def _forward(self, layout: Layout, *, temperature: float, entropy: bool = False, top: int = 0) -> dict[str, Tensor]:
        """The model's answers for the owned tokens. An empty micro-batch is computed too: the others wait for it."""
        self.replay.use(layout.experts)
        kind = self._tree_attention if layout.end is not None else "sdpa"
        self.lm.config._attn_implementation = kind
        nothing = layout.picks.new_zeros(1)
        empty = not len(layout.picks)
        found: dict[str, Tensor] = self.policy(
            layout.ids,
            nothing if empty else layout.picks,
            nothing if empty else layout.targets,
            positions=layout.positions,
            mask=None if layout.end is None else tree_mask(layout.end, kind),
            temperature=temperature,
            entropy=entropy,
            candidates_KC=layout.candidates,
            top=top,
        )
        return found

    def _reduced(self, sums: dict[str, Tensor], diff_max: Tensor) -> tuple[dict[str, float], float]:
        """Sums and the largest difference over all ranks."""
        mine = {name: float(value) for name, value in sums.items()}
        mine |= {"flipped": float(self.replay.flipped), "replayed": float(self.replay.replayed)}
        names = sorted({name for found in _gathered(sorted(mine)) for name in found})
        total = torch.tensor([mine.get(name, 0.0) for name in names], dtype=torch.float64)
        peak = diff_max.detach().double().cpu().reshape(1)
        dist.all_reduce(total)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return dict(zip(names, total.tolist(), strict=True)), float(peak.item())

    def weights(self, kind: Literal["full", "adapter"] = "full") -> Iterator[tuple[str, Tensor]]:
        if kind == "adapter":
            assert self.config.lora is not None
            yield from lora.adapter_tensors(self.lm, self.config.lora.name)
        else:
            for _, layer in itertools.groupby(lora.merged_weights(self.lm, self.config.lora), key=_layer_of):
                yield from checkpoint_tensors(self.lm, dict(layer)).items()
            kept = self.lm.state_dict().keys()
            yield from ((name, buffer) for name, buffer in self.lm.named_buffers() if name in kept)

    def save(self, directory: Path) -> Any:
        return checkpoint.save(directory, self.policy, self.optimizer, self._phase, rank=self.rank)

    def load(self, directory: Path) -> None:
        self.optimizer, self._phase = checkpoint.load(directory, self.policy, rank=self.rank, world=self.world)


def _layer_of(named: tuple[str, Tensor]) -> str:
    """The decoder layer that a weight belongs to; only one is gathered at a time."""
    stem, layers, rest = named[0].partition(".layers.")
    return f"{stem}{layers}{rest.partition('.')[0]}" if layers else "outside of layers"


def _head(config: BackendConfig, *, cuda: bool) -> str:
    """The fused kernel where it is installed and the weights are on the GPU.

    Before 0.8.2 its backward pass gave every token the first one's gradient when losses are per token.
    """
    try:
        new_enough = tuple(int(n) for n in version("liger-kernel").split(".")[:3]) >= (0, 8, 2)
    except (PackageNotFoundError, ValueError):
        new_enough = False
    if config.head == "liger" and not (cuda and new_enough):
        raise ConfigError(
            "trainer.compute.head=liger needs CUDA and `pip install 'liger-kernel>=0.8.2'`; or head=chunked"
        )
    return "liger" if config.head != "chunked" and cuda and new_enough and not config.cpu_offload else "chunked"


def _gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _by_row(rows: Sequence[Row], found: dict[str, Any]) -> list[Scores]:
    ends = np.cumsum([row.n_owned for row in rows], dtype=np.int64)
    return [
        {name: value[end - row.n_owned : end] for name, value in found.items()}
        for row, end in zip(rows, ends, strict=True)
    ]


def _probe(vocabulary: int) -> tuple[Row, ...]:
    """Rows that share prefixes of several depths."""
    dice = random.Random(0)
    stem = [dice.randrange(vocabulary) for _ in range(9)]
    branch = stem + [dice.randrange(vocabulary) for _ in range(5)]
    rows = []
    for start in (branch, stem, branch, []):
        ids = start + [dice.randrange(vocabulary) for _ in range(6)]
        owned = [at > 0 for at in range(len(ids))]
        rows.append(Row(ids=ids, owned=owned, logprobs=[0.0] * (len(ids) - 1), versions=[0] * (len(ids) - 1)))  # type: ignore[arg-type]
    return tuple(rows)
