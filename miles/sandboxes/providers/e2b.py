"""The `e2b` and `agentenv` backends: microVMs by E2B's SDK, from E2B or from a server that speaks its API.

Commands go through one long-lived process inside, so the SDK's own command timeouts, which it does not enforce, do not
matter. AgentENV up to August 2026 refuses the creation route of SDKs from 2.51 on (405): then the older one is used.
"""

import asyncio
import inspect
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from miles.config import Config
from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.http import Http, Unreachable
from miles.sandboxes.base import Capabilities, Image, Sandbox, SandboxInfo, SandboxSpec
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.providers.base import OWNER, Provider, RemoteMachine, TextQueue, in_time, labels_of, missing

__all__ = ["AgentEnvBackend", "E2BBackend", "E2BConfig"]

_PIECE = 1 << 19  # bytes of standard input in one request


class E2BConfig(Config):
    """Where the service is, and what to start."""

    api_key: str = ""
    """The key; empty: E2B_API_KEY (AGENTENV_API_KEY)."""
    url: str = ""
    """The control plane; empty: E2B's own (agentenv: AGENTENV_URL)."""
    sandbox_url: str = ""
    """One address for all machines, where the service routes by header; empty: a host name for each."""
    template: str = "base"
    """For sandboxes that name no image."""
    user: str = "root"
    """Who the process inside runs as; images need not have E2B's own account `user`."""


