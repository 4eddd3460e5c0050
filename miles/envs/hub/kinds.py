"""The ecosystems: what each reference needs, and which adapter plays it.

A package adds one by an entry point of the group `miles.env_kinds`: `def plan(ref, root, layer) -> Plan`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from miles.config import read_toml
from miles.envs.hub.refs import Ref
from miles.errors import ConfigError

__all__ = ["KINDS", "Plan", "plan_for"]

WORKER = "miles.envs.workers.taskset:WorkerTaskset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an environment needs to be played here."""

    kind: str
    adapter: str = ""
    """The guest's module, or a file."""
    taskset: str = WORKER
    """module:attr that plays it: the worker's, one of ours, or the environment's own Taskset."""
    own_python: bool = True
    """Whether it gets a Python of its own."""
    python: str = ""
    """Versions that it runs on, as ">=3.12"."""
    requires: tuple[str, ...] = ()
    """Packages."""
    projects: tuple[Path, ...] = ()
    """Folders whose requirements are installed, and they themselves unless they are played from where they are."""
    in_place: bool = False
    """Whether the folders are played from where they are."""
    paths: tuple[Path, ...] = ()
    """Folders on its Python's path."""
    source: Path | None = None
    """What is digested: when it changes, the environment is another one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the adapter is made with."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its processes."""


def plan_for(ref: Ref, root: Path, layer: str) -> Plan:
    """How to play a reference. ConfigError when its target is not there or its layer is unknown."""
    kinds = {point.name: point for point in metadata.entry_points(group="miles.env_kinds")}
    if ref.kind in kinds:
        plan: Plan = kinds[ref.kind].load()(ref, root, layer)
        return plan
    return KINDS[ref.kind](ref, root, layer)


def _local(ref: Ref, root: Path) -> Path:
    path = ref.path(root)
    if path is None:
        raise ConfigError(f"{ref.target} does not exist in {root}")
    return path


def _at(package: str, ref: Ref) -> str:
    return f"{package}=={ref.version}" if ref.version else package


def _only(ref: Ref, layer: str, usual: str) -> None:
    if layer not in ("", usual):
        raise ConfigError(f"a {ref.kind} environment is played at the {usual} layer, not at {layer!r}")


def _gymnasium(ref: Ref, root: Path, layer: str) -> Plan:
    _only(ref, layer, "env")
    namespaces = {"ALE": "ale-py>=0.10", "minigrid": "minigrid", "MiniGrid": "minigrid"}
    name = ref.target.partition("/")[0] if "/" in ref.target else ref.target.partition("-")[0]
    more = [namespaces[name]] if name in namespaces else []
    imports = [package.partition(">")[0].replace("-", "_") for package in more]
    settings = {"id": ref.target, **({"imports": imports} if imports else {}), **ref.settings}
    requires = ("gymnasium[toy-text]>=1.1,<2", *more)
    return Plan(kind="gymnasium", adapter="gym", requires=requires, paths=(root,), settings=settings)


def _reasoning_gym(ref: Ref, root: Path, layer: str) -> Plan:
    _only(ref, layer, "env")
    settings = {"dataset": ref.target, **ref.settings}
    return Plan(kind="reasoning-gym", adapter="reasoning", requires=(_at("reasoning-gym", ref),), settings=settings)


def _textarena(ref: Ref, root: Path, layer: str) -> Plan:
    _only(ref, layer, "env")
    settings = {"id": ref.target, **ref.settings}
    return Plan(kind="textarena", adapter="arena", requires=(_at("textarena", ref),), settings=settings)


def _openenv(ref: Ref, root: Path, layer: str) -> Plan:
    _only(ref, layer, "env")
    taskset = "miles.envs.openenv:OpenEnvTaskset"
    if "://" in ref.target:
        return Plan(kind="openenv", taskset=taskset, own_python=False, settings={"url": ref.target, **ref.settings})
    path = _local(ref, root)
    return Plan(
        kind="openenv",
        taskset=taskset,
        requires=("uvicorn[standard]>=0.30",),
        projects=(path,),
        in_place=True,
        source=path,
        settings={"folder": str(path), **ref.settings},
    )


