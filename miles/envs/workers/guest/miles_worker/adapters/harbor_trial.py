"""Harbor's own trials, with its agents and its verifier, in machines that Miles owns. Settings: HarborConfig's."""

import asyncio
import base64
import contextlib
import os
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

os.environ.update(HARBOR_TELEMETRY="0", LITELLM_LOCAL_MODEL_COST_MAP="True")

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from miles_worker.protocol import Failure

_HERE = "miles_worker.adapters.harbor_trial"
_EPISODES = {}  # what trials name: keys of endpoints must not reach Harbor's files
_LIMIT_S = 86_400.0
_TURNS = 64
_SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the sandbox and read its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def make(settings):
    return Tasks(**settings)


class Tasks:
    """Folders with a task.toml."""

    def __init__(self, folder, agent="", model="openai/policy", **ours):
        path = Path(folder)
        self.agent, self.model = agent, model
        self.folders = [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.glob("*/task.toml"))

    def about(self):
        return {"name": "harbor", "layer": "agent", "splits": {"train": len(self.folders)}}

    def tasks(self, split, start, stop):
        return [{"id": folder.name, "data": {"folder": str(folder)}} for folder in self.folders[start:stop]]

    async def play(self, task, seed, host):
        return Play(self, Path(task["folder"]), host)


class Play:
    """One trial."""

    def __init__(self, tasks, folder, host):
        self.tasks, self.folder, self.host = tasks, folder, host
        self.boxes, self.failure, self.rewards = 0, None, None

    async def reset(self):
        return {"messages": []}

    async def run(self, endpoint, timeout_s):
        name = f"{id(self):x}"
        _EPISODES[name] = (self, endpoint)
        try:
            with tempfile.TemporaryDirectory(prefix="miles-trial-") as scratch:
                config = TrialConfig(
                    task=TaskConfig(path=self.folder),
                    trials_dir=Path(scratch),
                    agent=self._agent(name, endpoint),
                    environment=EnvironmentConfig(import_path=f"{_HERE}:Machine", kwargs={"episode": name}),
                )
                done = await asyncio.wait_for((await Trial.create(config)).run(), timeout_s)
        except TimeoutError:
            raise Failure(f"the trial took longer than {timeout_s:g} s", "policy", "agent_timeout") from None
        finally:
            _EPISODES.pop(name, None)
        if self.failure is not None:  # Harbor may have scored the trial all the same
            raise self.failure
        rewards = done.verifier_result.rewards if done.verifier_result else None
        if rewards is None:
            error = done.exception_info
            raise Failure(f"{error.exception_type}: {error.exception_message}" if error else "the trial gave no reward")
        self.rewards = {key: float(value) for key, value in rewards.items()}

    def _agent(self, name, endpoint):
        if not self.tasks.agent:
            return AgentConfig(import_path=f"{_HERE}:ShellLoop", kwargs={"episode": name})
        if ":" in self.tasks.agent:
            return AgentConfig(import_path=self.tasks.agent, kwargs={"endpoint": endpoint})
        if self.tasks.agent in ("oracle", "nop"):
            return AgentConfig(name=self.tasks.agent)
        return AgentConfig(
            name=self.tasks.agent,
            model_name=self.tasks.model,
            base_url=endpoint["base_url"],
            env={"OPENAI_API_KEY": endpoint["api_key"]},
        )

    async def score(self, transcript):
        if self.rewards is None:
            raise Failure("the trial must run before it can score")
        reward = self.rewards.get("reward", sum(self.rewards.values()) / max(1, len(self.rewards)))
        return {"reward": reward, "parts": {key: value for key, value in self.rewards.items() if key != "reward"}}


