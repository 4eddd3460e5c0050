"""Adds, locks, syncs, checks and opens declared environments."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from miles.config import build, read_toml
from miles.envs.base import Taskset
from miles.envs.hub.kinds import Plan, plan_for
from miles.envs.hub.project import EnvEntry, LockEntry, Project, digest_of, digest_of_folder
from miles.envs.hub.refs import Ref, default_name, kind_of_folder, parse_ref
from miles.envs.rewards import JudgeConfig
from miles.envs.selection import SelectionConfig, selected
from miles.envs.workers.taskset import WorkerConfig
from miles.errors import ConfigError, EnvError, MilesError, raised
from miles.pythons import build_venv, choose_python, installed, lock_packages, python_of, version_of
from miles.registry import import_target, make_plugin
from miles.types import Task

__all__ = [
    "add",
    "check_lock",
    "declared_rewards",
    "lock",
    "open_declared",
    "open_env",
    "plan_of",
    "remove",
    "sync",
    "tasks_of",
]

Tell = Callable[[str], None]
_FIRST = 200  # tasks whose digest is kept


def plan_of(entry: EnvEntry, project: Project, name: str) -> tuple[Ref, Plan]:
    """What a declared environment needs. A repository that is not here yet is cloned, at its locked commit if any."""
    try:
        ref = parse_ref(entry.ref, project.root)
    except ConfigError as error:
        raise ConfigError(f"environment {name!r}: {error.message}") from error
    if ref.git:
        ref = _cloned(ref, project, name)
    plan = plan_for(ref, project.root, entry.layer)
    return ref, replace(plan, requires=(*plan.requires, *entry.requires), settings={**plan.settings, **entry.settings})


def _cloned(ref: Ref, project: Project, name: str) -> Ref:
    """A repository as a folder; it is there whole, or not at all."""
    folder = project.folder(name) / "source"
    if not folder.is_dir():
        url, _, revision = ref.git.rpartition("@") if "@" in ref.git.rpartition("/")[2] else (ref.git, "", "")
        locked = project.locks().get(name)
        commit = locked.source if locked is not None and not locked.source.startswith("sha256:") else ""
        partial = folder.with_name("source.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _git("clone", "-q", url, str(partial))
        if commit or revision:
            _git("-C", str(partial), "checkout", "-q", commit or revision)
        partial.rename(folder)
    return replace(ref, kind=ref.kind or kind_of_folder(folder), target=str(folder))


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=600, check=False)
    except OSError as error:
        raise EnvError("git is not installed, and this reference is a repository") from error
    if done.returncode:
        raise EnvError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def add(project: Project, text: str, told: Mapping[str, Any], tell: Tell, *, name: str = "") -> str:
    """Declare, install, lock; nothing stays declared when that fails. Returns the name."""
    name = name or default_name(parse_ref(text, project.root))
    if name in project.entries():
        raise ConfigError(
            f"{project.file} has an environment {name!r} already: choose another --name, or remove it first"
        )
    entry = build(EnvEntry, {"ref": text, **told})
    try:
        locked = _install(project, name, entry, None, tell)
    except BaseException:
        shutil.rmtree(project.folder(name), ignore_errors=True)
        raise
    project.declare(name, {"ref": text, **told})
    project.write_lock({**project.locks(), name: locked})
    return name


def remove(project: Project, name: str) -> None:
    """Take an environment out of the project and off the disk."""
    project.entry(name)
    project.forget(name)
    shutil.rmtree(project.folder(name), ignore_errors=True)


def lock(project: Project, tell: Tell, only: str = "") -> None:
    """Resolve anew what is declared, and install it."""
    locks = {name: entry for name, entry in project.locks().items() if name in project.entries()}
    for name, entry in project.entries().items():
        if only in ("", name):
            locks.pop(name, None)
            project.write_lock(locks)
            shutil.rmtree(project.folder(name) / "source", ignore_errors=True)  # another commit may be meant now
            locks[name] = _install(project, name, entry, None, tell)
            project.write_lock(locks)


def sync(project: Project, tell: Tell) -> int:
    """Make what is installed be what miles.lock says; returns how many were built. ConfigError when it does not fit."""
    locks, built = project.locks(), 0
    for name, entry in project.entries().items():
        wrong = _declared_wrongly(project, name, entry, locks.get(name))
        if wrong:
            raise ConfigError(f"miles.lock does not fit miles.toml: {wrong}. Run `miles env lock`")
        if _installed_wrongly(project, name, entry, locks[name]):
            found = _install(project, name, entry, locks[name], tell)
            if found.tasks != locks[name].tasks:
                raise EnvError(f"{name} was built as locked, and its tasks are others: it is not the same everywhere")
            built += 1
        else:
            tell(f"{name}: is as locked")
    return built


def check_lock(project: Project) -> list[str]:
    """What differs between miles.toml, miles.lock and what is installed; empty when nothing does."""
    locks, problems = project.locks(), []
    for name, entry in project.entries().items():
        wrong = _declared_wrongly(project, name, entry, locks.get(name))
        problems += [wrong or _installed_wrongly(project, name, entry, locks[name])]
    problems += [f"{name} is locked and not declared" for name in locks if name not in project.entries()]
    return [problem for problem in problems if problem]


def _declared_wrongly(project: Project, name: str, entry: EnvEntry, locked: LockEntry | None) -> str:
    if locked is None:
        return f"{name} is not locked"
    if locked.ref != entry.ref:
        return f"{name} is locked as {locked.ref} and declared as {entry.ref}"
    _, plan = plan_of(entry, project, name)
    if locked.requires != plan.requires:
        return f"{name} needs other packages than are locked"
    if locked.declared != _declared(entry):
        return f"{name} is declared with other settings, layer or Python than it was locked with"
    if locked.source != _source(project, name, plan):
        return f"{name}: its source has changed since it was locked"
    return ""


def _installed_wrongly(project: Project, name: str, entry: EnvEntry, locked: LockEntry) -> str:
    _, plan = plan_of(entry, project, name)
    if not plan.own_python:
        return ""
    folder = project.folder(name)
    if not python_of(folder).exists():
        return f"{name} is not installed: miles env sync"
    here = installed(folder)
    for line in locked.packages:
        package, exact, version = line.partition(" ")[0].partition(";")[0].partition("==")
        package = canonicalize_name(package.partition("[")[0])
        if ";" not in line and (package not in here or (exact and here[package] != version.strip())):
            return f"{name} has {package} {here.get(package)} instead of {version or 'any'}: miles env sync"
    return ""


def _source(project: Project, name: str, plan: Plan) -> str:
    """What the source is at this moment: a repository's commit, or a folder's digest."""
    clone = project.folder(name) / "source"
    if (clone / ".git").exists():
        changed = _git("-C", str(clone), "status", "--porcelain", "--untracked-files=no")
        return _git("-C", str(clone), "rev-parse", "HEAD") + (" and changes" if changed else "")
    return digest_of_folder(plan.source) if plan.source is not None else ""


def _declared(entry: EnvEntry) -> str:
    told = entry.model_dump(mode="json", include={"settings", "layer", "python", "environment"})
    return digest_of(told)


def _install(project: Project, name: str, entry: EnvEntry, locked: LockEntry | None, tell: Tell) -> LockEntry:
    """Build an environment's Python and look at its tasks."""
    ref, plan = plan_of(entry, project, name)
    folder = project.folder(name)
    python, packages = "", locked.packages if locked is not None else ()
    if not plan.own_python and (entry.python or entry.requires):
        raise ConfigError(
            f"{name} runs in Miles' own process, where python and requires mean nothing: pip install what it needs"
        )
    if plan.own_python:
        interpreter = choose_python(
            entry.python or (locked.python if locked else ""), _needs(plan), f"{name} ({ref.kind})"
        )
        python = version_of(interpreter)
        if locked is None:
            tell(f"{name}: resolving packages for Python {python}")
            packages = lock_packages(interpreter, plan.requires, plan.projects, folder)
        tell(f"{name}: installing {len(packages)} packages")
        build_venv(interpreter, packages, () if plan.in_place else plan.projects, folder)
    fresh = LockEntry(
        ref=entry.ref,
        kind=ref.kind,
        python=python,
        packages=packages,
        requires=plan.requires,
        source=_source(project, name, plan),
        declared=_declared(entry),
    )
    tell(f"{name}: reading its tasks")
    splits, digest = _look(project, name, entry)
    return fresh.model_copy(update={"splits": splits, "tasks": digest})