class E2BBackend(Provider):
    """Makes microVMs."""

    name = "e2b"
    _key, _url = "E2B_API_KEY", "E2B_API_URL"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = E2BConfig(**settings)
        self._old_route = False
        self.snapshots: list[str] = []

    def _options(self) -> dict[str, Any]:
        options = {
            "api_key": self.config.api_key or os.environ.get(self._key, ""),
            "api_url": self.config.url or os.environ.get(self._url, ""),
            "sandbox_url": self.config.sandbox_url,
        }
        return {name: value for name, value in options.items() if value}

    def _sdk(self) -> Any:
        try:
            import e2b
        except ImportError as error:
            raise missing("e2b", self.name, error) from error
        if "api_key" not in self._options():
            raise SandboxUnavailable(f"the {self.name} backend needs a key: set {self._key}")
        return e2b

    async def probe(self) -> Capabilities:
        async with _errors(f"{self.name} does not answer", failure=SandboxUnavailable):
            await in_time(self._page(1), f"listing machines of {self.name}", 30.0)
        return Capabilities(
            isolation="microvm",
            network_none=True,
            network_full=True,
            limits="hard",
            images=("ref", "snapshot"),
            users=True,
            snapshot=True,
            ttl=True,
            notes=("limits are the template's own: memory and processors are chosen when it is built",),
        )

    async def _page(self, limit: int | None = None) -> list[Any]:
        sdk = self._sdk()
        pages = sdk.AsyncSandbox.list(limit=limit, **self._options())
        found = list(await pages.next_items())
        while limit is None and pages.has_next:
            found += await pages.next_items()
        return found

    async def prepare(self, image: Image) -> None:
        if image.kind not in ("ref", "snapshot"):
            raise SandboxError(f"the {self.name} backend takes a template by name (image.ref), not a {image.kind}")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sdk = self._sdk()
        template = self.config.template
        if spec.image is not None:
            await self.prepare(spec.image)
            template = spec.image.ref or spec.image.snapshot
        facts: dict[str, Any] = {
            "template": template,
            "timeout": int(spec.ttl_s),
            "metadata": self.labels(spec.labels),
            "envs": dict(spec.env),
            "allow_internet_access": spec.network == "full",
        }
        async with _errors(f"{self.name} made no machine", failure=SandboxCreateFailed):
            made = await self._create(sdk, facts)
        machine = E2BMachine(self, made)
        sandbox = MachineSandbox(machine, spec)
        await sandbox.start(spec.files)
        return sandbox

    async def _create(self, sdk: Any, facts: dict[str, Any]) -> Any:
        if not self._old_route:
            try:
                return await sdk.AsyncSandbox.create(**facts, **self._options())
            except sdk.SandboxException as error:
                if not str(error).startswith("405"):
                    raise
                self._old_route = True
        return await self._create_by_the_old_route(facts)

    async def _create_by_the_old_route(self, facts: dict[str, Any]) -> Any:
        """POST /sandboxes, and the SDK's own object around the answer."""
        from e2b import AsyncSandbox
        from e2b.connection_config import ConnectionConfig
        from packaging.version import Version

        options = self._options()
        config = ConnectionConfig(**options)
        http = Http(config.api_url)
        body = {
            "templateID": facts["template"],
            "timeout": facts["timeout"],
            "metadata": facts["metadata"],
            "envVars": facts["envs"],
            "allow_internet_access": facts["allow_internet_access"],
        }
        try:
            reply = await http.post("/sandboxes", body, headers={"X-API-Key": config.api_key or ""}, limit_s=120.0)
        except Unreachable as error:
            raise SandboxCreateFailed(f"{self.name} made no machine: {error}") from error
        finally:
            await http.close()
        if reply.status >= 300:
            kind = SandboxCreateFailed if reply.status in (429, 500, 502, 503) else SandboxError
            raise kind(f"{self.name} made no machine: {reply.status} {reply.text[:300]}")
        told = reply.json()
        headers = {"E2b-Sandbox-Id": told["sandboxID"], "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if token := told.get("envdAccessToken"):
            headers["X-Access-Token"] = token
        return AsyncSandbox(
            sandbox_id=told["sandboxID"],
            sandbox_domain=told.get("domain"),
            envd_version=Version(told["envdVersion"]),
            envd_access_token=told.get("envdAccessToken"),
            traffic_access_token=None,
            connection_config=ConnectionConfig(extra_sandbox_headers=headers, **options),
        )

    async def machines(self) -> list[SandboxInfo]:
        async with _errors(f"{self.name} cannot list its machines"):
            found = await in_time(self._page(), f"listing machines of {self.name}")
        now = datetime.now(UTC)
        return [
            SandboxInfo(
                id=info.sandbox_id,
                owner=info.metadata[OWNER],
                age_s=(now - info.started_at).total_seconds(),
                labels=labels_of(info.metadata),
            )
            for info in found
            if OWNER in (info.metadata or {})
        ]

    async def remove(self, machine_id: str) -> None:
        sdk = self._sdk()
        async with _errors(f"machine {machine_id} of {self.name} could not be ended"):
            with suppress(sdk.NotFoundException):
                await in_time(sdk.AsyncSandbox.kill(machine_id, **self._options()), f"ending {machine_id}")

    async def close(self) -> None:
        if self.snapshots:
            sdk = self._sdk()
            for name in self.snapshots:
                with suppress(SandboxError):
                    async with _errors(f"snapshot {name} could not be removed"):
                        await in_time(sdk.AsyncSandbox.delete_snapshot(name, **self._options()), f"snapshot {name}")


class AgentEnvBackend(E2BBackend):
    """The same from an AgentENV server: AGENTENV_URL and AGENTENV_API_KEY."""

    name = "agentenv"
    _key, _url = "AGENTENV_API_KEY", "AGENTENV_URL"

    def _sdk(self) -> Any:
        sdk = super()._sdk()
        if "api_url" not in self._options():
            raise SandboxUnavailable("the agentenv backend needs its server's address: set AGENTENV_URL")
        return sdk


class E2BMachine(RemoteMachine):
    """One microVM."""

    text = True

    def __init__(self, backend: E2BBackend, made: Any) -> None:
        self._backend, self._made = backend, made

    @property
    def id(self) -> str:
        return str(self._made.sandbox_id)

    async def open(self, argv: Sequence[str]) -> "E2BPipe":
        output = TextQueue()
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            handle = await in_time(
                self._made.commands.run(
                    shlex.join(argv),
                    background=True,
                    stdin=True,
                    timeout=0,
                    user=self._backend.config.user,
                    on_stdout=output.feed,
                    retain_output=False,
                ),
                f"a command on {self.id}",
            )
        return E2BPipe(self._made, handle, output)

    async def _plain(self, argv: Sequence[str], output: Any, **settings: Any) -> int:
        sdk = self._backend._sdk()
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            try:
                handle = await self._made.commands.run(
                    shlex.join(argv),
                    background=True,
                    timeout=0,
                    user=settings.get("user") or self._backend.config.user,
                    cwd=settings.get("workdir"),
                    envs=settings.get("environment"),
                    on_stdout=lambda text: output(1, text.encode()),
                    on_stderr=lambda text: output(2, text.encode()),
                    retain_output=False,
                )
                return int((await handle.wait()).exit_code)
            except sdk.CommandExitException as error:
                return int(error.exit_code)

    async def _upload(self, path: str, data: bytes) -> None:
        async with _errors(f"machine {self.id}", failure=SandboxLost):
            await in_time(self._made.files.write(path, data, user=self._backend.config.user), f"writing to {self.id}")

    async def alive(self) -> bool:
        try:
            async with _errors(f"machine {self.id}"):
                return bool(await in_time(self._made.is_running(), f"machine {self.id}", 20.0))
        except SandboxError:
            return False

    async def keepalive(self, ttl_s: float) -> None:
        async with _errors(f"machine {self.id}"):
            await in_time(self._made.set_timeout(int(ttl_s)), f"machine {self.id}")

    async def snapshot(self) -> Image:
        async with _errors(f"machine {self.id} could not be kept"):
            kept = await in_time(self._made.create_snapshot(**_files_only(self._made)), f"keeping {self.id}", 300.0)
        self._backend.snapshots.append(kept.snapshot_id)
        return Image(snapshot=kept.snapshot_id)

    async def destroy(self) -> None:
        await self._backend.remove(self.id)


def _files_only(made: Any) -> dict[str, Any]:
    """Without memory, where the SDK can tell: a fork with its source's processes would not be a fresh one."""
    return {"mode": "filesystem"} if "mode" in inspect.signature(made.create_snapshot).parameters else {}


class E2BPipe:
    """A process inside, by the SDK's handle of it."""

    def __init__(self, made: Any, handle: Any, output: TextQueue) -> None:
        self._made, self._handle = made, handle
        self.read = output.read
        self._waiting = asyncio.ensure_future(self._wait(output))

    async def _wait(self, output: TextQueue) -> None:
        with suppress(Exception):  # however it ended: it has
            await self._handle.wait()
        output.end()

    async def write(self, data: bytes) -> None:
        async with _errors("a machine's process", failure=SandboxLost):
            for at in range(0, len(data), _PIECE):
                part = self._made.commands.send_stdin(self._handle.pid, data[at : at + _PIECE])
                await in_time(part, "writing to a process")

    async def close(self) -> None:
        with suppress(Exception):  # the machine may be gone already
            await asyncio.wait_for(self._handle.kill(), 5.0)
        self._waiting.cancel()
        await asyncio.gather(self._waiting, return_exceptions=True)


@asynccontextmanager
async def _errors(what: str, *, failure: type[SandboxError] = SandboxError) -> AsyncIterator[None]:
    """The SDK's errors as ours."""
    import e2b
    from e2b.exceptions import ServiceBusyException

    try:
        yield
    except SandboxError:
        raise
    except (e2b.RateLimitException, ServiceBusyException) as error:
        raise SandboxCreateFailed(f"{what}: {error}") from error
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{what}: {error}; look at the key") from error
    except (e2b.NotFoundException, e2b.TimeoutException) as error:  # the second: dead machines, too, by the SDK's rules
        raise SandboxLost(f"{what}: {error}") from error
    except (e2b.SandboxException, OSError) as error:
        raise failure(f"{what}: {error}") from error
    except Exception as error:  # its transports' own
        raise (failure if issubclass(failure, SandboxUnavailable) else SandboxLost)(f"{what}: {error}") from error
