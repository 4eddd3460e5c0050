"""Harbor tasks: a folder with task.toml, instruction.md, environment/, tests/ and solution/ (rules of harbor 0.25).

Read directly, any of our harnesses works in the task's image; the tests come in when the agent's processes are dead,
and a reward file that was there before is removed. `HarborTrialTaskset` runs Harbor's own trials instead, in our
sandboxes."""

import contextlib
import json
import math
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from miles.config import Config, build, read_toml
from miles.envs.base import BaseEnv, Solution, Taskset
from miles.envs.workers.taskset import WorkerConfig, WorkerTaskset
from miles.errors import ConfigError, EnvError
from miles.sandboxes.base import Image, Resources, Sandbox, SandboxSpec
from miles.types import Env, Observation, Score, Task, Transcript

__all__ = ["HarborConfig", "HarborTask", "HarborTaskset", "HarborTrialTaskset", "read_task"]

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.I)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_MOST = 1 << 26  # bytes of tests, and of what crosses to a verifier of its own
_VERIFIER = "/logs/verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """What a task's folder says."""

    name: str
    folder: Path
    instruction: str
    image: str = ""
    dockerfile: Path | None = None
    workdir: str = ""
    cpus: float | None = None
    memory_mib: int | None = None
    network: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    agent_s: float | None = None
    agent_user: str = ""
    verifier_s: float = 600.0
    verifier_user: str = ""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    separate: bool = False
    verifier_image: str = ""
    artifacts: tuple[str, ...] = ()
    steps: int = 0


def read_task(folder: Path) -> HarborTask:
    """A task's folder. ConfigError says what is missing; unknown keys are left alone, as Harbor does."""
    told = read_toml(folder / "task.toml")
    environment, verifier, agent = (told.get(key, {}) for key in ("environment", "verifier", "agent"))
    steps = len(told.get("steps") or ())
    instruction = folder / "instruction.md"
    if not steps and not instruction.is_file():
        raise ConfigError(f"{folder} has no instruction.md")
    dockerfile = folder / "environment" if (folder / "environment" / "Dockerfile").is_file() else None
    if not environment.get("docker_image") and not (folder / "environment").is_dir():
        raise ConfigError(f"{folder} has neither environment/ nor a docker_image in task.toml")
    mode = verifier.get("environment_mode") or ("separate" if "environment" in verifier else "shared")
    network = environment.get("network_mode")
    return HarborTask(
        name=told.get("task", {}).get("name") or folder.name,
        folder=folder,
        instruction=_instruction(instruction.read_text()) if instruction.is_file() else "",
        image=environment.get("docker_image") or "",
        dockerfile=dockerfile,
        workdir=environment.get("workdir") or "",
        cpus=environment.get("cpus"),
        memory_mib=_memory(environment),
        network=bool(environment.get("allow_internet", True)) if network is None else network != "no-network",
        env=environment.get("env") or {},
        agent_s=agent.get("timeout_sec"),
        agent_user=str(agent.get("user") or ""),
        verifier_s=float(verifier.get("timeout_sec") or 600.0),
        verifier_user=str(verifier.get("user") or ""),
        verifier_env=verifier.get("env") or {},
        separate=mode == "separate",
        verifier_image=(verifier.get("environment") or {}).get("docker_image") or "",
        artifacts=tuple(item if isinstance(item, str) else item["source"] for item in told.get("artifacts") or ()),
        steps=steps,
    )


def _instruction(text: str) -> str:
    """Without the lines at its head that only say "canary", and the blank ones after them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _memory(environment: Mapping[str, Any]) -> int | None:
    if environment.get("memory_mb") is not None:
        return int(environment["memory_mb"])
    if "memory" not in environment:
        return None
    text = str(environment["memory"]).upper().rstrip("B")
    return int(float(text[:-1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[text[-1]])


def _filled(told: Mapping[str, str], what: str) -> dict[str, str]:
    """Values that are wholly ${NAME} or ${NAME:-default} come from our environment."""
    filled = {}
    for key, value in told.items():
        match = _VARIABLE.fullmatch(str(value))
        if match is None:
            filled[key] = str(value)
        elif (found := os.environ.get(match[1], match[2])) is not None:
            filled[key] = found
        else:
            raise EnvError(f"{what} needs the variable {match[1]}, which is not set: export it")
    return filled


class HarborConfig(Config):
    """Where the tasks are."""

    folder: Path
    """A task's folder, or a folder of such."""
    ignore_image: bool = False
    """Play in the sandbox's default machine, whatever image a task names: for tasks that need only a shell."""
    network: bool | None = None
    """Whether agents have a network; None: as each task says."""
    registry: str = ""
    """A name in front of image names."""
    agent: str = ""
    """Trials only: Harbor's agent by name, or module:Class; empty: a plain shell loop."""
    model: str = "openai/policy"
    """Trials only: the model's name, where an agent wants one."""


def folders_of(path: Path) -> list[Path]:
    """The task folders of a dataset, by name."""
    if (path / "task.toml").is_file():
        return [path]
    return sorted(folder.parent for folder in path.glob("*/task.toml"))


class HarborTaskset(Taskset):
    """Tasks of a folder, in their images, played by our harnesses."""

    reward_range = (0.0, 1.0)

    def __init__(self, worker: WorkerConfig) -> None:
        self.name = worker.name
        self.config = build(HarborConfig, worker.settings)
        self.harbor = {str(folder): read_task(folder) for folder in folders_of(self.config.folder)}
        if not self.harbor:
            raise ConfigError(f"{self.config.folder} has no task.toml, and no folder in it has one")
        for task in self.harbor.values():
            if task.steps:
                raise ConfigError(
                    f"{task.name} has several steps: add it with --layer agent, which runs Harbor's trials"
                )
            if task.verifier_user not in ("", "root", task.agent_user):
                raise ConfigError(
                    f"{task.name} is verified as the user {task.verifier_user}: add it with --layer agent"
                )

    def splits(self) -> Sequence[str]:
        return ("train",)

    def tasks(self, split: str) -> Sequence[Task]:
        if split != "train":
            return []
        return [
            Task(
                id=task.name,
                prompt=({"role": "user", "content": task.instruction},),
                data={"folder": key},
                split=split,
            )
            for key, task in self.harbor.items()
        ]

    def seconds(self, task: Task) -> Mapping[str, float]:
        return seconds_of(self.of(task))

    def of(self, task: Task) -> HarborTask:
        """What the folder of a task says."""
        return self.harbor[task.data["folder"]]

    def sandbox(self, task: Task) -> SandboxSpec:
        return sandbox_for(self.of(task), self.config)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        if sandbox is None:
            raise EnvError("a Harbor task needs a sandbox")
        return _HarborEnv(task, self.of(task), self.config, sandbox)

    async def solution(self, task: Task) -> Solution | None:
        folder = self.of(task).folder / "solution"
        if not (folder / "solve.sh").is_file():
            return None
        return Solution(files=_files(folder, "/solution"), commands=("bash /solution/solve.sh",))


def seconds_of(task: HarborTask) -> dict[str, float]:
    """A task's deadlines; what goes around its tests gets a minute more."""
    agent = {} if task.agent_s is None else {"agent": task.agent_s}
    return {**agent, "score": task.verifier_s + 60.0}


def sandbox_for(task: HarborTask, config: HarborConfig) -> SandboxSpec:
    """The machine of a task."""
    default = Resources()
    network = task.network if config.network is None else config.network
    return SandboxSpec(
        image=None if config.ignore_image else _image(task, config),
        workdir=task.workdir or "/app",
        env=_filled(task.env, task.name),
        resources=replace(
            default,
            memory_mib=task.memory_mib or 2048,
            cpus=task.cpus or default.cpus,
            disk_mib=2048,
            pids=512,
        ),
        network="full" if network and not config.ignore_image else "none",
        user=task.agent_user,
    )


def _image(task: HarborTask, config: HarborConfig) -> Image | None:
    if task.image:
        return Image(ref=f"{config.registry}{task.image}")
    return Image(dockerfile=task.dockerfile) if task.dockerfile is not None else None


