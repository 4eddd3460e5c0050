"""`miles env …`: add, list, info, test, eval, sync, lock, remove, init, search."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.cli import evaluate
from miles.errors import ConfigError

if TYPE_CHECKING:
    from miles.envs.hub.project import Project

__all__ = ["add", "add_commands", "checked", "info", "init", "listed", "lock", "removed", "search", "sync"]


def add_commands(commands: Any) -> None:
    """The subcommands of `miles env`."""
    env = commands.add_parser(
        "env", help="environments of any ecosystem: add, list, info, test, sync, lock, remove, init"
    )
    what = env.add_subparsers(dest="what", required=True)

    added = what.add_parser("add", help="declare, install and lock an environment: miles env add gymnasium:Taxi-v4")
    added.add_argument(
        "ref", help="gymnasium:ID, reasoning-gym:NAME, textarena:ID, openenv:…, a folder, a URL, module:attr"
    )
    added.add_argument("--name", default="", help="its name here (default: made of the reference)")
    added.add_argument("--python", default="", help="a version (3.12) or a path")
    added.add_argument("--layer", default="", choices=("env", "agent"), help="who plays: our harness, or its own agent")
    added.add_argument("--with", dest="requires", action="append", default=[], metavar="PACKAGE", help="a package more")
    added.add_argument("--secret", action="append", default=[], metavar="NAME", help="a variable of yours it may see")
    added.add_argument("settings", nargs="*", metavar="key=value", help="settings of the environment")

    every = what.add_parser("list", help="environments of this project")
    told = what.add_parser("info", help="one environment: its tasks, packages, settings")
    told.add_argument("name")
    tested = what.add_parser("test", help="check that an environment keeps the contract")
    tested.add_argument("name")
    tested.add_argument("-n", "--tasks", type=int, default=3, help="tasks to play (default: 3)")
    tested.add_argument("--backend", default="local", help="sandboxes to play in (default: local)")
    found = what.add_parser("search", help="environments that are declared, built in, or offered by a package")
    found.add_argument("words", nargs="*")
    synced = what.add_parser("sync", help="install what miles.lock says")
    locked = what.add_parser("lock", help="resolve anew, install, and write miles.lock")
    locked.add_argument("name", nargs="?", default="", help="this one alone")
    locked.add_argument("--check", action="store_true", help="only say what differs; status 1 if anything does")
    gone = what.add_parser("remove", help="take an environment out of the project")
    gone.add_argument("name")
    made = what.add_parser("init", help="a package with an environment of your own")
    made.add_argument("name")
    made.add_argument("--in", dest="folder", type=Path, default=None, help="folder to make (default: ./NAME)")
    evaluate.add_commands(what)
    for command, call in (
        (added, "add"),
        (every, "listed"),
        (told, "info"),
        (tested, "checked"),
        (found, "search"),
        (synced, "sync"),
        (locked, "lock"),
        (gone, "removed"),
        (made, "init"),
    ):
        command.add_argument("--json", action="store_true", help="machine-readable")
        command.set_defaults(call=f"miles.cli.env:{call}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _project() -> "Project":
    """The project that is here, which must have a miles.toml."""
    from miles.envs.hub.project import Project

    project = Project.find()
    if not project.file.is_file():
        raise ConfigError("no miles.toml here or above: go to your project, or begin one with miles env add REF")
    return project


def add(options: argparse.Namespace) -> int:
    """Say what came, and how to go on."""
    from miles.envs.hub.manage import add as add_env
    from miles.envs.hub.project import Project
    from miles.envs.hub.refs import setting

    told: dict[str, Any] = {}
    for key, value in (("python", options.python), ("layer", options.layer)):
        told |= {key: value} if value else {}
    for key, values in (("requires", options.requires), ("secrets", options.secret)):
        told |= {key: values} if values else {}
    if options.settings:
        told["settings"] = dict(setting(word) for word in options.settings)
    project = Project.find()
    name = add_env(project, options.ref, told, _tell, name=options.name)
    locked = project.locks()[name]
    if options.json:
        print(json.dumps({"name": name, **locked.model_dump(mode="json", exclude={"packages"})}))
        return 0
    splits = ", ".join(f"{count} {split}" for split, count in locked.splits.items())
    print(f"added {name} ({locked.kind}): {splits} tasks; written to {project.file} and {project.lock_file.name}")
    print(f"next: miles env test {name};  miles launch RECIPE env.name={name}")
    return 0


def listed(options: argparse.Namespace) -> int:
    """One line for each declared environment."""
    from miles.envs.hub.project import Project
    from miles.pythons import python_of

    project = Project.find()
    locks, rows = project.locks(), []
    for name, entry in project.entries().items():
        locked = locks.get(name)
        there = locked is not None and (not locked.python or python_of(project.folder(name)).exists())
        state = "not locked" if locked is None else "installed" if there else "not installed: miles env sync"
        kind = locked.kind if locked else ""
        python = locked.python if locked else ""
        rows.append({"name": name, "kind": kind, "ref": entry.ref, "python": python, "state": state})
        rows[-1]["tasks"] = ", ".join(f"{n} {split}" for split, n in locked.splits.items()) if locked else ""
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"{project.file} declares no environments: miles env add REF, or miles env search")
    for row in rows:
        python = f"Python {row['python']}" if row["python"] else "in process"
        print(f"{row['name']:20} {row['kind']:14} {python:16} {row['tasks']:24} {row['state']}\n{'':20} {row['ref']}")
    return 0


def info(options: argparse.Namespace) -> int:
    """Everything that is known of one environment, and its first task."""
    from miles.envs.hub.manage import open_env
    from miles.envs.hub.project import Project

    project = Project.find()
    taskset = open_env(options.name, {}, project=project)
    try:
        tasks = {split: taskset.tasks(split) for split in ("train", "test")}
        first = tasks["train"][0]
        spec = taskset.sandbox(first)
        found: dict[str, Any] = {
            "name": options.name,
            "taskset": taskset.name,
            "harness": taskset.harness,
            "tasks": {split: len(found) for split, found in tasks.items()},
            "concurrency": taskset.concurrency,
            "sandbox": None if spec is None else (spec.image.kind if spec.image else "the backend's default image"),
            "first task": {"id": first.id, "prompt": list(first.prompt), "data": sorted(first.data)},
        }
        locked = project.locks().get(options.name)
        if locked is not None:
            packages = [line.partition(" ")[0] for line in locked.packages]
            found |= {"ref": locked.ref, "kind": locked.kind, "python": locked.python, "source": locked.source}
            found |= {"requires": list(locked.requires), "packages": packages}
    finally:
        asyncio.run(taskset.close())
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for key, value in found.items():
        if key == "packages":
            value = f"{len(value)} ({', '.join(value[:6])}{', …' if len(value) > 6 else ''})"
        elif isinstance(value, dict | list):
            value = json.dumps(value)[:600]
        print(f"{key:12} {value if value not in (None, '') else '-'}")
    return 0


def checked(options: argparse.Namespace) -> int:
    """A table of what was checked; the status tells whether all of it holds."""
    from miles.envs.hub.manage import open_env
    from miles.recipes.envcheck import check_env

    taskset = open_env(options.name, {})

    def tell(name: str, status: str, detail: str) -> None:
        if not options.json:
            print(f"{status:9} {name:34} {detail}".rstrip(), flush=True)

    report = asyncio.run(check_env(taskset, tasks=options.tasks, backend=options.backend, tell=tell))
    failed = [found for found in report if found["status"] == "FAILED"]
    if options.json:
        print(json.dumps({"name": options.name, "checks": report, "failed": len(failed)}, indent=1))
    else:
        held = sum(found["status"] == "ok" for found in report)
        print(f"{options.name}: {held} of {len(report)} checks hold, {len(failed)} failed")
    return 1 if failed else 0


def search(options: argparse.Namespace) -> int:
    """Names that hold every word."""
    from miles.envs.hub.project import Project
    from miles.envs.hub.refs import FORMS
    from miles.registry import BUILT_IN, known

    found = {name: ("declared", entry.ref) for name, entry in Project.find().entries().items()}
    for name, target in known("envs").items():
        where = "built in" if name in BUILT_IN["envs"] else "installed package"
        found.setdefault(name, (where, target))
    words = [word.lower() for word in options.words]
    hits = {
        name: told for name, told in sorted(found.items()) if all(word in f"{name} {told[1]}".lower() for word in words)
    }
    if options.json:
        print(json.dumps({name: {"from": told[0], "ref": told[1]} for name, told in hits.items()}, indent=1))
        return 0
    for name, (where, target) in hits.items():
        print(f"{name:20} {where:18} {target}")
    if not hits:
        print(f"nothing here has {' '.join(words)!r}. References that `miles env add` takes: {FORMS}")
    return 0


def sync(options: argparse.Namespace) -> int:
    """How many were built."""
    from miles.envs.hub.manage import sync as sync_envs

    project = _project()
    built = sync_envs(project, _tell)
    print(
        json.dumps({"built": built})
        if options.json
        else f"{built} built, {len(project.entries()) - built} as they were"
    )
    return 0


def lock(options: argparse.Namespace) -> int:
    """Write the lock, or say what differs."""
    from miles.envs.hub.manage import check_lock
    from miles.envs.hub.manage import lock as lock_envs

    project = _project()
    if options.name and options.name not in project.entries():
        project.entry(options.name)
    if not options.check:
        lock_envs(project, _tell, options.name)
        print(json.dumps({"locked": sorted(project.locks())}) if options.json else f"written: {project.lock_file}")
        return 0
    problems = check_lock(project)
    if options.json:
        print(json.dumps({"problems": problems}))
    else:
        print("\n".join(problems) or "miles.toml, miles.lock and what is installed agree")
    return 1 if problems else 0


def removed(options: argparse.Namespace) -> int:
    """Gone from both files and from the disk."""
    from miles.envs.hub.manage import remove
    from miles.envs.hub.project import Project

    remove(Project.find(), options.name)
    print(json.dumps({"removed": options.name}) if options.json else f"removed {options.name}")
    return 0


def init(options: argparse.Namespace) -> int:
    """The steps that lead from the new folder to a training run."""
    from miles.envs.hub.scaffold import scaffold

    folder: Path = options.folder or Path(options.name)
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or --in another folder")
    steps = scaffold(options.name, folder)
    print(
        json.dumps({"folder": str(folder), "next": steps})
        if options.json
        else "\n".join([f"made {folder}. Next:", *steps])
    )
    return 0