def _verifiers(ref: Ref, root: Path, layer: str) -> Plan:
    _only(ref, layer, "agent")
    path = ref.path(root)
    name = path.name if path is not None else ref.target.rpartition("/")[2]
    modern = _is_v1(path) if path is not None else bool(ref.settings.get("v1"))
    settings = {"id": name.replace("-", "_"), **{key: value for key, value in ref.settings.items() if key != "v1"}}
    requires = ["verifiers>=0.4,<0.5" if modern else "verifiers>=0.1.14,<0.4"]
    if path is None:
        requires.append(_at(name, ref))
    return Plan(
        kind="verifiers",
        adapter="verifiers_v1" if modern else "verifiers_v0",
        python=">=3.11,<3.15",
        requires=tuple(requires),
        projects=(path,) if path is not None else (),
        source=path,
        settings=settings,
    )


def _is_v1(path: Path) -> bool:
    """v0 packages have load_environment; v1 packages name a Taskset."""
    texts = [file.read_text(errors="replace") for file in path.rglob("*.py") if ".venv" not in file.parts]
    return not any("def load_environment" in text for text in texts) and any("verifiers.v1" in text for text in texts)


def _harbor(ref: Ref, root: Path, layer: str) -> Plan:
    path = _local(ref, root)
    settings = {"folder": str(path), **ref.settings}
    if layer in ("", "env"):
        return Plan(
            kind="harbor", taskset="miles.envs.harbor:HarborTaskset", own_python=False, source=path, settings=settings
        )
    if layer != "agent":
        raise ConfigError(f"harbor tasks are played at the env or the agent layer, not at {layer!r}")
    return Plan(
        kind="harbor",
        taskset="miles.envs.harbor:HarborTrialTaskset",
        adapter="harbor_trial",
        python=">=3.12",
        requires=("harbor>=0.25,<0.26",),
        source=path,
        settings=settings,
    )


def _nemo_gym(ref: Ref, root: Path, layer: str) -> Plan:
    if layer not in ("", "env", "agent"):
        raise ConfigError(f"a nemo-gym environment is played at the env or the agent layer, not at {layer!r}")
    settings = {"name": ref.target, "layer": layer or "env", **ref.settings}
    return Plan(
        kind="nemo-gym",
        adapter="nemo",
        python=">=3.12,<3.13",
        requires=(f"nemo-gym=={ref.version}" if ref.version else "nemo-gym>=0.4,<0.5",),
        settings=settings,
    )


def _hud(ref: Ref, root: Path, layer: str) -> Plan:
    path = ref.path(root)
    settings = {"target": str(path) if path is not None else ref.target, **ref.settings}
    return Plan(
        kind="hud",
        adapter="hud_tasks",
        python=">=3.11,<3.13",
        requires=("hud>=0.6.21,<0.7", "typer<0.26"),
        paths=(path if path.is_dir() else path.parent,) if path is not None else (),
        source=path,
        settings={"layer": layer or "env", **settings},
    )


def _inspect(ref: Ref, root: Path, layer: str) -> Plan:
    file, _, task = ref.target.partition("@")
    path = Ref(kind="", target=file).path(root)
    settings = {"file": str(path) if path is not None else file, "task": task, **ref.settings}
    _only(ref, layer, "agent")
    return Plan(
        kind="inspect",
        adapter="inspect_tasks",
        requires=("inspect-ai>=0.3.285,<0.4", "openai>=2,<4"),
        paths=(path.parent,) if path is not None else (),
        source=path,
        settings=settings,
    )


def _miles(ref: Ref, root: Path, layer: str) -> Plan:
    """A Taskset of Miles: in our own process, since it is made of our classes."""
    path = ref.path(root)
    if path is None:
        return Plan(kind="miles", taskset=ref.target, own_python=False, paths=(root,), settings=dict(ref.settings))
    target = _entry_point(path)
    paths = (path / "src",) if (path / "src").is_dir() else (path,)
    settings = dict(ref.settings)
    return Plan(kind="miles", taskset=target, own_python=False, paths=paths, source=path, settings=settings)


def _entry_point(folder: Path) -> str:
    """The Taskset that a package names in its group miles.envs."""
    points = read_toml(folder / "pyproject.toml").get("project", {}).get("entry-points", {}).get("miles.envs", {})
    if not points:
        raise ConfigError(
            f'{folder}/pyproject.toml has no [project.entry-points."miles.envs"] with NAME = "module:Taskset"'
        )
    return str(next(iter(points.values())))


KINDS: dict[str, Callable[[Ref, Path, str], Plan]] = {
    "gymnasium": _gymnasium,
    "reasoning-gym": _reasoning_gym,
    "textarena": _textarena,
    "openenv": _openenv,
    "verifiers": _verifiers,
    "harbor": _harbor,
    "nemo-gym": _nemo_gym,
    "hud": _hud,
    "inspect": _inspect,
    "miles": _miles,
}
