"""Broadcasts whose receivers die: the sender ends its wait, the next try reaches those that are there then."""

import asyncio
import multiprocessing
import os
import socket
import time
from dataclasses import replace

import pytest
import torch

from miles.broadcast import join, leave, receive, send
from miles.errors import EngineLost, TrainerError
from miles.trainer.publish import PublishConfig, Publisher
from miles.trainer.settings import BackendConfig
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import BroadcastPlan

NAMES = ("a", "b", "c")


def plan_of(group="g"):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    facts = {"names": NAMES, "dtypes": ("bfloat16",) * 3, "shapes": ((4, 8),) * 3}
    return BroadcastPlan(group=group, address="127.0.0.1", port=port, world=2, backend="gloo", **facts)


def take(plan, most, then, found=None):
    """A receiver's process: takes `most` tensors, then ends or sleeps."""
    group = join(plan, 1)
    for taken, (name, tensor) in enumerate(receive(group, plan, torch.device("cpu")), 1):
        if found is not None:
            found.put((name, tensor.float().sum().item()))
        if taken == most:
            break
    if then == "die":
        os._exit(1)
    if then == "sleep":
        time.sleep(600)


def receiver(*arguments):
    process = multiprocessing.get_context("spawn").Process(target=take, args=arguments, daemon=True)
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("then", "message"), [("die", "."), ("sleep", "taken nothing for 1 s")])
def test_a_sender_does_not_wait_for_a_receiver_that_is_gone(then, message):
    plan = replace(plan_of(), shapes=((1 << 24,),) * 3)
    process = receiver(plan, 1, then)
    group = join(plan, 0)
    try:
        with pytest.raises(RuntimeError, match=message):
            send(group, ((name, torch.ones(1 << 24)) for name in NAMES), plan, torch.device("cpu"), patience_s=1.0)
    finally:
        leave(group)
        process.kill()
        process.join()


class Receivers:
    """A sink whose engines are processes; the first `dying` of them die in mid-broadcast."""

    def __init__(self, dying):
        self.dying, self.tries, self.found = dying, 0, multiprocessing.get_context("spawn").Queue()

    async def receivers(self):
        return 1, self.tries

    async def load(self, weights):
        self.tries += 1
        dies = self.tries <= self.dying
        process = receiver(weights.broadcast, 3 if dies else -1, "die" if dies else "end", None if dies else self.found)
        try:
            while process.is_alive():
                await asyncio.to_thread(process.join, 0.05)
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            raise EngineLost("the engine died")
        return 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dying", [1, 3])
async def test_weights_are_broadcast_again_when_an_engine_dies_of_it(model, tmp_path, dying):
    async with Trainer(model, tmp_path, TrainerConfig(compute=BackendConfig())) as trainer:
        sink = Receivers(dying)
        publisher = Publisher(trainer, sink, PublishConfig(kind="broadcast"))
        try:
            if dying == 3:
                with pytest.raises(TrainerError, match=r"publish\.kind=delta to go on without"):
                    await publisher.publish(1)
                exported = await trainer.export(tmp_path / "hf")  # its work can still be saved
                assert (exported / "model.safetensors").is_file()
                return
            metrics = await publisher.publish(1)
        finally:
            publisher.close()
        assert (sink.tries, metrics["pause_s"]) == (2, 0.5)
        plan = await trainer.plan("h", 1, receivers=1, dtype="float32", backend="gloo")
        names = [sink.found.get()[0] for _ in plan.names]
        assert names == list(plan.names)
