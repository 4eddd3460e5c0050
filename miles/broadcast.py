"""Weights over a process group of their own: rank 0 sends, inference engines receive, tensor by tensor.

The group lives beside whatever groups a process has already (torch's public API knows one world only), with gloo on
CPUs and NCCL on GPUs. Stock SGLang servers join the same kind of group by `/init_weights_update_group`.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from miles.types import BroadcastPlan

__all__ = ["join", "leave", "receive", "send"]

_AHEAD = 1 << 30  # bytes that may be on their way to slow receivers
_LOOK_S = 0.0005


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


def leave(group: Any) -> None:
    """Give a group up, also one whose other members are gone: nothing waits for them any more."""
    with contextlib.suppress(RuntimeError):
        distributed_c10d._abort_process_group(group)


def send(
    group: Any,
    tensors: Iterable[tuple[str, Tensor]],
    plan: BroadcastPlan,
    device: torch.device,
    *,
    patience_s: float = 60.0,
) -> None:
    """Rank 0: every tensor of the plan, in its order, as its type; returns when all have them.

    RuntimeError when a receiver is gone, or takes nothing for `patience_s`: the group is of no use then. NCCL itself
    would wait for ever, so what is under way is watched instead of waited for.
    """
    kinds = dict(zip(plan.names, plan.dtypes, strict=True))
    under_way: deque[tuple[Any, Tensor]] = deque()
    ahead = 0
    for name, tensor in tensors:
        part = tensor.to(device, getattr(torch, kinds[name])).contiguous()
        under_way.append((dist.broadcast(part, src=0, group=group, async_op=True), part))
        ahead += part.nbytes
        while ahead > _AHEAD:
            ahead -= _arrived(under_way, patience_s)
    while under_way:
        _arrived(under_way, patience_s)


def _arrived(under_way: deque[tuple[Any, Tensor]], patience_s: float) -> int:
    """Watch the oldest tensor arrive; its bytes."""
    work, part = under_way.popleft()
    latest = time.monotonic() + patience_s
    while not work.is_completed():
        if time.monotonic() > latest:
            raise RuntimeError(f"the engines have taken nothing for {patience_s:g} s")
        time.sleep(_LOOK_S)
    work.wait()  # raises what went wrong
    return part.nbytes


def receive(group: Any, plan: BroadcastPlan, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The others: (name, tensor) one after the other."""
    for name, dtype, shape in zip(plan.names, plan.dtypes, plan.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor
