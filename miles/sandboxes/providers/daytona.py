"""The `daytona` backend: machines by Daytona's SDK.

The process inside runs as a command of a session, which has a standard input and streams its outputs. Auto-stop is
switched off: its clock does not see everything that an agent does; the time to live is what ends a forgotten machine.
"""

import asyncio
import itertools
import math
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from miles.config import Config
from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.sandboxes.base import Capabilities, Image, Sandbox, SandboxInfo, SandboxSpec
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.providers.base import OWNER, Provider, RemoteMachine, TextQueue, in_time, labels_of, missing

__all__ = ["DaytonaBackend", "DaytonaConfig"]

_numbers = itertools.count()


class DaytonaConfig(Config):
    """Where the service is, and what to start."""

    api_key: str = ""
    """The key; empty: DAYTONA_API_KEY."""
    url: str = ""
    """The service; empty: DAYTONA_API_URL, or Daytona's own."""
    target: str = ""
    """The region; empty: the account's."""
    image: str = "python:3.12-slim"
    """For sandboxes that name none."""
    create_s: float = 300.0
    """Deadline of one creation: an image that is new there is built first."""


class DaytonaBackend(Provider):
    """Makes Daytona machines."""

    name = "daytona"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = DaytonaConfig(**settings)
        self._open: Any = None

    def _client(self) -> Any:
        if self._open is None:
            try:
                import daytona
            except ImportError as error:
                raise missing("daytona", "daytona", error) from error
            key = self.config.api_key or os.environ.get("DAYTONA_API_KEY")
            if not key:
                raise SandboxUnavailable("the daytona backend needs a key: set DAYTONA_API_KEY")
            facts = {"api_url": self.config.url or os.environ.get("DAYTONA_API_URL"), "target": self.config.target}
            settings = {name: value for name, value in facts.items() if value}
            self._open = daytona.AsyncDaytona(daytona.DaytonaConfig(api_key=key, otel_enabled=False, **settings))
        return self._open

    async def probe(self) -> Capabilities:
        async with _errors("Daytona does not answer", failure=SandboxUnavailable):
            await in_time(self._listed(), "listing Daytona's machines", 30.0)
        return Capabilities(
            isolation="container",
            network_none=True,
            network_full=True,
            limits="hard",
            images=("ref", "dockerfile", "snapshot"),
            snapshot=True,
            ttl=True,
            least_ttl_s=60.0,
            notes=("memory and disk in whole GiB, processors in whole numbers",),
        )

    async def _listed(self) -> list[Any]:
        from daytona import ListSandboxesQuery

        return [made async for made in self._client().list(ListSandboxesQuery(limit=200))]

    async def prepare(self, image: Image) -> None:
        self._image(image)

    def _image(self, image: Image | None) -> Any:
        """What the SDK takes: a name, or a Dockerfile of its own kind."""
        from daytona import Image as Recipe

        if image is None:
            return self.config.image
        if image.dockerfile is not None:
            return Recipe.from_dockerfile(image.dockerfile / "Dockerfile")
        if image.rootfs is not None:
            raise SandboxError("the daytona backend takes a ref, a dockerfile or a snapshot, not a rootfs")
        return image.ref

    async def create(self, spec: SandboxSpec) -> Sandbox:
        import daytona

        minutes = max(1, math.ceil(spec.ttl_s / 60))
        facts: dict[str, Any] = {
            "labels": self.labels(spec.labels),
            "env_vars": dict(spec.env),
            "network_block_all": spec.network == "none",
            "auto_stop_interval": 0,
            "auto_delete_interval": 0,
            "ttl_minutes": minutes,
        }
        if spec.image is not None and spec.image.snapshot:
            params: Any = daytona.CreateSandboxFromSnapshotParams(snapshot=spec.image.snapshot, **facts)
        else:
            resources = daytona.Resources(
                cpu=max(1, math.ceil(spec.resources.cpus)),
                memory=max(1, math.ceil(spec.resources.memory_mib / 1024)),
                disk=max(1, math.ceil(spec.resources.disk_mib / 1024)),
            )
            image = self._image(spec.image)
            params = daytona.CreateSandboxFromImageParams(image=image, resources=resources, **facts)
        async with _errors("Daytona made no machine", failure=SandboxCreateFailed):
            made = await self._client().create(params, timeout=self.config.create_s)
        sandbox = MachineSandbox(DaytonaMachine(self, made), spec)
        await sandbox.start(spec.files)
        return sandbox

    async def machines(self) -> list[SandboxInfo]:
        async with _errors("Daytona cannot list its machines"):
            found = await in_time(self._listed(), "listing Daytona's machines")
        now, infos = datetime.now(UTC), []
        for made in found:
            told = made.labels or {}
            if OWNER in told:
                began = datetime.fromisoformat(str(made.created_at)) if made.created_at else now
                began = began if began.tzinfo else began.replace(tzinfo=UTC)
                age = (now - began).total_seconds()
                infos.append(SandboxInfo(id=made.id, owner=told[OWNER], age_s=age, labels=labels_of(told)))
        return infos

    async def remove(self, machine_id: str) -> None:
        from daytona import DaytonaNotFoundError

        async with _errors(f"machine {machine_id} could not be ended"):
            with suppress(DaytonaNotFoundError):
                made = await in_time(self._client().get(machine_id), f"finding {machine_id}")
                await in_time(made.delete(), f"ending {machine_id}")

    async def close(self) -> None:
        client, self._open = self._open, None
        if client is not None:
            await client.close()


class DaytonaMachine(RemoteMachine):
    """One Daytona machine."""

    text = True

    def __init__(self, backend: DaytonaBackend, made: Any) -> None:
        self._backend, self._made = backend, made

    @property
    def id(self) -> str:
        return str(self._made.id)

    async def open(self, argv: Sequence[str]) -> "DaytonaPipe":
        return await self._begin(argv)

    async def _begin(self, argv: Sequence[str]) -> "DaytonaPipe":
        """A session of its own for one command: ending it ends the command."""
        from daytona import SessionExecuteRequest

        process, session = self._made.process, f"miles-{os.getpid()}-{next(_numbers)}"
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            await in_time(process.create_session(session), f"a session on {self.id}")
            request = SessionExecuteRequest(command=shlex.join(argv), run_async=True, suppress_input_echo=True)
            begun = await in_time(process.execute_session_command(session, request), f"a command on {self.id}")
        return DaytonaPipe(process, session, begun.cmd_id)

    async def _plain(self, argv: Sequence[str], output: Any, **settings: Any) -> int:
        words = ["env", *(f"{name}={value}" for name, value in (settings.get("environment") or {}).items()), *argv]
        if settings.get("workdir"):
            words = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', settings["workdir"], *words]
        pipe = await self._begin(words)
        try:
            async with _errors(f"machine {self.id}", failure=SandboxLost):
                await pipe.follow(lambda text: output(1, text.encode()), lambda text: output(2, text.encode()))
                command = await in_time(
                    self._made.process.get_session_command(pipe.session, pipe.command), f"a command on {self.id}"
                )
                if command.exit_code is None:
                    raise SandboxLost(f"machine {self.id}: the stream of a command ended before it did")
                return int(command.exit_code)
        finally:
            await pipe.close()

    async def _upload(self, path: str, data: bytes) -> None:
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            await in_time(self._made.fs.upload_file(data, path), f"writing to {self.id}")

    async def alive(self) -> bool:
        try:
            async with _errors(f"machine {self.id}"):
                await in_time(self._made.refresh_data(), f"machine {self.id}", 20.0)
                return str(getattr(self._made.state, "value", self._made.state)) == "started"
        except SandboxError:
            return False

    async def keepalive(self, ttl_s: float) -> None:
        async with _errors(f"machine {self.id}"):
            await in_time(self._made.set_ttl(max(1, math.ceil(ttl_s / 60))), f"machine {self.id}")

    async def snapshot(self) -> Image:
        name = f"miles-{self.id[:12]}-{next(_numbers)}"
        async with _errors(f"machine {self.id} could not be kept"):
            await in_time(self._made.create_snapshot(name, timeout=300), f"keeping {self.id}", 310.0)
        return Image(snapshot=name)

    async def destroy(self) -> None:
        from daytona import DaytonaNotFoundError

        async with _errors(f"machine {self.id} could not be ended"):
            with suppress(DaytonaNotFoundError):
                await in_time(self._made.delete(), f"ending {self.id}")


class DaytonaPipe:
    """A process inside, by the session that it is the one command of."""

    def __init__(self, process: Any, session: str, command: str) -> None:
        self._process, self.session, self.command = process, session, command
        self._output = TextQueue()
        self._following: asyncio.Future[Any] | None = None

    async def follow(self, on_stdout: Any, on_stderr: Any) -> None:
        """Hand outputs on until the command ends."""
        await self._process.get_session_command_logs_async(self.session, self.command, on_stdout, on_stderr)

    async def read(self) -> bytes:
        if self._following is None:
            self._following = asyncio.ensure_future(self.follow(self._output.feed, lambda text: None))
            self._following.add_done_callback(self._output.end)
        return await self._output.read()

    async def write(self, data: bytes) -> None:
        async with _errors("a machine's process", failure=SandboxLost):
            sending = self._process.send_session_command_input(self.session, self.command, data.decode())
            await in_time(sending, "writing to a process")

    async def close(self) -> None:
        with suppress(Exception):  # the machine may be gone already
            await asyncio.wait_for(self._process.delete_session(self.session), 5.0)
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)


@asynccontextmanager
async def _errors(what: str, *, failure: type[SandboxError] = SandboxError) -> AsyncIterator[None]:
    """The SDK's errors as ours."""
    from daytona.common import errors

    try:
        yield
    except SandboxError:
        raise
    except (errors.DaytonaRateLimitError, errors.DaytonaQueueTimeoutError) as error:
        raise SandboxCreateFailed(f"{what}: {error}") from error
    except (errors.DaytonaAuthenticationError, errors.DaytonaAuthorizationError, errors.DaytonaForbiddenError) as error:
        raise SandboxUnavailable(f"{what}: {error}; look at the key") from error
    except (errors.DaytonaNotFoundError, errors.DaytonaGoneError, errors.DaytonaSpotEvictedError) as error:
        raise SandboxLost(f"{what}: {error}") from error
    except (errors.DaytonaConnectionError, errors.DaytonaTimeoutError, errors.DaytonaBadGatewayError) as error:
        raise (failure if failure is not SandboxError else SandboxLost)(f"{what}: {error}") from error
    except (errors.DaytonaError, OSError) as error:
        raise failure(f"{what}: {error}") from error
    except Exception as error:  # its transports' own
        raise (failure if issubclass(failure, SandboxUnavailable) else SandboxLost)(f"{what}: {error}") from error