class _HarborEnv(BaseEnv):
    """One episode. `more_sandboxes` is set by the episode: it makes another machine, for a verifier of its own."""

    more_sandboxes: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]] | None = None

    def __init__(self, task: Task, harbor: HarborTask, config: HarborConfig, sandbox: Sandbox) -> None:
        super().__init__(task)
        self._harbor, self._config, self._sandbox = harbor, config, sandbox

    async def reset(self) -> Observation:
        await self._run(self._sandbox, "mkdir -p /logs/agent /logs/verifier /logs/artifacts; chmod -R 777 /logs")
        environment = self._harbor.folder / "environment"
        if self._harbor.dockerfile is None and environment.is_dir():  # an image as it is, and files beside it
            await _upload(self._sandbox, environment, self._harbor.workdir or "/app")
        return await super().reset()

    async def score(self, transcript: Transcript) -> Score:
        if not self._harbor.separate:
            return await self._verified(self._sandbox, upload=True)
        if self.more_sandboxes is None:
            raise EnvError(f"{self._harbor.name} is verified in a machine of its own, which cannot be had here")
        tests = self._harbor.folder / "tests"
        own = (tests / "Dockerfile").is_file()
        spec = sandbox_for(self._harbor, self._config)
        if not self._config.ignore_image and (own or self._harbor.verifier_image):
            image = (
                Image(dockerfile=tests) if own else Image(ref=f"{self._config.registry}{self._harbor.verifier_image}")
            )
            spec = replace(spec, image=image)
        crossing = await self._packed(["/logs/artifacts", *self._harbor.artifacts])
        async with self.more_sandboxes(replace(spec, user="")) as verifier:
            await self._run(verifier, "mkdir -p /logs/agent /logs/verifier /logs/artifacts")
            await verifier.write("/tmp/crossing.tar", crossing)
            await self._run(verifier, "tar -x -C / -f /tmp/crossing.tar && rm /tmp/crossing.tar")
            return await self._verified(verifier, upload=self._config.ignore_image or not own)

    async def _packed(self, paths: Sequence[str]) -> bytes:
        """What may cross to the verifier, as a tarball."""
        there = [path for path in paths if (await self._sandbox.exec(["test", "-e", path])).exit_code == 0]
        inside = [path.lstrip("/") for path in there] or ["logs/artifacts"]
        done = await self._sandbox.exec(["tar", "-c", "-C", "/", "--", *inside], max_output=_MOST, timeout_s=120.0)
        if done.exit_code != 0 or done.truncated:
            raise EnvError(
                f"the artifacts cannot be taken out of the sandbox: {done.stderr.decode(errors='replace')[-500:]}"
            )
        return _only(done.stdout, inside)

    async def _verified(self, sandbox: Sandbox, *, upload: bool) -> Score:
        """Run tests/test.sh and read what it wrote. Its exit code says nothing."""
        await self._run(sandbox, f"rm -rf {_VERIFIER} && mkdir -p {_VERIFIER} && chmod 777 {_VERIFIER}")
        if upload:
            await self._run(sandbox, "rm -rf /tests")
            await _upload(sandbox, self._harbor.folder / "tests", "/tests")
        command = f"chmod +x /tests/test.sh; (/tests/test.sh) > {_VERIFIER}/test-stdout.txt 2>&1"
        done = await sandbox.exec(
            command,
            timeout_s=self._harbor.verifier_s,
            env=_filled(self._harbor.verifier_env, self._harbor.name),
        )
        if done.outcome == "timeout":
            raise EnvError(f"{self._harbor.name}: its tests took longer than {self._harbor.verifier_s:g} s")
        return await self._reward(sandbox)

    async def _reward(self, sandbox: Sandbox) -> Score:
        for name in ("reward.json", "reward.txt"):  # in this order
            with contextlib.suppress(FileNotFoundError):
                return self._read(name, (await sandbox.read(f"{_VERIFIER}/{name}")).decode("utf-8", "replace"))
        tail = await sandbox.exec(f"tail -c 1500 {_VERIFIER}/test-stdout.txt")
        raise EnvError(
            f"{self._harbor.name}: its tests wrote no {_VERIFIER}/reward.txt or reward.json; they said:\n{tail.text}"
        )

    def _read(self, name: str, text: str) -> Score:
        try:
            told = json.loads(text) if name.endswith("json") else {"reward": float(text)}
            parts = {str(key): float(value) for key, value in told.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise EnvError(f"{self._harbor.name}: {name} holds {text[:200]!r}, which is no reward") from error
        if not parts or not all(map(math.isfinite, parts.values())):
            raise EnvError(f"{self._harbor.name}: {name} holds {text[:200]!r}, which is no finite reward")
        reward = parts.get("reward", sum(parts.values()) / len(parts))
        return Score(reward=reward, parts={key: value for key, value in parts.items() if key != "reward"})

    async def _run(self, sandbox: Sandbox, command: str) -> None:
        done = await sandbox.exec(command, timeout_s=60.0)
        if done.exit_code != 0:
            raise EnvError(f"{self._harbor.name}: {command!r} failed: {done.text[-500:]}")


def _only(packed: bytes, inside: Sequence[str]) -> bytes:
    """Plain files and folders of a tarball that lie where they may: the agent made it, with its own tar."""
    kept = BytesIO()
    try:
        with tarfile.open(fileobj=BytesIO(packed)) as source, tarfile.open(fileobj=kept, mode="w") as target:
            for member in source:
                name = os.path.normpath(member.name)
                allowed = any(name == path or name.startswith(f"{path}/") for path in inside)
                if allowed and (member.isreg() or member.isdir()):
                    member.name = name
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
    except tarfile.TarError as error:
        raise EnvError(f"the artifacts came as no tarball: {error}") from error
    return kept.getvalue()


def _files(folder: Path, target: str) -> dict[str, bytes]:
    return {
        f"{target}/{path.relative_to(folder)}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def _upload(sandbox: Sandbox, folder: Path, target: str) -> None:
    for path, data in _files(folder, target).items():
        await sandbox.write(path, data)


class HarborTrialTaskset(WorkerTaskset):
    """The same tasks through Harbor itself: its agents and its trials, in our sandboxes."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._settings = build(HarborConfig, config.settings)

    def seconds(self, task: Task) -> Mapping[str, float]:
        """A trial is its agent and its tests."""
        told = seconds_of(read_task(Path(task.data["folder"])))
        return {"agent": told.get("agent", 600.0) + told["score"]}

    def sandbox(self, task: Task) -> SandboxSpec:
        spec = sandbox_for(read_task(Path(task.data["folder"])), self._settings)
        return replace(spec, user="")
