"""The `modal` backend: containers by Modal's SDK.

Modal's protocol is its own business and changes with its SDK; all that touches it is in this file.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from miles.config import Config
from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.sandboxes.base import Capabilities, Image, Sandbox, SandboxInfo, SandboxSpec
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.providers.base import OWNER, Provider, RemoteMachine, in_time, labels_of, missing

__all__ = ["ModalBackend", "ModalConfig"]

_PIECE = 1 << 20  # bytes between two drains
_LONGEST_S = 24 * 3600  # that Modal lets a machine live


class ModalConfig(Config):
    """What to start. Modal's own settings (MODAL_TOKEN_ID, MODAL_TOKEN_SECRET, a profile) say as whom."""

    app: str = "miles"
    """The app that machines belong to; made when it is not there."""
    image: str = "python:3.12-slim"
    """For sandboxes that name none."""
    region: str = ""
    """Where machines are; empty: anywhere."""
    vm: bool = False
    """Whether machines are virtual ones rather than gVisor containers."""


class ModalBackend(Provider):
    """Makes Modal sandboxes."""

    name = "modal"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = ModalConfig(**settings)
        self._app: Any = None

    def _sdk(self) -> Any:
        try:
            import modal
        except ImportError as error:
            raise missing("modal", "modal", error) from error
        return modal

    async def _application(self) -> Any:
        modal = self._sdk()
        if self._app is None:
            async with _errors("Modal does not answer", failure=SandboxUnavailable):
                looking = modal.App.lookup.aio(self.config.app, create_if_missing=True)
                self._app = await in_time(looking, "Modal's app", 60.0)
        return self._app

    async def probe(self) -> Capabilities:
        self._sdk()
        if not _has_account():
            raise SandboxUnavailable("the modal backend needs an account: run `modal setup`, or set MODAL_TOKEN_ID")
        await self._application()
        return Capabilities(
            isolation="microvm" if self.config.vm else "container",
            network_none=True,
            network_full=True,
            limits="hard",
            images=("ref", "dockerfile", "snapshot"),
            users=True,
            snapshot=True,
            ttl=True,
        )

    def _image(self, image: Image | None) -> Any:
        modal = self._sdk()
        if image is None or image.ref:
            return modal.Image.from_registry(self.config.image if image is None else image.ref)
        if image.dockerfile is not None:
            return modal.Image.from_dockerfile(image.dockerfile / "Dockerfile", context_dir=image.dockerfile)
        if image.snapshot:
            return modal.Image.from_id(image.snapshot)
        raise SandboxError("the modal backend takes a ref, a dockerfile or a snapshot, not a rootfs")

    async def prepare(self, image: Image) -> None:
        app = await self._application()
        async with _errors(f"image {image.digest()} could not be built"):
            await in_time(self._image(image).build.aio(app), "building an image", 1800.0)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        modal, app = self._sdk(), await self._application()
        resources = spec.resources
        facts: dict[str, Any] = {
            "app": app,
            "image": self._image(spec.image),
            "timeout": int(min(spec.ttl_s, _LONGEST_S)),
            "cpu": (min(0.125, resources.cpus), resources.cpus),
            "memory": (min(128, resources.memory_mib), resources.memory_mib),
            "block_network": spec.network == "none",
            "env": dict(spec.env),
            "tags": self.labels(spec.labels),
        }
        if self.config.region:
            facts["region"] = self.config.region
        if self.config.vm:
            facts["runtime"] = "vm"
        async with _errors("Modal made no machine", failure=SandboxCreateFailed):
            made = await modal.Sandbox.create.aio(**facts)
        sandbox = MachineSandbox(ModalMachine(self, made), spec)
        await sandbox.start(spec.files)
        return sandbox

    async def machines(self) -> list[SandboxInfo]:
        modal, app = self._sdk(), await self._application()
        infos = []
        async with _errors("Modal cannot list its machines"):
            async for made in modal.Sandbox.list.aio(app_id=app.app_id):
                tags = await in_time(made.get_tags.aio(), "a machine's tags")
                if OWNER in tags:
                    age = time.time() - float(tags.get("miles-created", time.time()))
                    infos.append(SandboxInfo(id=made.object_id, owner=tags[OWNER], age_s=age, labels=labels_of(tags)))
        return infos

    def labels(self, labels: Any) -> dict[str, str]:
        return {**super().labels(labels), "miles-created": f"{time.time():.0f}"}

    async def remove(self, machine_id: str) -> None:
        modal = self._sdk()
        async with _errors(f"machine {machine_id} could not be ended"):
            with suppress(modal.exception.NotFoundError):
                made = await in_time(modal.Sandbox.from_id.aio(machine_id), f"finding {machine_id}")
                await in_time(made.terminate.aio(), f"ending {machine_id}")

    async def close(self) -> None:
        return None