def _needs(plan: Plan) -> str:
    """Which Pythons fit: the ecosystem's, and what the projects say."""
    needs = [plan.python] if plan.python else []
    for project in plan.projects:
        if (project / "pyproject.toml").is_file():
            own = read_toml(project / "pyproject.toml").get("project", {}).get("requires-python", "")
            needs += [own] if own else []
    return ",".join(needs)


def _look(project: Project, name: str, entry: EnvEntry) -> tuple[dict[str, int], str]:
    """Tasks by split, and a digest of the first ones."""
    taskset = open_declared(project, name, entry)
    try:
        counts, first = {}, []
        for split in taskset.splits():
            tasks = tasks_of(taskset, split)
            counts[split] = len(tasks)
            first += [[task.id, list(task.prompt), task.data] for task in tasks[:_FIRST]]
        if not any(counts.values()):
            raise EnvError(f"{name} has no tasks in any split ({', '.join(counts)})")
        return counts, digest_of(_portable(first, project.root))
    finally:
        asyncio.run(taskset.close())


def tasks_of(taskset: Taskset, split: str) -> Sequence[Task]:
    """A split's tasks; EnvError where the environment's code raises, or returns what are no tasks."""
    try:
        tasks = taskset.tasks(split)
        wrong = next((task for task in tasks if not isinstance(task, Task)), None)
    except MilesError:
        raise
    except Exception as error:  # the boundary to an environment's code
        raise EnvError(f"environment {taskset.name!r}: tasks({split!r}) raised {raised(error)}") from error
    if wrong is not None:
        raise EnvError(f"environment {taskset.name!r}: tasks({split!r}) has a {type(wrong).__name__}, which is no Task")
    return tasks


