"""Weights over a process group of their own: rank 0 sends, inference engines receive, tensor by tensor.

The group lives beside whatever groups a process has already (torch's public API knows one world only), with gloo on
CPUs and NCCL on GPUs. Stock SGLang servers join the same kind of group by `/init_weights_update_group`.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from miles.types import BroadcastPlan

__all__ = ["join", "receive", "send"]


def join(plan: BroadcastPlan, rank: int, *, timeout_s: float = 120.0) -> Any:
    """Enter the plan's group as `rank`; returns when all `world` processes have. Rank 0 keeps the store."""
    timeout = timedelta(seconds=timeout_s)
    first = rank == 0
    store = dist.TCPStore(plan.address, plan.port, plan.world, is_master=first, timeout=timeout)  # type: ignore[attr-defined]
    group, _ = distributed_c10d._new_process_group_helper(
        plan.world,
        rank,
        [],
        dist.Backend(plan.backend),
        distributed_c10d.PrefixStore(plan.group, store),
        group_name=distributed_c10d.GroupName(plan.group),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {at: at for at in range(plan.world)}
    return group


def send(group: Any, tensors: Iterable[tuple[str, Tensor]], plan: BroadcastPlan, device: torch.device) -> None:
    """Rank 0: every tensor of the plan, in its order, as its type."""
    kinds = dict(zip(plan.names, plan.dtypes, strict=True))
    for name, tensor in tensors:
        dist.broadcast(tensor.to(device, getattr(torch, kinds[name])).contiguous(), src=0, group=group)


def receive(group: Any, plan: BroadcastPlan, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The others: (name, tensor) one after the other."""
    for name, dtype, shape in zip(plan.names, plan.dtypes, plan.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor
