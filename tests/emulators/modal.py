"""Modal's API and command router, for the real SDK: both generations of sandboxes (MODAL_SANDBOX_V2=0: the first).

The messages and the lists of methods are those that the SDK ships; what a process does happens in a local sandbox.
"""

import asyncio
import base64
import contextlib
import json
import time

from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2, task_command_router_grpc
from modal_proto import task_command_router_pb2 as router_pb2

from miles.errors import SandboxLost
from tests.emulators.cloud import Cloud

FS_TOOLS = "/__modal/.bin/modal-sandbox-fs-tools"
FS_PROGRAM = """
import json, os, shutil, stat, sys

def told(path):
    facts = os.lstat(path)
    kind = "symlink" if stat.S_ISLNK(facts.st_mode) else "directory" if stat.S_ISDIR(facts.st_mode) else "file"
    found = {"name": os.path.basename(path), "path": path, "type": kind, "size": facts.st_size}
    found.update(mode=stat.S_IMODE(facts.st_mode), permissions=stat.filemode(facts.st_mode))
    found.update(modified_time=facts.st_mtime, owner=str(facts.st_uid), group=str(facts.st_gid))
    if kind == "symlink":
        found["symlink_target"] = os.readlink(path)
    return found

(name, ask), = json.loads(sys.argv[1]).items()
path = ask["path"]
try:
    if name == "ReadFile":
        sys.stdout.buffer.write(open(path, "rb").read())
    elif name == "WriteFile":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    elif name == "ListFiles":
        print(json.dumps([told(os.path.join(path, one)) for one in sorted(os.listdir(path))]))
    elif name == "Stat":
        print(json.dumps(told(path)))
    elif name == "MakeDirectory":
        os.makedirs(path, exist_ok=True) if ask["parents"] else os.mkdir(path)
    elif name == "Remove":
        shutil.rmtree(path) if ask["recursive"] and os.path.isdir(path) else os.remove(path)
except OSError as error:
    kinds = {2: "NotFound", 13: "PermissionDenied", 17: "AlreadyExists", 20: "NotDirectory", 21: "IsDirectory"}
    kinds[39] = "DirectoryNotEmpty"
    print(json.dumps({"error_kind": kinds.get(error.errno, "Other"), "message": error.strerror}), file=sys.stderr)
    sys.exit(1)
"""
DONE = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
ENDED = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)


def token():
    """What looks like a JSON web token for another hour."""
    parts = ({"alg": "none"}, {"exp": time.time() + 3600})
    words = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*words, "x"])


class Execution:
    """A started command: what it wrote so far, for readers that come back."""

    def __init__(self, process):
        self.process, self.outputs, self.over, self.news = (
            process,
            {"stdout": b"", "stderr": b""},
            False,
            asyncio.Event(),
        )
        self.written = 0
        self.following = asyncio.create_task(self.follow())

    async def follow(self):
        with contextlib.suppress(Exception):
            async for name, data in self.process.output():
                self.outputs[name] += data
                self.tell()
        self.over = True
        self.tell()

    def tell(self):
        self.news.set()
        self.news = asyncio.Event()


