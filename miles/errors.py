"""One error tree; a failure is named by the boundary it crossed.

    MilesError
    ├── ConfigError          a recipe, an override, a name: the user can mend it
    ├── SandboxError         the provider of isolated machines
    │   ├── SandboxUnavailable   cannot work on this host at all
    │   ├── SandboxCreateFailed  (retryable)
    │   └── SandboxLost          died in mid-episode (retryable)
    ├── HarnessError         the program around the model: the policy's episode went wrong
    ├── EnvError             reset, step or score of the environment's code
    ├── EngineError          generation
    │   ├── EngineLost           the server is gone (retryable)
    │   └── ContextOverflow      the prompt leaves no room to answer
    ├── SessionError         a request that the session server refuses
    ├── TrainerError         optimisation, checkpoints, ranks
    └── RunError             the run folder and the run as a whole

Every message says what to do next. `retryable` tells an episode's owner whether a
fresh sandbox and session may succeed; it never makes a failure into a reward.
"""

import traceback
from typing import Any

__all__ = [
    "ConfigError",
    "ContextOverflow",
    "EngineError",
    "EngineLost",
    "EnvError",
    "HarnessError",
    "MilesError",
    "RunError",
    "SandboxCreateFailed",
    "SandboxError",
    "SandboxLost",
    "SandboxUnavailable",
    "SessionError",
    "TrainerError",
]


class MilesError(Exception):
    """Root of all errors that Miles raises on purpose."""

    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[MilesError], state: dict[str, Any]) -> MilesError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


def raised(error: BaseException) -> str:
    """What somebody's code raised, and where: "KeyError: 'x' (file.py:12)"."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"


class ConfigError(MilesError):
    """A recipe, an override or a name that the user can mend."""


class SandboxError(MilesError):
    """The provider of isolated machines failed."""


class SandboxUnavailable(SandboxError):
    """This host cannot isolate anything; the message says what to install or allow."""


class SandboxCreateFailed(SandboxError):
    """One sandbox did not come up."""

    retryable = True


class SandboxLost(SandboxError):
    """A sandbox died while an episode used it."""

    retryable = True


class HarnessError(MilesError):
    """The agent program itself failed; `reason` is the word that outcomes are counted by."""

    def __init__(self, message: str, *, reason: str = "agent_failed") -> None:
        super().__init__(message)
        self.reason = reason


class EnvError(MilesError):
    """The environment's own code (reset, step, score) failed."""


class EngineError(MilesError):
    """An inference engine refused or garbled a generation."""


class EngineLost(EngineError):
    """The engine process is gone; it is being restarted or the run stops."""

    retryable = True


class ContextOverflow(EngineError):
    """The prompt and one new token do not fit the context window."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt is too long: {prompt_tokens} tokens > {limit} maximum; shorten or compact the conversation"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class SessionError(MilesError):
    """A request that the session server refuses.

    `status` is the HTTP status, `code` the machine-readable word of the dialect's envelope.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class TrainerError(MilesError):
    """Optimisation, checkpointing or a trainer rank failed."""


class RunError(MilesError):
    """The run as a whole cannot go on."""
