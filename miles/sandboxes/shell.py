"""The shell tool that white-box loops offer: its description and how a call runs in a sandbox."""

from typing import Any

from miles.sandboxes.base import Sandbox
from miles.types import ToolSpec

__all__ = ["SHELL_TOOL", "run_shell"]

SHELL_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the sandbox and read its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


async def run_shell(sandbox: Sandbox, arguments: dict[str, Any], *, timeout_s: float, max_output: int) -> str:
    """Text for the model: the command's output, and how it ended unless it ended well."""
    command = arguments.get("command")
    if not isinstance(command, str) or not command.strip() or "\0" in command:
        return 'error: shell needs {"command": "..."}'
    command = command.encode("utf-8", "replace").decode()
    result = await sandbox.exec(command, timeout_s=timeout_s, max_output=max_output)
    if result.outcome == "timeout":
        return f"{result.text}\n[killed after {timeout_s:g} s]"
    if result.outcome == "oom":
        return f"{result.text}\n[killed: out of memory]"
    if result.exit_code != 0:
        return f"{result.text}\n[exit code {result.exit_code}]"
    return result.text
