"""One SGLang server as a child process: its arguments, its port, its log, its end."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from miles.errors import ConfigError, EngineLost
from miles.http import Http, Unreachable
from miles.processes import scratch_folder
from miles.rollout.engines.sglang.config import SGLangConfig

__all__ = ["STAND_INS", "ServerProcess", "has_gpu", "server_arguments"]

STAND_INS = Path(__file__).parent.parent / "sglang_cpu"
"""Folder of what SGLang imports on a machine without a GPU."""
_HERE = Path(__file__).parent
_END_S = 5.0
_SHARED = "sglang_loads_"  # SGLang's files in /dev/shm, which it never removes
_TAIL = 12  # lines of a log that an error shows


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia").exists()


def server_arguments(
    config: SGLangConfig,
    model: Path,
    *,
    gpu: bool,
    lora: tuple[int, Sequence[str]] | None = None,
    dtype: str = "auto",
) -> list[str]:
    """SGLang's command line but for host and port; ConfigError for what a CPU cannot serve.

    `lora`: rank of the adapters and the modules that they change. `dtype`: that of the weights that will be published.
    """
    if not gpu:
        wants = {
            "an adapter (trainer.compute.lora)": lora is not None,
            "engine.sglang.record_routing": config.record_routing,
            "engine.sglang.deterministic": config.deterministic or bool(config.on_policy_target),
            "engine.sglang.tp and dp above 1": config.tp * config.dp > 1,
        }
        if missing := [name for name, wanted in wants.items() if wanted]:
            raise ConfigError(f"SGLang cannot do this without a GPU: {', '.join(missing)}")
    words = ["--model-path", str(model), "--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none"]
    values: dict[str, object | None] = {
        "--dtype": dtype if config.dtype == "auto" else config.dtype,
        "--tp-size": config.tp if config.tp > 1 else None,
        "--dp-size": config.dp if config.dp > 1 else None,
        "--mem-fraction-static": config.memory,
        "--max-total-tokens": config.cache_tokens or (_most_tokens(model) if gpu else 32_768),
        "--context-length": config.context,
        "--max-running-requests": config.max_requests or (None if gpu else 32),
        "--attention-backend": config.attention or (None if gpu else "torch_native"),
        "--rl-on-policy-target": config.on_policy_target or None,
        "--sampling-backend": None if gpu else "pytorch",
        "--device": None if gpu else "cpu",
    }
    for name, value in values.items():
        if value is not None:
            words += [name, str(value)]
    switches = {
        "--disable-cuda-graph": gpu and not config.cuda_graphs,
        "--enable-deterministic-inference": config.deterministic,
        "--enable-return-routed-experts": config.record_routing,
    }
    words += [name for name, on in switches.items() if on]
    if lora is not None:
        rank, targets = lora
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", *targets]
    return [*words, *config.flags]


def _most_tokens(model: Path) -> int | None:
    """Tokens whose keys 32 bits can count: kernels index with no more, and a small model on a large GPU would get more.
    (SGLang itself takes fewer where memory ends.)"""
    try:
        config = json.loads((model / "config.json").read_text())
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except (OSError, ValueError, LookupError, TypeError):
        return None  # a model of another kind: SGLang decides
    return (1 << 30) // (heads * size)


# A server may share one of its GPUs with a trainer's rank; how much of it is its own was said.
_DEFAULTS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}


class ServerProcess:
    """One life of a server. `start` returns when it answers."""

    def __init__(
        self,
        python: Path,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.log, self.url = log, ""
        self._python, self._arguments, self._host, self._port = python, list(arguments), host, port
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._shared: set[Path] = set()

    @property
    def pid(self) -> int | None:
        """The server's process, which is also its group."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def start(self, limit_s: float) -> None:
        """Launch it and wait until it answers. EngineLost, with the end of its log, when it does not."""
        port = self._port or _free_port(self._host)
        self.url = f"http://{self._host}:{port}"
        self._scratch = scratch_folder("sglang")
        environment = {**_DEFAULTS, **os.environ, "TMPDIR": str(self._scratch), **self._environment}
        if not has_gpu():
            path = [str(STAND_INS), *filter(None, [environment.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1"}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        where = ["--host", self._host, "--port", str(port)]
        with self.log.open("ab") as sink:
            # From this thread: Linux ends the child when the thread that made it ends.
            self._process = subprocess.Popen(  # noqa: ASYNC220  returns after the fork
                [self._python, _HERE / "launcher.py", str(os.getpid()), *self._arguments, *where],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        try:
            await self._answers(limit_s)
            self._shared = _mapped(self._process.pid)
        except BaseException:
            await self.stop()
            raise

    async def _answers(self, limit_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + limit_s
        http = Http(self.url)
        try:
            while not await self._answered(http):
                if self.ended:
                    raise EngineLost(f"the SGLang server ended at its start; {self.log} ends with:\n{self._tail()}")
                if asyncio.get_running_loop().time() > deadline:
                    late = f"the SGLang server did not come up in {limit_s:g} s"
                    raise EngineLost(f"{late}; {self.log} ends with:\n{self._tail()}")
                await asyncio.sleep(0.25)
        finally:
            await http.close()

    async def _answered(self, http: Http) -> bool:
        try:
            return (await http.get("/model_info", limit_s=10.0)).status == 200
        except Unreachable:
            return False

    def _tail(self) -> str:
        lines = self.log.read_bytes().decode(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_TAIL:])

    async def stop(self) -> None:
        """End it with everything that it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            # The server alone: what it started ends with it, Python's tracker last, which clears shared semaphores.
            # (SIGTERM would make it diagnose its dead children for five seconds.)
            process.kill()
            if not await _until(lambda: not _group_lives(process), _END_S):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _until(lambda: not _group_lives(process), _END_S)
            for path in self._shared:
                with contextlib.suppress(OSError):
                    path.unlink()
            forget_shared_memory()
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


async def _until(done: Callable[[], bool], limit_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not done() and loop.time() < deadline:  # noqa: ASYNC110  no event tells it
        await asyncio.sleep(0.05)
    return done()


def _group_lives(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _mapped(group: int | None = None) -> set[Path]:
    """Files of SGLang in shared memory that are mapped: by a process group, or (None) by any process."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if group is None or os.getpgid(int(maps.parent.name)) == group:
                words = (line.split() for line in maps.read_text(errors="replace").splitlines() if _SHARED in line)
                found |= {Path(line[5]) for line in words}
    return found


def forget_shared_memory(folder: Path = Path("/dev/shm"), *, older_s: float = 60.0) -> None:
    """Remove what killed servers left there: files of theirs that no process maps any more."""
    old: set[Path] = set()
    for path in folder.glob(f"{_SHARED}*.shm"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > older_s:
                old.add(path)
    for path in old - _mapped() if old else ():
        with contextlib.suppress(OSError):
            path.unlink()
