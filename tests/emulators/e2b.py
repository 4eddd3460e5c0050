"""E2B's control plane and envd, for the real SDK; `old` knows only the creation route of AgentENV before its PR 306.

envd's messages and routes are those that the SDK ships; what a process does happens in a local sandbox.
"""

import asyncio
import contextlib
import datetime
import time

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_connect import ProcessASGIApplication
from e2b.envd.process.process_pb import (
    CloseStdinResponse,
    ProcessEvent,
    SendInputResponse,
    SendSignalResponse,
    StartResponse,
)
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.emulators.cloud import Cloud, served

KEY = "e2b_" + "0" * 40


class Envd:
    """The process service of every machine; which one, a header says."""

    def __init__(self, cloud):
        self.cloud = cloud

    def machine(self, ctx):
        machine = self.cloud.find(ctx.request_headers.get("e2b-sandbox-id"))
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "the sandbox was not found")
        return machine

    def process(self, request, ctx):
        process = self.machine(ctx).processes.get(request.process.selector.value)
        if process is None:
            raise ConnectError(Code.NOT_FOUND, "no such process")
        return process

    async def start(self, request, ctx):
        machine, asked = self.machine(ctx), request.process
        argv = [asked.cmd, *asked.args]
        process = await machine.sandbox.spawn(argv, cwd=asked.cwd or None, env=dict(asked.envs))
        machine.processes[process.pid] = process
        yield event("start", ProcessEvent.StartEvent(pid=process.pid))
        if not request.stdin:
            await process.end_input()
        limit = None if ctx.timeout_ms is None else ctx.timeout_ms / 1000
        try:
            async with asyncio.timeout(limit):
                async for name, data in process.output():
                    yield event("data", ProcessEvent.DataEvent(output=Oneof(name, data)))
        except TimeoutError:
            await process.kill()
            raise ConnectError(Code.DEADLINE_EXCEEDED, "the command took too long") from None
        except BaseException:  # the caller hung up
            with contextlib.suppress(Exception):
                await process.kill()
            raise
        machine.processes.pop(process.pid, None)
        code = process.exit_code
        yield event("end", ProcessEvent.EndEvent(exit_code=code if code >= 0 else 128 - code, exited=code >= 0))

    async def send_input(self, request, ctx):
        await self.process(request, ctx).write(request.input.input.value)
        return SendInputResponse()

    async def close_stdin(self, request, ctx):
        await self.process(request, ctx).end_input()
        return CloseStdinResponse()

    async def send_signal(self, request, ctx):
        await self.process(request, ctx).kill(int(request.signal))
        return SendSignalResponse()

    async def list(self, request, ctx):
        raise ConnectError(Code.UNIMPLEMENTED, "list")

    connect = update = stream_input = list


def event(name, value):
    return StartResponse(event=ProcessEvent(event=Oneof(name, value)))


class E2B(Cloud):
    """`async with E2B().served() as cloud`; `cloud.url` is both planes."""

    def __init__(self, *, old=False):
        super().__init__("i")
        self.old, self.url = old, ""
        self.rpc = ProcessASGIApplication(Envd(self))
        self.routes = Starlette(
            routes=[
                Route("/sandboxes", self.make, methods=["POST"]),
                Route("/v2/sandboxes", self.make_new, methods=["POST"]),
                Route("/v2/sandboxes", self.listed, methods=["GET"]),
                Route("/sandboxes/{id}", self.end, methods=["DELETE"]),
                Route("/sandboxes/{id}/timeout", self.set_timeout, methods=["POST"]),
                Route("/sandboxes/{id}/snapshots", self.snapshot, methods=["POST"]),
                Route("/health", self.health),
                Route("/files", self.upload, methods=["POST"]),
            ]
        )

    async def __call__(self, scope, receive, send):
        path = scope.get("path", "")
        if path.startswith("/process.Process/"):
            await self.rpc(scope, receive, send)
            return None
        headers = dict(scope["headers"])
        if path not in ("/health", "/files"):
            self.asked.append(f"{scope['method']} {path}")
            if headers.get(b"x-api-key") != KEY.encode():
                answer = JSONResponse({"code": 401, "message": "the key is unknown"}, 401)
                return await answer(scope, receive, send)
            if self.faults:
                status = self.faults.popleft()
                answer = JSONResponse({"code": status, "message": "as ordered"}, status, {"Retry-After": "0"})
                return await answer(scope, receive, send)
        return await self.routes(scope, receive, send)

    async def make_new(self, request):
        if self.old:
            return Response(status_code=405)
        return await self.make(request)

    async def make(self, request):
        body = await request.json()
        machine = await self.create(
            body, ttl_s=body.get("timeout", 300), env=body.get("envVars"), snapshot=body["templateID"]
        )
        told = {"templateID": body["templateID"], "sandboxID": machine.id, "clientID": "c", "envdVersion": "0.6.2"}
        return JSONResponse(told, 201)

    async def listed(self, request):
        found = []
        for machine in self.machines.values():
            if self.find(machine.id) is None:
                continue
            began = datetime.datetime.fromtimestamp(machine.began, datetime.UTC).isoformat()
            ends = datetime.datetime.fromtimestamp(machine.ends_at, datetime.UTC).isoformat()
            facts = {"templateID": "base", "sandboxID": machine.id, "clientID": "c", "envdVersion": "0.6.2"}
            facts |= {"startedAt": began, "endAt": ends, "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024}
            found.append(facts | {"state": "running", "metadata": machine.facts.get("metadata", {})})
        return JSONResponse(found)

    async def end(self, request):
        gone = await self.kill(request.path_params["id"])
        return Response(status_code=204) if gone else JSONResponse({"code": 404, "message": "not found"}, 404)

    async def set_timeout(self, request):
        machine = self.find(request.path_params["id"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "not found"}, 404)
        machine.ends_at = time.time() + (await request.json())["timeout"]
        return Response(status_code=204)

    async def snapshot(self, request):
        name = await self.keep(request.path_params["id"])
        return JSONResponse({"snapshotID": name, "names": []}, 201)

    async def health(self, request):
        return Response(status_code=204 if self.find(request.headers.get("e2b-sandbox-id")) else 502)

    async def upload(self, request):
        machine, path = self.find(request.headers.get("e2b-sandbox-id")), request.query_params["path"]
        await machine.sandbox.write(path, await request.body())
        return JSONResponse([{"name": path.rpartition("/")[2], "path": path, "type": "file"}])

    @contextlib.asynccontextmanager
    async def served(self):
        async with served(self) as self.url:
            try:
                yield self
            finally:
                await self.close()
