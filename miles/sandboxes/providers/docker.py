"""The `docker` backend: one container per sandbox, on any Docker Engine (API 1.41 or newer).

`aiodocker` rather than Docker's own SDK: asynchronous, on the HTTP library that Miles uses anyway, and no thread per
command. The container's first process is a shell that waits: no command can end it, as one can end the child of
`docker --init`, and orphans are reaped all the same. It gives up after the spec's `ttl_s`, so that nothing stays for
ever, whoever forgets it.
"""

import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from miles.config import Config
from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.processes import owner_is_dead
from miles.sandboxes.base import Capabilities, Connect, Image, Sandbox, SandboxInfo, SandboxSpec
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.netns import serve_inside
from miles.sandboxes.providers.base import OWNER, Provider, RemoteMachine, in_time, labels_of, missing

__all__ = ["DockerBackend", "DockerConfig"]

_WAIT = 'end=$(($(date +%s) + $0)); while [ "$(date +%s)" -lt "$end" ]; do sleep 5; done'
_KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What package managers and `su` need; not raw sockets, devices, or other containers' business."""


class DockerConfig(Config):
    """Where the engine is."""

    url: str = ""
    """The engine's address; empty: DOCKER_HOST, or the local socket."""
    image: str = "python:3.12-slim"
    """For sandboxes that name none."""
    runtime: str = ""
    """The container runtime (runsc, kata …); empty: the engine's default."""