class Machine(BaseEnvironment):
    """Harbor's environment over the episode's sandbox; each one after the first gets a sandbox of its own."""

    def __init__(self, *args, episode="", **kwargs):
        self._play, _ = _EPISODES[episode]
        self._box = self._play.boxes
        self._play.boxes += 1
        super().__init__(*args, **kwargs)

    @staticmethod
    def type():
        return "miles"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self):
        return None

    async def _ask(self, method, **params):
        return await self._play.host.ask(method, box=self._box, **params)

    async def start(self, force_build):
        if self._box:
            await self._ask("open")
        work = self.task_env_config.workdir or "/app"
        await self._sh(f"mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests {work}; chmod -R 777 /logs")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete):
        return None  # the episode ends its machines

    async def _sh(self, command, stdin=b""):
        done = await self._ask(
            "exec",
            command=command,
            timeout_s=300.0,
            stdin=base64.b64encode(stdin).decode(),
            max_output=1 << 26,
            raw=True,
        )
        if done["exit_code"] != 0:
            raise RuntimeError(f"{command}: {base64.b64decode(done['stderr']).decode(errors='replace')[-500:]}")
        return base64.b64decode(done["stdout"])

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        done = await self._ask(
            "exec",
            command=command,
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env) or {},
            timeout_s=float(timeout_sec or _LIMIT_S),
        )
        if done["outcome"] == "timeout":
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        code = done["exit_code"]
        return ExecResult(stdout=done["stdout"], stderr=done["stderr"], return_code=code if code is not None else 137)

    async def upload_file(self, source_path, target_path):
        data = base64.b64encode(Path(source_path).read_bytes()).decode()
        await self._ask("write", path=str(target_path), data=data)
        mode = oct(Path(source_path).stat().st_mode & 0o777)[2:]
        await self._sh(f"chmod {mode} '{target_path}'")

    async def upload_dir(self, source_dir, target_dir):
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source_dir, ".")
        await self._sh(f"mkdir -p '{target_dir}' && tar -x --no-same-owner -C '{target_dir}'", packed.getvalue())

    async def download_file(self, source_path, target_path):
        told = await self._ask("read", path=str(source_path))
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(base64.b64decode(told["data"]))

    async def download_dir(self, source_dir, target_dir):
        data = await self._sh(f"tar -c -C '{source_dir}' .")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=BytesIO(data)) as archive:
            archive.extractall(target_dir, filter="data")


class ShellLoop(BaseAgent):
    """Ask, run the commands, tell, until the model asks for none."""

    client = None

    def __init__(self, *args, episode="", **kwargs):
        super().__init__(*args, **kwargs)
        self._play, self._endpoint = _EPISODES[episode]

    @staticmethod
    def name():
        return "miles-shell-loop"

    def version(self):
        return "1"

    async def setup(self, environment):
        return None

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        for _ in range(_TURNS):
            answer = await self._ask(messages)
            messages.append({key: value for key, value in answer.items() if value is not None})
            calls = answer.get("tool_calls") or ()
            for call in calls:
                text = await self._command(environment, call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if not calls:
                return

    async def _ask(self, messages):
        if ShellLoop.client is None:
            ShellLoop.client = httpx.AsyncClient(
                timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
            )
        url, key = self._endpoint["base_url"], self._endpoint["api_key"]
        body = {"model": self._endpoint["model"], "messages": messages, "tools": [_SHELL]}
        try:
            reply = await ShellLoop.client.post(
                f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
        except httpx.HTTPError as error:
            self._play.failure = Failure(f"the model endpoint failed: {error!r}", "engine")
            raise
        if reply.status_code >= 500:
            self._play.failure = Failure(f"the model endpoint failed: {reply.text[:500]}", "engine")
        elif reply.status_code >= 400:
            code = "context_length_exceeded" if "context_length" in reply.text else "bad_request"
            self._play.failure = Failure(reply.text[:500], "policy", code)
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]

    async def _command(self, environment, arguments):
        import json

        with contextlib.suppress(ValueError, TypeError, KeyError, RuntimeError):
            done = await environment.exec(str(json.loads(arguments)["command"]), timeout_sec=120)
            tail = f"\n[exit code {done.return_code}]" if done.return_code else ""
            return f"{done.stdout or ''}{done.stderr or ''}"[-8192:] + tail
        return 'error: shell needs {"command": "..."}, and ends a command after 120 s'