class ModalMachine(RemoteMachine):
    """One Modal sandbox."""

    def __init__(self, backend: ModalBackend, made: Any) -> None:
        self._backend, self._made = backend, made

    @property
    def id(self) -> str:
        return str(self._made.object_id)

    async def open(self, argv: Sequence[str]) -> "ModalPipe":
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            process = await in_time(self._made.exec.aio(*argv, text=False), f"a command on {self.id}")
        return ModalPipe(process)

    async def _plain(self, argv: Sequence[str], output: Any, **settings: Any) -> int:
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            process = await self._made.exec.aio(
                *argv, text=False, workdir=settings.get("workdir"), env=settings.get("environment")
            )

            async def take(number: int, stream: Any) -> None:
                async for data in stream:
                    output(number, data)

            await asyncio.gather(take(1, process.stdout), take(2, process.stderr))
            return int(await process.wait.aio())

    async def _upload(self, path: str, data: bytes) -> None:
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            process = await self._made.exec.aio("/bin/sh", "-c", 'cat > "$0"', path, text=False)
            process.stdin.write(data)
            process.stdin.write_eof()
            await in_time(process.stdin.drain.aio(), f"writing to {self.id}")
            await in_time(process.wait.aio(), f"writing to {self.id}")

    async def alive(self) -> bool:
        try:
            async with _errors(f"machine {self.id}"):
                return await in_time(self._made.poll.aio(), f"machine {self.id}", 20.0) is None
        except SandboxError:
            return False

    async def snapshot(self) -> Image:
        async with _errors(f"machine {self.id} could not be kept"):
            kept = await in_time(self._made.snapshot_filesystem.aio(), f"keeping {self.id}", 300.0)
        return Image(snapshot=kept.object_id)

    async def destroy(self) -> None:
        async with _errors(f"machine {self.id} could not be ended"):
            with suppress(self._backend._sdk().exception.NotFoundError):
                await in_time(self._made.terminate.aio(), f"ending {self.id}")


class ModalPipe:
    """A process inside, by the SDK's handle of it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._parts = aiter(process.stdout)

    async def read(self) -> bytes:
        async with _errors("a machine's process", failure=SandboxLost):
            return bytes(await anext(self._parts, b""))

    async def write(self, data: bytes) -> None:
        async with _errors("a machine's process", failure=SandboxLost):
            for at in range(0, len(data), _PIECE):
                self._process.stdin.write(data[at : at + _PIECE])
                await in_time(self._process.stdin.drain.aio(), "writing to a process")

    async def close(self) -> None:
        with suppress(Exception):  # the machine may be gone already
            self._process.stdin.write_eof()
            await asyncio.wait_for(self._process.stdin.drain.aio(), 5.0)


def _has_account() -> bool:
    return bool(os.environ.get("MODAL_TOKEN_ID")) or (Path.home() / ".modal.toml").is_file()


@asynccontextmanager
async def _errors(what: str, *, failure: type[SandboxError] = SandboxError) -> AsyncIterator[None]:
    """The SDK's errors as ours."""
    from modal import exception

    try:
        yield
    except SandboxError:
        raise
    except exception.ResourceExhaustedError as error:
        raise SandboxCreateFailed(f"{what}: {error}") from error
    except (exception.AuthError, exception.PermissionDeniedError) as error:
        raise SandboxUnavailable(f"{what}: {error}; run `modal setup`") from error
    except (exception.NotFoundError, exception.SandboxTerminatedError, exception.SandboxTimeoutError) as error:
        raise SandboxLost(f"{what}: {error}") from error
    except (exception.ServiceError, exception.ConnectionError, exception.TimeoutError) as error:
        raise (failure if failure is not SandboxError else SandboxLost)(f"{what}: {error}") from error
    except (exception.Error, OSError) as error:
        raise failure(f"{what}: {error}") from error
    except Exception as error:  # its transports' own
        raise (failure if issubclass(failure, SandboxUnavailable) else SandboxLost)(f"{what}: {error}") from error