class DockerBackend(Provider):
    """Makes containers."""

    name = "docker"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = DockerConfig(**settings)
        self._client: Any = None
        self.snapshots: list[str] = []

    def _docker(self) -> Any:
        if self._client is None:
            try:
                import aiodocker
            except ImportError as error:
                raise missing("aiodocker", "docker", error) from error
            try:
                self._client = aiodocker.Docker(url=self.config.url or None)
                # Every sandbox holds a connection for as long as it lives.
                self._client.connector._limit = 0
            except (ValueError, OSError, AssertionError) as error:  # the last: no socket where one may be
                raise SandboxUnavailable(
                    "there is no Docker engine here: start one, or name its socket in DOCKER_HOST"
                ) from error
        return self._client

    async def probe(self) -> Capabilities:
        docker = self._docker()
        start_one = "no Docker engine answers: start one, or name its socket in DOCKER_HOST"
        async with _errors(start_one, failure=SandboxUnavailable):
            told = await in_time(docker.version(), "the Docker engine", 20.0)
            facts = await in_time(docker.system.info(), "the Docker engine", 20.0)
        limited = all(facts.get(name) for name in ("MemoryLimit", "PidsLimit", "CpuCfsQuota"))
        notes = [f"Docker {told['Version']}, API {told['ApiVersion']}, {facts.get('Driver')}"]
        notes += [] if limited else ["this engine cannot limit memory, processes and processor time (rootless?)"]
        return Capabilities(
            isolation="container",
            network_none=True,
            network_full=True,
            limits="hard" if limited else "best_effort",
            images=("ref", "dockerfile", "snapshot"),
            users=True,
            snapshot=True,
            mounts=True,
            ttl=True,
            notes=tuple(notes),
        )

    async def prepare(self, image: Image) -> None:
        await self._named(image)

    async def _named(self, image: Image | None) -> str:
        """The engine's name of an image, pulled or built when it is not there."""
        docker = self._docker()
        name = self.config.image if image is None else image.ref or image.snapshot
        if image is not None and image.dockerfile is not None:
            name = f"miles-built:{image.digest()}"
        elif image is not None and image.rootfs is not None:
            raise SandboxError("the docker backend takes a ref or a dockerfile; import the root file system first")
        async with _errors(f"image {name}"):
            if await _known(docker.images.inspect(name)):
                return name
            if image is not None and image.dockerfile is not None:
                await self._build(image.dockerfile, name)
            elif image is not None and image.snapshot:
                raise SandboxError(f"there is no snapshot {name}: snapshots end with the process that made them")
            else:
                await docker.images.pull(name)
        return name

    async def _build(self, folder: Path, name: str) -> None:
        context = await asyncio.to_thread(_tarred, folder)
        lines: list[str] = []
        async for told in self._docker().images.build(
            fileobj=context, encoding="gzip", tag=name, rm=True, forcerm=True, stream=True
        ):
            lines.append(str(told.get("stream") or told.get("error") or ""))
            if "error" in told:
                raise SandboxError(f"{folder} cannot be built: {''.join(lines)[-1500:].strip()}")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        name = await self._named(spec.image)
        async with _errors("a container could not be made", failure=SandboxCreateFailed):
            container = await self._docker().containers.create(self._settings(spec, name))
        machine = DockerMachine(self, container, spec)
        try:
            async with _errors("a container did not start", failure=SandboxCreateFailed):
                await container.start()
        except BaseException:
            await asyncio.shield(machine.destroy())
            raise
        sandbox = MachineSandbox(machine, spec)
        await sandbox.start(spec.files)
        return sandbox

    def _settings(self, spec: SandboxSpec, image: str) -> dict[str, Any]:
        resources = spec.resources
        limits: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none" if spec.network == "none" else "bridge",
            "Memory": resources.memory_mib << 20,
            "MemorySwap": resources.memory_mib << 20,
            "PidsLimit": resources.pids,
            "Binds": [f"{folder.resolve()}:{path}:ro" for path, folder in spec.mounts.items()],
            "NanoCpus": int(resources.cpus * 1e9),
            "CapDrop": ["ALL"],
            "CapAdd": list(_KEPT),
            "SecurityOpt": ["no-new-privileges"],
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        }
        if self.config.runtime:
            limits["Runtime"] = self.config.runtime
        return {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", _WAIT],  # an image's own may end at once
            "Cmd": [str(int(spec.ttl_s))],
            "WorkingDir": spec.workdir,
            "Env": [f"{name}={value}" for name, value in spec.env.items()],
            "Labels": self.labels(spec.labels),
            "HostConfig": limits,
        }

    async def machines(self) -> list[SandboxInfo]:
        filters = json.dumps({"label": [OWNER]})
        async with _errors("containers could not be listed"):
            found = await self._docker().containers.list(all=True, filters=filters)
        infos = []
        for container in found:
            told, age = container["Labels"], time.time() - float(container["Created"])
            infos.append(SandboxInfo(id=container.id, owner=told[OWNER], age_s=age, labels=labels_of(told)))
        return infos

    async def reap(self) -> int:
        count, docker = await super().reap(), self._docker()
        async with _errors("snapshots could not be listed"):
            images = await docker.images.list(filters={"label": [OWNER]})
        for image in images:
            if owner_is_dead((image.get("Labels") or {}).get(OWNER, "")):
                await self.forget(image["Id"])
        return count

    async def remove(self, container_id: str) -> None:
        """End a container and delete it; one that is gone is no error."""
        container = self._docker().containers.container(container_id)
        async with _errors(f"container {container_id[:12]} could not be removed", gone_is_fine=True):
            await container.delete(force=True, v=True)

    async def forget(self, image: str) -> None:
        """Delete a snapshot, if it is there and nothing uses it."""
        with suppress(SandboxError):
            async with _errors(f"snapshot {image} could not be removed"):
                await self._docker().images.delete(image, force=True)

    async def close(self) -> None:
        for name in self.snapshots:
            await self.forget(name)
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class DockerMachine(RemoteMachine):
    """One container."""

    has_workdir = True

    def __init__(self, backend: DockerBackend, container: Any, spec: SandboxSpec) -> None:
        self._backend, self._container, self._spec = backend, container, spec

    @property
    def id(self) -> str:
        return str(self._container.id)

    async def open(self, argv: Sequence[str]) -> "DockerPipe":
        async with _errors(f"container {self.id[:12]}", failure=SandboxLost):
            user = "root" if self._spec.user else ""  # who may become another one
            begun = await self._container.exec(list(argv), stdin=True, user=user)
            stream = begun.start(detach=False)
            await stream._init()
        return DockerPipe(stream)

    async def _plain(self, argv: Sequence[str], output: Any, **settings: Any) -> int:
        async with _errors(f"container {self.id[:12]}", failure=SandboxLost):
            begun = await self._container.exec(list(argv), **settings)
            async with begun.start(detach=False) as stream:
                while message := await stream.read_out():
                    output(message.stream, message.data)
            code = (await begun.inspect())["ExitCode"]
            if code is None:
                raise SandboxLost(f"container {self.id[:12]}: the stream of a command ended before it did")
            return int(code)

    async def _upload(self, path: str, data: bytes) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo(Path(path).name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
        async with _errors(f"container {self.id[:12]}", failure=SandboxLost):
            await self._container.put_archive(str(Path(path).parent), packed.getvalue())

    async def alive(self) -> bool:
        try:
            async with _errors(f"container {self.id[:12]}"):
                return bool((await self._container.show())["State"]["Running"])
        except SandboxLost:
            return False

    async def listen(self, connect: Connect, port: int) -> tuple[asyncio.Server, int] | None:
        async with _errors(f"container {self.id[:12]}"):
            pid = int((await self._container.show())["State"]["Pid"])
        if not _can_enter(pid):
            return None
        return await serve_inside(["nsenter", "-t", str(pid), "-n", "--"], connect, port)

    async def snapshot(self) -> Image:
        name = f"miles-snapshot:{self.id[:12]}-{time.time_ns()}"
        repository, _, tag = name.partition(":")
        labels = f"LABEL {OWNER}={self._backend.owner}"
        async with _errors(f"container {self.id[:12]} could not be kept"):
            await self._container.commit(repository=repository, tag=tag, changes=labels)
        self._backend.snapshots.append(name)
        return Image(snapshot=name)

    async def destroy(self) -> None:
        await self._backend.remove(self.id)


class DockerPipe:
    """A process inside, by the stream of its exec."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self) -> bytes:
        while message := await self._stream.read_out():
            if message.stream == 1:
                return bytes(message.data)
        return b""

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except (RuntimeError, AssertionError) as error:  # the connection is closed
            raise SandboxLost("the container's stream has ended") from error

    async def close(self) -> None:
        await self._stream.close()


async def _known(asking: Any) -> bool:
    from aiodocker.exceptions import DockerError

    try:
        await asking
    except DockerError as error:
        if error.status != 404:
            raise
        return False
    return True


@asynccontextmanager
async def _errors(
    what: str, *, failure: type[SandboxError] = SandboxError, gone_is_fine: bool = False
) -> AsyncIterator[None]:
    """The engine's errors as ours: a container that is gone is lost, a full engine may be asked again."""
    import aiohttp
    from aiodocker.exceptions import DockerError

    try:
        yield
    except DockerError as error:
        if gone_is_fine and error.status in (404, 409):
            return
        message = f"{what}: {error.message}"
        if error.status == 404 and "No such container" in str(error.message):
            raise SandboxLost(message) from error
        if error.status == 429 or "toomanyrequests" in str(error.message):
            raise SandboxCreateFailed(message) from error
        if "no space left" in str(error.message):
            raise SandboxError(f"{message} (free some: docker system prune)") from error
        raise failure(message) from error
    except (aiohttp.ClientError, OSError) as error:
        kind = failure if issubclass(failure, SandboxUnavailable) else SandboxLost
        raise kind(f"{what}: the Docker engine does not answer ({error})") from error


def _can_enter(pid: int) -> bool:
    """Whether the engine's containers are this machine's, and this process may enter them."""
    return os.geteuid() == 0 and Path(f"/proc/{pid}/ns/net").exists()


def _tarred(folder: Path) -> io.BytesIO:
    """A build context; the same bytes for the same content."""
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"there is no Dockerfile in {folder}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    packed.seek(0)
    return packed
