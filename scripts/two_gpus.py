"""What two GPUs are good for, without a whole run: ways to publish side by side, affinity, a receiver that dies."""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import SPEC, qwen3
from miles.broadcast import join, leave, receive, send
from miles.errors import MilesError
from miles.http import Http
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.rollout.engines.sglang.process import ServerProcess, has_gpu, server_arguments
from miles.trainer.publish import PublishConfig, Publisher
from miles.trainer.settings import BackendConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import BroadcastPlan, Weights
from scripts.engine_modes import converse, model_of, settings_of
from scripts.validate_publish import VOCABULARY, rows_of

VERSIONS = 5


@contextlib.asynccontextmanager
async def servers(config: SGLangConfig, model: Path, out: Path, names: Mapping[str, str]) -> AsyncIterator[list[str]]:
    """Servers by name, each on its GPUs; yields their URLs."""
    assert config.python is not None
    arguments = server_arguments(config, model, gpu=has_gpu(), dtype="bfloat16")
    processes = [
        ServerProcess(
            config.python,
            arguments,
            out / f"{name}.log",
            environment={**config.environment, "CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
        for name, gpus in names.items()
    ]
    try:
        await asyncio.gather(*(process.start(400.0) for process in processes))
        yield [process.url for process in processes]
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


async def compare_transports(options: argparse.Namespace, out: Path, tp: int) -> bool:
    """The same versions as whole snapshots, as deltas and over a process group to a server of `tp` GPUs; whether all
    arrived as they were."""
    size = {"hidden": 2048, "layers": 16} if has_gpu() else {"hidden": 128, "layers": 2}
    model = await asyncio.to_thread(qwen3, out / "qwen3", vocabulary=VOCABULARY, **size)
    base = settings_of(options)
    config = base.model_copy(update={"memory": 0.3 if has_gpu() else None, "context": 4096, "tp": tp})
    ways: list[tuple[Any, Any]] = [("safetensors", "gloo"), ("delta", "gloo"), ("broadcast", "gloo")]
    if tp > 1:  # shares the trainer's GPU, and NCCL refuses two processes on one
        config = config.model_copy(update={"flags": (*base.flags, "--disable-custom-all-reduce")})
    elif has_gpu():
        ways.append(("broadcast", "nccl"))
    whole = True
    compute = BackendConfig(dtype="bfloat16" if has_gpu() else "float32")
    gpus = {1: "1", 2: "0,1"}[tp] if has_gpu() else ""
    async with (
        Trainer(model, out, TrainerConfig(compute=compute)) as trainer,
        servers(config, model, out, {f"tp-{tp}": gpus}) as urls,
    ):
        engine = SGLangEngine(model, out, SGLangConfig(urls=tuple(urls)))
        await engine.start()
        for kind, backend in ways:
            try:
                whole &= await publish_some(trainer, engine, urls[0], out, kind, backend, f"tp {tp}")
            except MilesError as error:
                whole = False
                print(f"tp {tp} {kind} {backend} FAILED: {error}", flush=True)
        await engine.close()
    return whole


async def publish_some(
    trainer: Trainer, engine: SGLangEngine, url: str, out: Path, kind: Any, backend: Any, where: str
) -> bool:
    """Some versions one way; the last one is compared with the trainer's own files of it."""
    publisher = Publisher(trainer, engine, PublishConfig(kind=kind, backend=backend, dtype="bfloat16"))
    found: list[dict[str, float]] = []
    try:
        for version in range(1, VERSIONS + 1):
            await trainer.step(rows_of(version), SPEC, OptimConfig(lr=1e-6))
            found.append(await publisher.publish(version))
        told = await checksums(url)
        directory = out / "reference"
        weights = await trainer.weights(VERSIONS + 1, directory, dtype="bfloat16")
        await engine.load(Weights(version=VERSIONS + 1, directory=weights.directory))
        same = told == await checksums(url)
        await trainer.step(rows_of(9), SPEC, OptimConfig(lr=1e-6))
        await engine.load(await trainer.weights(VERSIONS + 2, out / "next", dtype="bfloat16"))
        same &= told is None or told != await checksums(url)  # a checksum that cannot differ says nothing
    finally:
        publisher.close()
    times = {
        name: statistics.median(line[name] for line in found[1:]) for name in ("publish_s", "transfer_s", "pause_s")
    }
    size = statistics.median(line.get("publish_bytes", 0.0) for line in found[1:]) / 1e6
    verdict = "not told" if told is None else "as the trainer's" if same else "DIFFERENT"
    print(
        f"{where} {kind:11} {backend if kind == 'broadcast' else '':4}: {times['publish_s']:.2f} s, of these sampling "
        f"stood still {times['pause_s']:.2f} (the first: {found[0]['publish_s']:.2f}, {found[0]['pause_s']:.2f}); "
        f"{f'{size:.1f} MB in files; ' if size else ''}checksum {verdict}",
        flush=True,
    )
    return bool(same)


async def checksums(url: str) -> Any:
    """What a server says of every rank's weights; None where it cannot."""
    http = Http(url)
    try:
        reply = await http.post("/weights_checker", {"action": "checksum"})
    finally:
        await http.close()
    if reply.status != 200:
        return None
    return [rank["checksums"] for rank in reply.json()["ranks"]]


async def compare_affinity(options: argparse.Namespace, out: Path) -> bool:
    """The same conversations on two servers: each where its cache is, and in turns."""
    model = await model_of(options, out)
    config = settings_of(options).model_copy(update={"memory": 0.3, "context": 8192})
    scale = {} if has_gpu() else {"sessions": 4, "turns": 3}
    async with servers(config, model, out, {"affine-0": "0", "affine-1": "1"}) as urls:
        for affinity in (True, False, True, False):
            engine = SGLangEngine(model, out, SGLangConfig(urls=tuple(urls), affinity=affinity))
            await engine.start()
            print(f"affinity={affinity}: ", end="")
            await converse(engine, **scale)
            await engine.close()
    return True


def lose_a_receiver(backend: Any) -> bool:
    """A receiver that is killed in the middle: the sender ends its wait and reaches another one."""
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    tensors = [(f"t{n}", torch.full((1 << 22,), float(n))) for n in range(64)]
    told = []
    for life, dies in enumerate((True, False)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        plan = BroadcastPlan(
            group=f"life-{life}",
            address="127.0.0.1",
            port=port,
            world=2,
            backend=backend,
            names=tuple(name for name, _ in tensors),
            dtypes=("bfloat16",) * len(tensors),
            shapes=((1 << 22,),) * len(tensors),
        )
        process = multiprocessing.get_context("spawn").Process(target=take, args=(plan, dies), daemon=True)
        process.start()
        group = join(plan, 0)
        began = time.monotonic()
        try:
            send(group, tensors, plan, device, patience_s=5.0)
            told.append("arrived")
        except RuntimeError as error:
            told.append(f"given up after {time.monotonic() - began:.1f} s: {str(error)[:100]}")
        leave(group)
        process.join(30)
        process.kill()
    print(f"{backend}: first {told[0]}; then {told[1]}", flush=True)
    return told[0] != "arrived" and told[1] == "arrived"


def take(plan: BroadcastPlan, dies: bool) -> None:
    """The receiver's process."""
    device = torch.device("cuda:1" if plan.backend == "nccl" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join(plan, 1)
    for number, (name, tensor) in enumerate(receive(group, plan, device)):
        if dies and number == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        assert float(tensor[0]) == float(name[1:]), (name, tensor[0])
    leave(group)


def kill_a_server(gpu: str) -> int | None:
    """Kill the SGLang server that sees only this GPU, whoever started it; its pid."""
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if b"sglang.launch_server" in words and f"CUDA_VISIBLE_DEVICES={gpu}\0".encode() in variables:
            os.kill(int(path.name), signal.SIGKILL)
            return int(path.name)
    return None