def _portable(value: Any, root: Path) -> Any:
    """Without this machine's folder, so that the digest is the same on the next one."""
    return json.loads(json.dumps(value, default=str).replace(str(root), ""))


def open_declared(project: Project, name: str, entry: EnvEntry, settings: Mapping[str, Any] | None = None) -> Taskset:
    """The taskset of a declared environment, as installed. ConfigError when it is not."""
    _, plan = plan_of(entry, project, name)
    plan = replace(plan, settings={**plan.settings, **(settings or {})})
    folder = project.folder(name)
    python = python_of(folder) if plan.own_python else Path(sys.executable)
    if not python.exists():
        raise ConfigError(f"environment {name!r} is declared and not installed here: miles env sync")
    for path in plan.paths if not plan.own_python else ():
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    worker = WorkerConfig(
        name=name,
        python=python,
        kind=plan.adapter,
        settings=plan.settings,
        paths=plan.paths,
        log=folder / "worker.log",
        environment={**plan.environment, **entry.environment},
        secrets=entry.secrets,
        concurrency=entry.concurrency,
        start_s=entry.start_s,
    )
    return _made(plan, worker)


def _made(plan: Plan, worker: WorkerConfig) -> Taskset:
    if plan.kind == "miles":
        module = sys.modules.get(plan.taskset.partition(":")[0])
        came = Path(getattr(module, "__file__", None) or "/")
        if module is not None and plan.source is not None and plan.source not in came.parents:
            raise ConfigError(
                f"{plan.source} has a module {module.__name__}, and {came} is loaded by that name: rename one"
            )
        return _taskset(plan.taskset, plan.settings)
    taskset: Taskset = import_target(plan.kind, plan.taskset)(worker)
    return taskset


def open_env(
    name: str,
    settings: Mapping[str, Any],
    tasks: SelectionConfig | None = None,
    rewards: Mapping[str, JudgeConfig] | None = None,
    project: Project | None = None,
) -> Taskset:
    """A taskset by the name of a declared environment, a registry name, or module:attr; settings go over the declared
    ones, `tasks` and `rewards` replace them (empty rewards: the environment's own)."""
    project = project or Project.find()
    entries = project.entries()
    if entries and str(project.root) not in sys.path:
        sys.path.insert(0, str(project.root))  # judges lie beside miles.toml
    if name in entries:
        entry = entries[name]
        taskset = open_declared(project, name, entry, settings)
        tasks = tasks if tasks is not None and tasks != SelectionConfig() else entry.tasks
        rewards = entry.rewards if rewards is None else rewards
    else:
        taskset = _built_in(name, settings, entries)
    return selected(taskset, tasks or SelectionConfig(), rewards or {})


def declared_rewards(name: str) -> Mapping[str, JudgeConfig]:
    """What miles.toml says of an environment's rewards."""
    entries = Project.find().entries()
    return entries[name].rewards if name in entries else {}


def _taskset(name: str, settings: Mapping[str, Any]) -> Taskset:
    made = make_plugin("envs", name, dict(settings))
    if not hasattr(made, "tasks") or not hasattr(made, "env"):
        raise ConfigError(f"{name} is a {type(made).__name__}, and no Taskset (miles/envs/base.py)")
    return made  # type: ignore[no-any-return]


def _built_in(name: str, settings: Mapping[str, Any], entries: Mapping[str, EnvEntry]) -> Taskset:
    try:
        return _taskset(name, settings)
    except ConfigError as error:
        if "unknown env" in error.message:
            there = (
                f"miles.toml declares: {', '.join(entries)}."
                if entries
                else "No miles.toml here or above declares any."
            )
            raise ConfigError(f"{error.message} {there}") from error
        raise
