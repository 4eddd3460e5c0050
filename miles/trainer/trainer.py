"""The trainer as the driver sees it: rank processes (or this process), called together."""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from miles.config import Config
from miles.errors import TrainerError
from miles.processes import Worker, scratch_folder
from miles.trainer.backend import BackendInfo, Scores
from miles.trainer.data.packing import MicroBatch, micro_batches, token_ratio
from miles.trainer.data.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec
from miles.types import BroadcastPlan, Weights, WeightVersion

__all__ = ["Trainer", "TrainerConfig"]


class TrainerConfig(Config):
    """How many ranks, and what each of them runs."""

    backend: str = "fsdp"
    """Name of the backend."""
    ranks: int = Field(1, ge=0)
    """Trainer processes; 0 trains in the driver's own process (for debuggers)."""
    compute: BackendConfig = BackendConfig()
    """The backend's settings."""


class _Rank(Protocol):
    async def call(self, method: str, **kwargs: Any) -> Any: ...
    async def close(self, grace_s: float = 5.0) -> None: ...


class _OwnProcess:
    """Rank 0 of 1 in a thread of this process."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    async def call(self, method: str, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self._rank, method), **kwargs)

    async def close(self, grace_s: float = 5.0) -> None:
        self._rank.close()


class Trainer:
    """Steps, scores, publishes and saves. Use as an async context manager.

    `others` are models beside the policy: `reference`, `teacher:NAME` and `critic`, by model directory.
    """

    def __init__(
        self,
        model: Path,
        log_dir: Path,
        config: TrainerConfig | None = None,
        *,
        seed: int = 0,
        others: Mapping[str, Path] | None = None,
    ) -> None:
        self.config = config or TrainerConfig()
        self._model, self._log_dir, self._seed = model, log_dir, seed
        self._others = {role: str(path) for role, path in (others or {}).items()}
        self._ranks: list[_Rank] = []
        self._scratch = Path()
        self._broken = False
        self.info: dict[str, BackendInfo] = {}

    async def __aenter__(self) -> "Trainer":
        self._scratch = scratch_folder("trainer")
        try:
            self._ranks = await self._spawn()
            self.info = (await self._call("facts"))[0]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def step(
        self, rows: Sequence[Row], spec: StepSpec, optim: OptimConfig, *, role: str = "policy"
    ) -> dict[str, float]:
        """One optimizer step on `rows`, whose scales are set. Without rows nothing changes."""
        if not rows:
            return {"loss": 0.0, "tokens/trained": 0.0, "skipped_empty": 1.0}
        shares = await asyncio.to_thread(self._shares, rows, role)
        ratio = await asyncio.to_thread(token_ratio, rows) if self._may_pack(role) else 1.0
        each = [{"batches": share} for share in shares]
        results = await self._call("step", each, spec=spec, optim=optim, role=role)
        packed = float(any(batch.packed for share in shares for batch in share))
        ours = {"tree_token_ratio": ratio, "packed": packed, "micro_batches": float(len(shares[0]))}
        return {**results[0], **ours}

    async def score(self, rows: Sequence[Row], ask: ScoreSpec | None = None, *, role: str = "policy") -> list[Scores]:
        """What a role's model says about the owned tokens of every row, in the order of `rows`."""
        if not rows:
            return []
        shares = await asyncio.to_thread(self._shares, rows, role)
        each = [{"batches": share} for share in shares]
        results = await self._call("score", each, ask=ask or ScoreSpec(), role=role)
        by_row = {
            id(row): answer
            for share, scored in zip(shares, results, strict=True)
            for batch, answers in zip(share, scored, strict=True)
            for row, answer in zip(batch.rows, answers, strict=True)
        }
        return [by_row[id(row)] for row in rows]

    async def replace(self, role: str, model: Path) -> None:
        """Load another model directory in the place of a role's."""
        self.info[role] = (await self._call("replace", role=role, path=str(model)))[0]

    async def weights(self, version: WeightVersion, directory: Path, *, dtype: str = "float32") -> Weights:
        """A published snapshot in `directory`: an HF model, or the adapter where one is trained."""
        adapter = self.config.compute.lora
        kind = "full" if adapter is None else "adapter"
        await self._call("export", directory=str(directory), dtype=dtype, kind=kind)
        return Weights(version=version, directory=directory, adapter=adapter.name if adapter else None)

    async def delta(
        self, version: WeightVersion, directory: Path, path: Path, *, dtype: str, base: WeightVersion
    ) -> dict[str, Any] | None:
        """Write what changed since `base` to `path`; facts about the file. None: a whole directory was written."""
        settings: dict[str, Any] = {
            "directory": str(directory),
            "path": str(path),
            "dtype": dtype,
            "version": version,
            "base": base,
        }
        facts: dict[str, Any] | None = (await self._call("export_delta", **settings))[0]
        return facts

    async def plan(self, group: str, port: int, *, receivers: int, dtype: str, backend: Any) -> BroadcastPlan:
        """What `broadcast` will send to `receivers` processes, and where they meet rank 0."""
        names, dtypes, shapes = (await self._call("plan", dtype=dtype))[0]
        return BroadcastPlan(
            group=group,
            address="127.0.0.1",
            port=port,
            world=receivers + 1,
            backend=backend,
            names=tuple(names),
            dtypes=tuple(dtypes),
            shapes=tuple(shapes),
        )

    async def broadcast(self, plan: BroadcastPlan) -> str:
        """Send the weights to engines that are receiving them; what went wrong, if anything."""
        error: str = (await self._call("broadcast", plan=plan))[0]
        return error

    async def tensors(self, version: WeightVersion) -> Weights:
        """A snapshot by value, for engines in this process (ranks=0)."""
        if self.config.ranks != 0:
            raise TrainerError("weights by value need trainer.ranks=0; use publish.kind=safetensors")
        return Weights(version=version, tensors=(await self._call("tensors"))[0])

    async def export(self, directory: Path) -> Path:
        """The whole model, an adapter merged in, as an HF model directory."""
        await self._call("export", directory=str(directory))
        return directory

    async def save(self, directory: Path) -> None:
        """Begin a checkpoint: it is written in the background, and complete when `saved` says so."""
        await self._call("save", directory=str(directory))

    async def saved(self, *, wait: bool = False) -> bool:
        """Whether every rank has written its part of the last checkpoint."""
        return all(await self._call("saved", wait=wait))

    async def load(self, directory: Path) -> None:
        """Every rank restores."""
        await self._call("load", directory=str(directory))

    def _may_pack(self, role: str) -> bool:
        """A critic's tries are tested on the policy."""
        return role in self.info and self.info[role].packs and self.info["policy"].packs

    def _shares(self, rows: Sequence[Row], role: str) -> list[list[MicroBatch]]:
        """Micro-batches of every rank."""
        compute = self.config.compute
        return micro_batches(
            rows,
            ranks=len(self._ranks),
            tokens=max(compute.micro_tokens, max(len(row.ids) for row in rows)),
            layout=compute.layout if self._may_pack(role) else "rows",
            costs=self.info[role].costs if role in self.info else None,
        )

    async def _call(self, method: str, each: Sequence[dict[str, Any]] | None = None, **same: Any) -> list[Any]:
        """Call a collective on every rank. A failed rank would hang the others, so the first failure ends them all."""
        if self._broken:
            raise TrainerError("a trainer rank failed before; resume from the newest checkpoint")
        each = each or [{} for _ in self._ranks]
        calls = [asyncio.ensure_future(r.call(method, **own, **same)) for r, own in zip(self._ranks, each, strict=True)]
        try:
            return await asyncio.gather(*calls)
        except BaseException:
            for call in calls:
                call.cancel()
            if len(self._ranks) > 1:
                self._broken = True
                await asyncio.gather(*(rank.close(grace_s=0) for rank in self._ranks))
            raise

    async def _spawn(self) -> list[_Rank]:
        settings: dict[str, Any] = {
            "model": str(self._model),
            "backend": self.config.backend,
            "config": self.config.compute,
            "seed": self._seed,
            "others": self._others,
            "rendezvous": str(self._scratch / "rendezvous"),
        }
        if self.config.ranks == 0:
            from miles.trainer.rank import TrainerRank

            return [_OwnProcess(await asyncio.to_thread(TrainerRank, **settings, rank=0, world=1))]
        env = {"OMP_NUM_THREADS": str(self.config.compute.threads), "GLOO_SOCKET_IFNAME": "lo"}
        starts = [
            asyncio.ensure_future(
                Worker.start(
                    "miles.trainer.rank:TrainerRank",
                    {**settings, "rank": rank, "world": self.config.ranks},
                    name=f"trainer rank {rank}",
                    log=self._log_dir / f"trainer-{rank}.log",
                    failed=TrainerError,
                    lost=TrainerError,
                    env=env,
                )
            )
            for rank in range(self.config.ranks)
        ]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
                with contextlib.suppress(BaseException):
                    await (await start).close(grace_s=0)
            raise
