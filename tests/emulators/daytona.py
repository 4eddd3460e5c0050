"""Daytona's API and the toolbox of its machines, for the real SDK; what a process does happens in a local sandbox."""

import asyncio
import contextlib
import datetime
import itertools
import shlex

from aiohttp import web

from tests.emulators.cloud import Cloud

KEY = "dtn_0"
MARK = {"stdout": b"\x01\x01\x01", "stderr": b"\x02\x02\x02"}
_numbers = itertools.count(1)


class Command:
    """One command of a session."""

    def __init__(self, process):
        self.process, self.log, self.news, self.over = process, b"", asyncio.Event(), False
        self.following = asyncio.create_task(self.follow())

    async def follow(self):
        with contextlib.suppress(Exception):
            async for name, data in self.process.output():
                self.log += MARK[name] + data
                self.tell()
        self.over = True
        self.tell()

    def tell(self):
        self.news.set()
        self.news = asyncio.Event()


class Daytona(Cloud):
    """`async with Daytona().served() as cloud`; `cloud.url` is DAYTONA_API_URL."""

    def __init__(self):
        super().__init__("d")
        self.url = ""
        self.app = web.Application(middlewares=[self.checked], client_max_size=1 << 28)
        tools = "/toolbox/{id}"
        self.app.add_routes(
            [
                web.post("/sandbox", self.make),
                web.get("/sandbox", self.listed),
                web.get("/sandbox/paginated", self.listed),
                web.get("/sandbox/{id}", self.shown),
                web.delete("/sandbox/{id}", self.end),
                web.post("/sandbox/{id}/snapshot", self.snapshot),
                web.get("/sandbox/{id}/toolbox-proxy-url", self.proxy),
                web.post(tools + "/process/session", self.begin_session),
                web.delete(tools + "/process/session/{session}", self.end_session),
                web.post(tools + "/process/session/{session}/exec", self.execute),
                web.get(tools + "/process/session/{session}/command/{command}", self.command),
                web.get(tools + "/process/session/{session}/command/{command}/logs", self.logs),
                web.post(tools + "/process/session/{session}/command/{command}/input", self.input),
                web.post(tools + "/files/bulk-upload", self.upload),
            ]
        )

    @web.middleware
    async def checked(self, request, handler):
        self.asked.append(f"{request.method} {request.path}")
        if request.path.startswith("/sandbox"):
            if request.headers.get("Authorization") != f"Bearer {KEY}":
                return web.json_response({"message": "the key is unknown"}, status=401)
            if self.faults and request.method == "POST":
                return web.json_response({"message": "as ordered"}, status=self.faults.popleft())
        return await handler(request)

    def told(self, machine):
        began = datetime.datetime.fromtimestamp(machine.began, datetime.UTC).isoformat()
        return {
            "id": machine.id,
            "organizationId": "o",
            "name": machine.id,
            "user": "daytona",
            "env": machine.facts.get("env") or {},
            "labels": machine.facts.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(machine.facts.get("networkBlockAll")),
            "target": "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 1,
            "state": "started",
            "createdAt": began,
            "toolboxProxyUrl": f"{self.url}/toolbox",
            "kvm": False,
            "spot": False,
        }

    async def make(self, request):
        facts = await request.json()
        ttl_s = 60 * (facts.get("ttlMinutes") or 60)
        machine = await self.create(facts, ttl_s=ttl_s, env=facts.get("env"), snapshot=facts.get("snapshot"))
        machine.facts["sessions"] = {}
        return web.json_response(self.told(machine))

    async def listed(self, request):
        items = [self.told(machine) for machine in self.machines.values() if self.find(machine.id)]
        return web.json_response({"items": items, "total": len(items), "page": 1, "totalPages": 1, "nextCursor": None})

    def at(self, request):
        machine = self.find(request.match_info["id"])
        if machine is None:
            raise web.HTTPNotFound(text='{"message": "not found"}', content_type="application/json")
        return machine

    async def shown(self, request):
        return web.json_response(self.told(self.at(request)))

    async def end(self, request):
        machine = self.at(request)
        answer = self.told(machine) | {"state": "destroyed"}
        await self.kill(machine.id)
        return web.json_response(answer)

    async def snapshot(self, request):
        name = (await request.json())["name"]
        kept = await self.keep(self.at(request).id)
        self.snapshots[name] = self.snapshots.pop(kept)
        return web.json_response(self.told(self.at(request)))

    async def proxy(self, request):
        return web.json_response({"url": f"{self.url}/toolbox"})

    async def begin_session(self, request):
        self.at(request).facts["sessions"][(await request.json())["sessionId"]] = {}
        return web.Response(status=201)

    async def end_session(self, request):
        for command in self.at(request).facts["sessions"].pop(request.match_info["session"], {}).values():
            with contextlib.suppress(Exception):
                await command.process.kill()
        return web.Response(status=204)

    def session(self, request):
        return self.at(request).facts["sessions"][request.match_info["session"]]

    async def execute(self, request):
        asked, machine = await request.json(), self.at(request)
        process = await machine.sandbox.spawn(shlex.split(asked["command"]))
        name = f"c{next(_numbers)}"
        self.session(request)[name] = Command(process)
        return web.json_response({"cmdId": name}, status=202)

    async def command(self, request):
        name = request.match_info["command"]
        code = self.session(request)[name].process.exit_code
        code = code if code is None or code >= 0 else 128 - code
        return web.json_response({"id": name, "command": "", "exitCode": code})

    async def logs(self, request):
        command, socket = self.session(request)[request.match_info["command"]], web.WebSocketResponse()
        await socket.prepare(request)
        at = 0
        while True:
            news = command.news
            if data := command.log[at:]:
                at += len(data)
                await socket.send_bytes(data)
            elif command.over:
                break
            else:
                await news.wait()
        await socket.close()
        return socket

    async def input(self, request):
        data = (await request.json())["data"]
        await self.session(request)[request.match_info["command"]].process.write(data.encode())
        return web.Response(status=204)

    async def upload(self, request):
        machine, fields = self.at(request), {}
        async for part in await request.multipart():
            fields[part.name] = bytes(await part.read())
        path = next(value for name, value in fields.items() if name.endswith("path")).decode()
        await machine.sandbox.write(path, next(value for name, value in fields.items() if name.endswith("file")))
        return web.Response(status=200)

    @contextlib.asynccontextmanager
    async def served(self):
        runner = web.AppRunner(self.app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await self.close()
            await runner.cleanup()
