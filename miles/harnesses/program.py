"""A program in the sandbox that plays by itself: started once, left alone, judged by what the session recorded.

Exit codes lie both ways (some programs end with 0 after they gave up, some with 1 after the task was done), so an end
is read from the records: a request that was refused and never answered, or calls left open by a program that failed.
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from miles.config import Config
from miles.errors import ConfigError, HarnessError, SandboxError
from miles.harnesses.base import LIMITS, AgentContext, SessionNeeds
from miles.harnesses.description import Description, Launch, describe, settings_class
from miles.harnesses.install import Installed, install
from miles.registry import import_target
from miles.sandboxes.base import Capabilities, ExecResult, Resources, Sandbox, SandboxSpec
from miles.types import Message

__all__ = ["BUILT_IN", "ProgramHarness", "program_class"]

HOME = "/home/agent"
_TOOL = "/tmp/env-tool"
_MISSING = 'for name in "$@"; do command -v "$name" > /dev/null || echo "$name"; done'
_GRACE_S = 1.0  # what is left of the deadline when the program is ended, to read how it did
_LOG_BYTES, _LOG_LINES = 16_384, 120
_LONGEST = (1 << 17) - 1
"""Bytes of one argument (MAX_ARG_STRLEN, execve(2))."""


class ProgramHarness:
    """Runs what a `harness.toml` describes. Subclass it, as its `plugin`, where words are not enough."""

    name: ClassVar[str]
    description: ClassVar[Description]
    folder: ClassVar[Path]
    """Where its description is; what that names is relative to it."""
    config_class: ClassVar[type[Config]]

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.config_class()
        self.installed: Installed | None = None
        session = self.description.session
        self.needs = SessionNeeds(
            canonicalisers=session.canonicalisers,
            report_truncation=None if session.report_truncation else False,
            wishes=session.wishes,
        )

    def prepare(self) -> None:
        """Have the program on this host; blocks. HarnessError when it cannot be installed."""
        if self.installed is None:
            self.installed = install(self.name, self.description, self.folder, tell=_say)

    def machine(self, spec: SandboxSpec | None, capabilities: Capabilities | None) -> SandboxSpec:
        """The task's sandbox with the program in it and room for it; one of its own where the task has none."""
        spec, least = spec or SandboxSpec(), self.description.machine
        told = spec.resources
        resources = Resources(
            memory_mib=max(told.memory_mib, least.memory_mib),
            pids=max(told.pids, least.pids),
            disk_mib=max(told.disk_mib, least.disk_mib),
            cpus=max(told.cpus, least.cpus),
        )
        shown = capabilities is None or capabilities.mounts
        mounts = self._program().mounts if shown else {}  # else the image has it: `miles harness export`
        return replace(spec, resources=resources, mounts={**spec.mounts, **mounts})

    async def run(self, context: AgentContext) -> None:
        if context.sandbox is None:
            raise HarnessError(f"{self.description.title} needs a sandbox")
        await self._has_what_it_needs(context.sandbox)
        values = await self.values(context)
        launch = self.launch(values)
        for path, text in launch.files.items():
            await context.sandbox.write(path, text.encode())
        env = {"HOME": HOME, "TERM": "dumb", "NO_COLOR": "1", **launch.env}
        for command in (["mkdir", "-p", HOME], *launch.first):
            done = await context.sandbox.exec(list(command), env=env, timeout_s=self._left(context))
            if done.exit_code != 0:
                self._tell(context, command, done)
                said = f"{' '.join(command)[:200]}: {done.text[-500:].strip()}"
                raise SandboxError(f"{self.description.title} cannot begin: {said}")
        _refuse_what_is_too_long(self.description.title, launch)
        done = await context.sandbox.exec(
            list(launch.command),
            env=env,
            stdin=launch.stdin.encode(),
            timeout_s=self._left(context),
            max_output=_LOG_BYTES,
        )
        self._tell(context, launch.command, done)
        await self.ended(context, done)

    async def values(self, context: AgentContext) -> dict[str, Any]:
        """What the texts of the description may name."""
        endpoint = await context.endpoint_inside()
        system, prompt = told_of(context.observation.messages)
        offered = bool(context.tools.tools)
        values: dict[str, Any] = {
            "prompt": prompt,
            "system": system,
            "model": endpoint.model,
            "base_url": endpoint.base_url,
            "root_url": endpoint.root_url,
            "api_key": endpoint.api_key,
            "context": endpoint.context,
            "max_tokens": endpoint.max_tokens,
            "mcp_url": endpoint.mcp_url if offered and self.description.takes_mcp else "",
            "home": HOME,
            "seconds": math.ceil(self._left(context)),
            **self._program().values(),
            **self.config.model_dump(),
        }
        if offered and not self.description.takes_mcp and context.sandbox is not None:
            values["prompt"] += await self._commands(context, context.sandbox, endpoint.mcp_url)
        return values

    async def _commands(self, context: AgentContext, sandbox: Sandbox, url: str) -> str:
        """For a program that has no MCP: the environment's tools as a command of the sandbox, and how it is told."""
        script = Template(_SCRIPT).substitute(url=url, key=context.endpoint.api_key)
        await sandbox.write(_TOOL, script.encode())
        await sandbox.exec(["chmod", "755", _TOOL])
        lines = [f"\n\nYou act by running a command in the shell: {_TOOL} NAME '{{\"ARGUMENT\": VALUE}}'. Names are:"]
        for tool in context.tools.tools:
            told = tool["function"]
            lines.append(
                f"- {told['name']}: {told.get('description', '')} Parameters: {json.dumps(told.get('parameters', {}))}"
            )
        return "\n".join(lines)

    async def _has_what_it_needs(self, sandbox: Sandbox) -> None:
        """SandboxError for an image without a program that this one calls: nothing that the policy did."""
        wanted = self.description.install.needs
        if wanted:
            done = await sandbox.exec(["/bin/sh", "-c", _MISSING, "sh", *wanted])
            if missing := done.stdout.decode(errors="replace").split():
                raise SandboxError(f"{self.description.title} needs {', '.join(missing)} in the sandbox's image")

    def launch(self, values: Mapping[str, Any]) -> Launch:
        """The run with these values."""
        return self.description.launch(values)

    async def ended(self, context: AgentContext, done: ExecResult) -> None:
        """Judge the end by the records. Raises HarnessError for the policy's fault, TimeoutError at the deadline."""
        if done.outcome == "timeout":
            raise TimeoutError
        progress = context.progress()
        if not (progress.open_calls or not self.description.calls_tools or not progress.turns):
            return  # the model's last word was said
        if progress.refusal in LIMITS or (progress.refusal and done.exit_code != 0):
            reason = progress.refusal if progress.refusal in LIMITS else "bad_request"
            raise HarnessError(f"its last request was refused: {progress.refusal}", reason=reason)
        if done.outcome == "oom":
            raise HarnessError(f"{self.description.title} ran out of memory", reason="out_of_memory")
        if done.exit_code != 0:
            said = done.text[-1500:].strip()
            raise HarnessError(f"it ended with {done.exit_code} in the middle of its work: {said}")

    async def close(self) -> None:
        return None

    def _program(self) -> Installed:
        if self.installed is None:
            self.prepare()
        assert self.installed is not None
        return self.installed

    @staticmethod
    def _left(context: AgentContext) -> float:
        return max(1.0, context.deadline - time.monotonic() - _GRACE_S)

    @staticmethod
    def _tell(context: AgentContext, command: Any, done: ExecResult) -> None:
        context.log(f"$ {shlex.join(command)[:500]}: {done.outcome} {done.exit_code} after {done.duration_s:.1f} s")
        for line in done.text.splitlines()[-_LOG_LINES:]:  # how it ended stands last
            context.log(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _refuse_what_is_too_long(title: str, launch: Launch) -> None:
    longest = max(len(word.encode("utf-8", "replace")) for word in launch.command)
    if longest > _LONGEST:
        told = f"has {longest} bytes: Linux allows {_LONGEST}"
        raise HarnessError(f"{title} takes its prompt as an argument, and this one {told}")


_SCRIPT = """#!/usr/bin/env python3
import json, sys, urllib.request
try:
    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
except ValueError as error:
    sys.exit("the arguments are not valid JSON (%s); write them as '{\\"NAME\\": VALUE}'" % error)
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": sys.argv[1], "arguments": arguments}}
headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
headers["Authorization"] = "Bearer $key"
request = urllib.request.Request("$url", json.dumps(call).encode(), headers)
told = json.load(urllib.request.urlopen(request))
result = told.get("result") or {"content": [{"text": told["error"]["message"]}], "isError": True}
print("\\n".join(part.get("text", "") for part in result["content"]))
sys.exit(bool(result.get("isError")))
"""


def told_of(messages: tuple[Message, ...] | list[Message]) -> tuple[str, str]:
    """(System prompt, task) out of an observation: a program takes one text for each."""
    texts: dict[str, list[str]] = {"system": [], "user": []}
    alone = all(message.get("role") in texts for message in messages)
    for message in messages:
        role, content = str(message.get("role")), message.get("content")
        text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content or ())
        if role == "system":
            texts["system"].append(text)
        else:
            texts["user"].append(text if alone else f"{role}: {text}")
    system, task = ("\n\n".join(texts[kind]).replace("\0", "") for kind in ("system", "user"))
    return _sendable(system), _sendable(task)


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which no file or argument can hold."""
    return text.encode("utf-8", "replace").decode()


BUILT_IN = Path(__file__).parent / "programs"
"""One file for each program that comes with Miles."""


def program_class(path: Path) -> type[ProgramHarness]:
    """The harness that a `harness.toml` describes. ConfigError for what is wrong in it."""
    description = describe(path)
    name = path.stem if path.stem != "harness" else path.absolute().parent.name
    base: Any = ProgramHarness
    if description.plugin:
        base = import_target(f"harness {name!r}", description.plugin)
        if not (isinstance(base, type) and issubclass(base, ProgramHarness)):
            raise ConfigError(f"{path}: plugin {description.plugin!r} is no subclass of ProgramHarness")
    facts = {"name": name, "description": description, "folder": path.absolute().parent}
    facts["config_class"] = settings_class(name, description)
    made: type[ProgramHarness] = type(base.__name__, (base,), facts)
    return made
