"""Names of plug-ins: `name -> "package.module:attr"`, imported on use.

A plug-in is found, in this order, by `module:attr`, by an entry point of an installed
package (group `miles.<kind>`), or by a name built in below.
"""

import difflib
import importlib
from importlib import metadata
from typing import Any

from miles.errors import ConfigError

__all__ = ["KINDS", "import_target", "known", "make_plugin", "resolve"]

BUILT_IN: dict[str, dict[str, str]] = {
    "envs": {
        "vault": "miles.envs.vault:VaultTaskset",
        "terminal": "miles.envs.terminal.taskset:TerminalTaskset",
        "gymnasium": "miles.envs.gymnasium:GymnasiumTaskset",
        "guess-number": "miles.envs.toy:GuessNumberTaskset",
    },
    "harnesses": {
        "react": "miles.harnesses.react:ReactHarness",
        "own": "miles.harnesses.own:OwnHarness",
        "aider": "miles.harnesses.programs:aider",
        "claude-code": "miles.harnesses.programs:claude_code",
        "cline": "miles.harnesses.programs:cline",
        "codex": "miles.harnesses.programs:codex",
        "kimi-code": "miles.harnesses.programs:kimi_code",
        "mini-swe-agent": "miles.harnesses.programs:mini_swe_agent",
        "opencode": "miles.harnesses.programs:opencode",
        "openhands": "miles.harnesses.programs:openhands",
        "pi": "miles.harnesses.programs:pi",
        "qwen-code": "miles.harnesses.programs:qwen_code",
        "terminus-2": "miles.harnesses.programs:terminus_2",
    },
    "sandboxes": {
        "local": "miles.sandboxes.local.backend:LocalBackend",
        "docker": "miles.sandboxes.providers.docker:DockerBackend",
        "e2b": "miles.sandboxes.providers.e2b:E2BBackend",
        "agentenv": "miles.sandboxes.providers.e2b:AgentEnvBackend",
        "modal": "miles.sandboxes.providers.modal:ModalBackend",
        "daytona": "miles.sandboxes.providers.daytona:DaytonaBackend",
    },
    "engines": {
        "embedded": "miles.rollout.engines.embedded:EmbeddedEngine",
        "inprocess": "miles.rollout.engines.inprocess:InProcessEngine",
        "sglang": "miles.rollout.engines.sglang.engine:SGLangEngine",
        "scripted": "miles.rollout.engines.scripted:ScriptedEngine",
    },
    "canonicalisers": {
        "strip_billing": "miles.rollout.session.canonical:strip_billing",
        "freeze_clock": "miles.rollout.session.canonical:freeze_clock",
        "sort_tool_results": "miles.rollout.session.canonical:sort_tool_results",
    },
    "rollouts": {"async": "miles.rollout.scheduler:AsyncRollout"},
    "trainers": {"fsdp": "miles.trainer.model.fsdp:FsdpBackend"},
    "advantages": {
        "grpo": "miles.trainer.algorithms.advantages:grpo",
        "dr_grpo": "miles.trainer.algorithms.advantages:dr_grpo",
        "rloo": "miles.trainer.algorithms.advantages:rloo",
        "reinforce_pp": "miles.trainer.algorithms.advantages:reinforce_pp",
        "reinforce_pp_baseline": "miles.trainer.algorithms.advantages:reinforce_pp_baseline",
        "maxrl": "miles.trainer.algorithms.advantages:maxrl",
        "reward": "miles.trainer.algorithms.advantages:reward",
        "gae": "miles.trainer.algorithms.advantages:reward",
        "nothing": "miles.trainer.algorithms.advantages:nothing",
    },
    "losses": {
        "ppo": "miles.trainer.algorithms.losses:ppo",
        "gspo": "miles.trainer.algorithms.losses:gspo",
        "cispo": "miles.trainer.algorithms.losses:cispo",
        "reinforce": "miles.trainer.algorithms.losses:reinforce",
    },
}
KINDS = tuple(BUILT_IN)
_ONE = {"harnesses": "harness", "sandboxes": "sandbox", "losses": "loss"}


def known(kind: str) -> dict[str, str]:
    """All names of one kind with what they point at; installed packages override nothing built in."""
    if kind not in BUILT_IN:
        raise ConfigError(f"unknown kind of plug-in {kind!r}; kinds: {', '.join(KINDS)}")
    found = {point.name: point.value for point in metadata.entry_points(group=f"miles.{kind}")}
    return {**found, **BUILT_IN[kind]}


def resolve(kind: str, name: str) -> Any:
    """Import what `name` stands for.

    Raises ConfigError for an unknown name (listing the known ones) and for a target that
    cannot be imported (saying which package is missing).
    """
    if ":" in name:
        return _load(kind, name, name)
    names = known(kind)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        raise ConfigError(
            f"unknown {_ONE.get(kind, kind.removesuffix('s'))} {name!r}{hint}. Known: {', '.join(sorted(names))}. "
            f"Use module:attr for your own, or install a package with an entry point in group 'miles.{kind}'."
        )
    return _load(kind, name, names[name])


def _load(kind: str, name: str, target: str) -> Any:
    return import_target(f"{_ONE.get(kind, kind.removesuffix('s'))} {name!r}", target)


def make_plugin(kind: str, name: str, settings: dict[str, Any]) -> Any:
    """Build a plug-in class with its own checked config; functions and instances are passed through."""
    from miles.config import build  # pydantic: the command line starts without it

    plugin = resolve(kind, name)
    if not isinstance(plugin, type):
        return plugin
    config_class = getattr(plugin, "config_class", None)
    if config_class is not None:
        try:
            return plugin(build(config_class, settings))
        except ConfigError as error:
            raise ConfigError(f"{kind} {name!r}: {error.message}") from error
    try:
        return plugin(**settings)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} does not take these settings: {error}") from error


def import_target(what: str, target: str) -> Any:
    """What `module:attr` names; ConfigError, beginning with `what`, when it cannot be imported."""
    module_name, _, attr = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: there is no module {error.name!r}. If it is your own "
            "file, run miles in the folder that holds it; else pip install the package that has it."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{what}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attr)
    except AttributeError as error:
        raise ConfigError(f"{what}: module {module_name!r} has no attribute {attr!r}.") from error
