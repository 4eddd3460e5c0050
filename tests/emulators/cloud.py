"""What every emulated cloud is made of: local sandboxes with metadata, that end by themselves, and faults on demand."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from dataclasses import dataclass, field

import uvicorn

from miles.sandboxes.base import Image, SandboxSpec
from miles.sandboxes.local.backend import LocalBackend

_numbers = itertools.count(1)


@dataclass
class Machine:
    """One machine of an emulated cloud; `facts` is whatever the cloud was told at its creation."""

    id: str
    sandbox: object
    ends_at: float
    facts: dict
    began: float = field(default_factory=time.time)
    processes: dict = field(default_factory=dict)


class Cloud:
    """`faults`: what the next requests are answered with. `asked`: what was asked for, in order."""

    def __init__(self, prefix="m"):
        self.prefix, self.machines, self.snapshots = prefix, {}, {}
        self.faults, self.asked, self.slow_s = deque(), [], 0.0
        self.backend, self.clocks = LocalBackend(), set()

    async def create(self, facts, *, ttl_s, env=None, snapshot=None):
        await asyncio.sleep(self.slow_s)
        image = Image(snapshot=self.snapshots[snapshot]) if snapshot in self.snapshots else None
        sandbox = await self.backend.create(SandboxSpec(image=image, env=env or {}))
        machine = Machine(f"{self.prefix}{next(_numbers):08d}", sandbox, time.time() + ttl_s, facts)
        self.machines[machine.id] = machine
        task = asyncio.create_task(self.end_in_time(machine))
        self.clocks.add(task)
        task.add_done_callback(self.clocks.discard)
        return machine

    async def end_in_time(self, machine):
        while machine.id in self.machines:
            await asyncio.sleep(min(1.0, max(0.0, machine.ends_at - time.time())))
            if time.time() >= machine.ends_at:
                await self.kill(machine.id)

    def find(self, machine_id):
        """A live machine, or None."""
        machine = self.machines.get(machine_id)
        return machine if machine is not None and time.time() < machine.ends_at else None

    async def kill(self, machine_id):
        """End a machine; whether there was one."""
        machine = self.machines.pop(machine_id, None)
        if machine is None:
            return False
        await machine.sandbox.destroy()
        return True

    async def keep(self, machine_id):
        """A snapshot's name."""
        image = await self.machines[machine_id].sandbox.snapshot()
        name = f"im-snap-{next(_numbers)}"
        self.snapshots[name] = image.snapshot
        return name

    async def close(self):
        for clock in self.clocks:
            clock.cancel()
        for machine_id in list(self.machines):
            await self.kill(machine_id)


@contextlib.asynccontextmanager
async def served(app):
    """An ASGI app on a free port of the loopback; its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        settings = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        runner = uvicorn.Server(settings)
        serving = asyncio.create_task(runner.serve(sockets=[sock]))
        while not runner.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            runner.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