class Modal(Cloud):
    """`async with Modal().served() as cloud`; `cloud.url` is MODAL_SERVER_URL."""

    def __init__(self):
        super().__init__("sb-")
        self.url, self.executions, self.secrets = "", {}, {}

    # the API
    async def ClientHello(self, request):
        return api_pb2.ClientHelloResponse()

    async def AppGetOrCreate(self, request):
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def EnvironmentGetOrCreate(self, request):
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        facts = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=facts)

    async def ImageGetOrCreate(self, request):
        return api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=DONE)

    async def ImageFromId(self, request):
        return api_pb2.ImageFromIdResponse(image_id=request.image_id)

    async def SecretGetOrCreate(self, request):
        name = f"st-{len(self.secrets)}"
        self.secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=name)

    async def AuthTokenGet(self, request):
        return api_pb2.AuthTokenGetResponse(token=token())

    async def make(self, request):
        if self.faults:
            raise GRPCError(self.faults.popleft(), "as ordered")
        asked = request.definition
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        machine = await self.create(
            {"tags": tags, "definition": asked}, ttl_s=asked.timeout_secs or 300, snapshot=asked.image_id
        )
        return machine.id

    async def SandboxCreateV2(self, request):
        machine = await self.make(request)
        access = api_pb2.CommandRouterAccess(jwt=token(), url=self.url)
        return api_pb2.SandboxCreateV2Response(sandbox_id=machine, task_id=machine, command_router_access=access)

    async def SandboxCreate(self, request):
        return api_pb2.SandboxCreateResponse(sandbox_id=await self.make(request))

    async def SandboxGetTaskId(self, request):
        return api_pb2.SandboxGetTaskIdResponse(task_id=request.sandbox_id)

    SandboxGetTaskIdV2 = SandboxGetTaskId

    async def TaskGetCommandRouterAccess(self, request):
        return api_pb2.TaskGetCommandRouterAccessResponse(jwt=token(), url=self.url)

    async def SandboxGetCommandRouterAccess(self, request):
        return api_pb2.SandboxGetCommandRouterAccessResponse(jwt=token(), url=self.url)

    async def SandboxWait(self, request):
        machine = self.find(request.sandbox_id)
        return api_pb2.SandboxWaitResponse(result=None if machine is not None else ENDED)

    SandboxWaitV2 = SandboxWait

    async def SandboxTerminate(self, request):
        if not await self.kill(request.sandbox_id):
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        return api_pb2.SandboxTerminateResponse()

    SandboxTerminateV2 = SandboxTerminate

    async def SandboxList(self, request):
        if request.before_timestamp:
            return api_pb2.SandboxListResponse()
        found = [
            api_pb2.SandboxInfo(id=machine.id, created_at=machine.began, app_id="ap-1", tags=tags_of(machine))
            for machine in self.machines.values()
            if self.find(machine.id)
        ]
        return api_pb2.SandboxListResponse(sandboxes=found)

    SandboxListV2 = SandboxList

    async def SandboxTagsGet(self, request):
        return api_pb2.SandboxTagsGetResponse(tags=tags_of(self.machines[request.sandbox_id]))

    SandboxTagsGetV2 = SandboxTagsGet

    async def SandboxTagsSet(self, request):
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.machines[request.sandbox_id].facts["tags"] = tags
        return api_pb2.SandboxTagsSetResponse() if hasattr(api_pb2, "SandboxTagsSetResponse") else empty()

    SandboxTagsSetV2 = SandboxTagsSet

    async def SandboxSnapshotFs(self, request):
        return api_pb2.SandboxSnapshotFsResponse(image_id=await self.keep(request.sandbox_id), result=DONE)

    # the command router
    async def TaskSnapshotFilesystem(self, request):
        return router_pb2.TaskSnapshotFilesystemResponse(image_id=await self.keep(request.task_id))

    async def TaskExecStart(self, request):
        machine = self.find(request.task_id)
        if machine is None:
            raise GRPCError(Status.NOT_FOUND, "no such task")
        env, argv = dict(request.env), list(request.command_args)
        if argv[0] == FS_TOOLS:  # a program that Modal puts into every machine
            argv = ["python3", "-c", FS_PROGRAM, *argv[1:]]
        process = await machine.sandbox.spawn(argv, cwd=request.workdir or None, env=env)
        self.executions[request.exec_id] = Execution(process)
        if request.timeout_secs:
            asyncio.get_running_loop().call_later(request.timeout_secs, lambda: asyncio.ensure_future(process.kill()))
        return router_pb2.TaskExecStartResponse()

    async def TaskExecStdioRead(self, request, stream):
        execution, at = self.executions[request.exec_id], request.offset
        first = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        name = "stdout" if first else "stderr"
        while True:
            news = execution.news
            if data := execution.outputs[name][at:]:
                at += len(data)
                for part in range(0, len(data), 1 << 18):
                    await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data[part : part + (1 << 18)]))
            elif execution.over:
                return
            else:
                await news.wait()

    async def TaskExecStdinWrite(self, request):
        execution = self.executions[request.exec_id]
        try:
            if request.data:
                await execution.process.write(request.data)
            if request.eof:
                await execution.process.end_input()
        except SandboxLost as error:
            raise GRPCError(Status.NOT_FOUND, "the task has ended") from error
        return router_pb2.TaskExecStdinWriteResponse()

    async def TaskExecStdinWriteStream(self, stream):
        execution = self.executions[(await stream.recv_message()).start.exec_id]
        async for message in stream:
            if message.HasField("end"):
                await execution.process.end_input()
                break
            await execution.process.write(message.data)
        await stream.send_message(router_pb2.TaskExecStdinWriteStreamResponse())

    async def TaskExecWait(self, request):
        execution = self.executions[request.exec_id]
        await execution.following
        code = execution.process.exit_code
        if code is None or code < 0:
            return router_pb2.TaskExecWaitResponse(signal=-(code or -9))
        return router_pb2.TaskExecWaitResponse(code=code)

    async def TaskExecPoll(self, request):
        execution = self.executions[request.exec_id]
        return router_pb2.TaskExecPollResponse(code=execution.process.exit_code) if execution.over else empty_poll()

    def handlers(self, base):
        """A service of all methods that `base` names; those that are not written here are unimplemented."""
        return Service(self, base).__mapping__()

    @contextlib.asynccontextmanager
    async def served(self):
        services = [
            Service(self, api_grpc.ModalClientBase),
            Service(self, task_command_router_grpc.TaskCommandRouterBase),
        ]
        server = Server(services)
        await server.start("127.0.0.1", 0)
        port = server._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await self.close()
            server.close()
            await server.wait_closed()


class Service:
    """Turns plain methods into a gRPC service."""

    def __init__(self, cloud, base):
        names = [name for name in dir(base) if not name.startswith("_")]
        empty = type("Unimplemented", (base,), dict.fromkeys(names))()
        self.mapping = {}
        for path, handler in empty.__mapping__().items():
            method = getattr(cloud, path.rpartition("/")[2], None)
            self.mapping[path] = handler._replace(func=wrapped(method, handler.cardinality))

    def __mapping__(self):
        return self.mapping


def wrapped(method, cardinality):
    async def answer(stream):
        if method is None:
            raise GRPCError(Status.UNIMPLEMENTED, "the emulator has no such method")
        if cardinality is Cardinality.STREAM_UNARY:
            await method(stream)
            return
        request = await stream.recv_message()
        if cardinality is Cardinality.UNARY_STREAM:
            await method(request, stream)
        else:
            await stream.send_message(await method(request))

    return answer


def tags_of(machine):
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in machine.facts["tags"].items()]


def empty():
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()


def empty_poll():
    return router_pb2.TaskExecPollResponse()


__all__ = ["Handler", "Modal"]
