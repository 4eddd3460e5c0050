"""What runs inside a trainer rank: the process group, one backend for every role, files written by rank 0."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from miles.broadcast import join, leave, send
from miles.deltas import Snapshot, write_delta
from miles.errors import TrainerError
from miles.registry import resolve
from miles.trainer.backend import Backend, BackendInfo, Scores
from miles.trainer.data.packing import MicroBatch
from miles.trainer.model.lora import write_adapter
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec
from miles.types import BroadcastPlan

__all__ = ["TrainerRank"]

_TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "vocab",
    "merges",
    "chat_template",
    "added_tokens",
    "generation_config",
)


class TrainerRank:
    """One rank of the trainer; its methods are called on all ranks together.

    `others` are models beside the policy, by role: a frozen `reference`, teachers, the `critic`.
    """

    def __init__(
        self,
        *,
        model: str,
        backend: str,
        config: BackendConfig,
        rank: int,
        world: int,
        rendezvous: str,
        seed: int = 0,
        others: Mapping[str, str] | None = None,
    ) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        # As SGLang's servers set it: processes that share GPU memory in different ways cannot connect.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        self._source, self._rank, self._config = Path(model), rank, config
        self._backend, self._world, self._seed = backend, world, seed
        self._published: Snapshot | None = None
        self._group: tuple[str, Any] | None = None  # that the engines receive in
        self._files = ThreadPoolExecutor(1, thread_name_prefix="checkpoint files")
        self._writing: list[Future[Any]] = []
        try:
            self.roles: dict[str, Backend] = {}
            self.info: dict[str, BackendInfo] = {}
            for role, path in {"policy": model, **(others or {})}.items():
                self._make(role, path)
        except BaseException:
            self.close()  # the next trainer of this process may have a group of its own
            raise

    def _make(self, role: str, path: str) -> None:
        """Load a role's model. Teachers and critics are other models: no adapter, no replay of the policy's experts."""
        changes: dict[str, Any] = {}
        if role != "policy":
            changes = {"lora": None, "replay_routing": role == "reference" and self._config.replay_routing}
        config = self._config.model_copy(update=changes)
        made: Backend = resolve("trainers", self._backend)()
        facts: dict[str, Any] = {
            "rank": self._rank,
            "world": self._world,
            "seed": self._seed,
            "critic": role == "critic",
        }
        self.info[role] = made.init(Path(path), config, **facts)
        self.roles[role] = made

    def replace(self, role: str, path: str) -> BackendInfo:
        """Load another model in the place of a role's."""
        self.roles.pop(role, None)
        self._make(role, path)
        return self.info[role]

    def facts(self) -> dict[str, BackendInfo]:
        """What each role's model can do."""
        return self.info

    def step(
        self, batches: Sequence[MicroBatch], spec: StepSpec, optim: OptimConfig, role: str = "policy"
    ) -> dict[str, float]:
        """One optimizer step on this rank's micro-batches; the same metrics on every rank."""
        return self.roles[role].step(batches, spec, optim)

    def score(self, batches: Sequence[MicroBatch], ask: ScoreSpec, role: str = "policy") -> list[list[Scores]]:
        """Answers for this rank's rows. The reference of an adapter is the policy without it."""
        if role == "reference" and role not in self.roles:
            role, ask = "policy", ask.model_copy(update={"adapter": False})
        return self.roles[role].score(batches, ask)

    def tensors(self, kind: str = "full", dtype: str = "float32") -> dict[str, torch.Tensor]:
        """Weights by name, on the CPU: for engines in the same process, and for files. Floating ones as `dtype`."""
        found = self.roles["policy"].weights(kind)  # type: ignore[arg-type]
        if self._rank != 0:  # the gathering is collective, the copy is not needed
            for _ in found:
                pass
            return {}
        cast = getattr(torch, dtype)
        return {
            name: t.to("cpu", cast if t.is_floating_point() else t.dtype, copy=True).contiguous() for name, t in found
        }

    def export(self, directory: str, dtype: str = "float32", kind: str = "full") -> None:
        """Write a Hugging Face model directory (weights, config, tokenizer), or an adapter in peft's format."""
        tensors = self.tensors(kind, dtype)
        if self._rank == 0:
            self._write(Path(directory), tensors, dtype, kind)

    def export_delta(self, directory: str, path: str, dtype: str, version: int, base: int) -> dict[str, Any] | None:
        """Write what changed since the last export of either kind as a delta file; facts about it, from rank 0.

        Without an earlier export, a whole directory is written instead and None returned.
        """
        tensors = self.tensors(dtype=dtype)
        if self._rank != 0:
            return None
        before, self._published = self._published, Snapshot.of_tensors(tensors)
        if before is None or base < 0:
            self._write(Path(directory), tensors, dtype, "full")
            return None
        return write_delta(Path(path), before, self._published, version=version, base=base)

    def plan(self, dtype: str) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
        """Names, types and shapes of the weights that `broadcast` sends, in its order."""
        facts = [(n, dtype if t.is_floating_point() else str(t.dtype)[6:], tuple(t.shape)) for n, t in self._weights()]
        return [name for name, _, _ in facts], [kind for _, kind, _ in facts], [shape for _, _, shape in facts]

    def broadcast(self, plan: BroadcastPlan) -> str:
        """Send every tensor to the engines; rank 0 does, the others only gather with it. What went wrong, if anything:
        as a value, since an engine that died is no reason to lose the ranks."""
        tensors = self._weights()
        error = ""
        if self._rank == 0:
            try:
                if self._group is None or self._group[0] != plan.group:
                    self._leave()
                    self._group = plan.group, join(plan, 0)
                send(self._group[1], tensors, plan, torch.device("cuda" if plan.backend == "nccl" else "cpu"))
            except RuntimeError as problem:  # torch's errors of groups and stores
                error = str(problem)
                self._leave()
        for _ in tensors:  # what was not sent is gathered all the same: the other ranks are in it
            pass
        return error

    def _leave(self) -> None:
        if self._group is not None:
            leave(self._group[1])
        self._group = None

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.roles["policy"].weights("full")

    def _write(self, target: Path, tensors: dict[str, torch.Tensor], dtype: str, kind: str) -> None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if kind == "adapter":
            assert self._config.lora is not None
            write_adapter(partial, tensors, self._config.lora, str(self._source))
        else:
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((self._source / "config.json").read_text())
            config["dtype"] = dtype
            config.pop("torch_dtype", None)
            (partial / "config.json").write_text(json.dumps(config, indent=2))
            for path in self._source.iterdir():
                if path.name.startswith(_TOKENIZER_FILES):
                    shutil.copy(path, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    def save(self, directory: str) -> None:
        """Begin to write this rank's part of a checkpoint, and the model as a Hugging Face directory."""
        self.saved(wait=True)  # one at a time: the copies cost memory
        for role in ("policy", "critic"):
            if role in self.roles:
                own = Path(directory) if role == "policy" else Path(directory) / role
                own.mkdir(parents=True, exist_ok=True)
                self._writing.append(self.roles[role].save(own))
        tensors = self.tensors()
        adapter = self.tensors("adapter") if self._config.lora is not None else {}
        if self._rank == 0:
            self._writing.append(self._files.submit(self._write, Path(directory) / "hf", tensors, "float32", "full"))
            if adapter:
                target = Path(directory) / "adapter"
                self._writing.append(self._files.submit(self._write, target, adapter, "float32", "adapter"))

    def saved(self, wait: bool = False) -> bool:
        """Whether everything of the last `save` is written; TrainerError when it could not be."""
        if not wait and not all(future.done() for future in self._writing):
            return False
        writing, self._writing = self._writing, []
        errors = [error for future in writing if (error := future.exception()) is not None]  # waits for all of them
        if errors:
            raise TrainerError(f"the checkpoint could not be written: {errors[0]}; is the disk full?") from errors[0]
        return True

    def load(self, directory: str) -> None:
        """Restore from a checkpoint."""
        self.roles["policy"].load(Path(directory))
        if "critic" in self.roles:
            self.roles["critic"].load(Path(directory) / "critic")

    def close(self) -> None:
        """Leave the process group."""
        self._files.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
