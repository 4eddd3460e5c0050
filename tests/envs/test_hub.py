"""References, miles.toml, miles.lock, Pythons, and what adding an environment leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles import pythons
from miles.config import build
from miles.envs.hub import manage
from miles.envs.hub.manage import add, check_lock, lock, open_env, remove, sync
from miles.envs.hub.project import EnvEntry, LockEntry, Project, digest_of_folder
from miles.envs.hub.refs import default_name, parse_ref
from miles.envs.hub.scaffold import scaffold
from miles.envs.selection import SelectionConfig
from miles.errors import ConfigError, EnvError

SAMPLES = Path(__file__).parent / "samples"


def quiet(text):
    pass


@pytest.mark.parametrize(
    "text, kind, target, version, settings, name",
    [
        ("gymnasium:Taxi-v4", "gymnasium", "Taxi-v4", "", {}, "taxi"),
        ("gymnasium:ALE/Pong-v5?frameskip=4", "gymnasium", "ALE/Pong-v5", "", {"frameskip": 4}, "pong"),
        ("rg:chain_sum?size=50&ask=", "reasoning-gym", "chain_sum", "", {"size": 50, "ask": ""}, "chain-sum"),
        ("textarena:TicTacToe-v0@0.7.4", "textarena", "TicTacToe-v0", "0.7.4", {}, "tictactoe"),
        ("http://127.0.0.1:8000", "openenv", "http://127.0.0.1:8000", "", {}, "127-0-0-1-8000"),
        ("openenv:ws://host/env", "openenv", "ws://host/env", "", {}, "env"),
        ("openenv_guess", "openenv", "openenv_guess", "", {}, "openenv-guess"),
        ("./verifiers_guess", "verifiers", "./verifiers_guess", "", {}, "verifiers-guess"),
        ("verifiers:prime/wiki@1.2", "verifiers", "prime/wiki", "1.2", {}, "wiki"),
        ("harbor_tasks/shared", "harbor", "harbor_tasks/shared", "", {}, "shared"),
        ("hud_sums", "hud", "hud_sums", "", {}, "hud-sums"),
        ("tcp://127.0.0.1:9", "hud", "tcp://127.0.0.1:9", "", {}, "127-0-0-1-9"),
        ("inspect:inspect_sums/sums.py@plain", "inspect", "inspect_sums/sums.py@plain", "", {}, "plain"),
        ("vault", "miles", "vault", "", {}, "vault"),
        ("mine:Tasks", "miles", "mine:Tasks", "", {}, "tasks"),
    ],
)
def test_references_are_taken_apart(text, kind, target, version, settings, name):
    ref = parse_ref(text, SAMPLES)
    assert (ref.kind, ref.target, ref.version, ref.settings) == (kind, target, version, settings)
    assert default_name(ref) == name


def test_repositories_are_known_by_their_address():
    assert parse_ref("git+https://example.org/envs.git@abc", SAMPLES).git == "https://example.org/envs.git@abc"
    assert parse_ref("openenv:user/space", SAMPLES).git == "https://huggingface.co/spaces/user/space"
    ref = parse_ref("openenv:git+https://example.org/a/b.git", SAMPLES)
    assert (ref.kind, ref.git, default_name(ref)) == ("openenv", "https://example.org/a/b.git", "b")


@pytest.mark.parametrize("text", ["", "nonsense", "gymnasium:", "nowhere/at/all"])
def test_what_is_no_reference_lists_the_forms(text):
    with pytest.raises(ConfigError, match="Forms: gymnasium:Taxi-v4"):
        parse_ref(text, SAMPLES)


def test_a_folder_that_is_no_environment_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no openenv\.yaml, task\.toml"):
        parse_ref(str(tmp_path), tmp_path)


DECLARED = """\
# my project
[tool]            # somebody else's
keep = "me"

[envs.lake]       # the first one
ref = "gymnasium:FrozenLake-v1"
settings = { is_slippery = false }
"""


def test_miles_toml_is_edited_with_its_comments_kept(tmp_path):
    (tmp_path / "miles.toml").write_text(DECLARED)
    project = Project(tmp_path)
    project.declare("taxi", {"ref": "gymnasium:Taxi-v4", "requires": ["six"]})
    assert project.file.read_text() == DECLARED + '\n[envs.taxi]\nref = "gymnasium:Taxi-v4"\nrequires = ["six"]\n'
    assert project.entries()["lake"] == EnvEntry(ref="gymnasium:FrozenLake-v1", settings={"is_slippery": False})
    project.forget("taxi")
    assert project.file.read_text().strip() == DECLARED.strip()


@pytest.mark.parametrize("name", ["../other", "/abs", "a/b", "", ".hidden", "a\\b"])
def test_a_name_that_leads_out_of_the_project_is_refused(tmp_path, name):
    other = tmp_path / "other"
    other.mkdir()
    project = Project(tmp_path / "project")
    project.root.mkdir()
    with pytest.raises(ConfigError, match="cannot be an environment's name"):
        project.folder(name)
    if name:
        with pytest.raises(ConfigError):
            add(project, "no_such_module:Tasks", {}, quiet, name=name)
    project.file.write_text(f"[envs.{name!r}]\nref = 'vault'\n")
    with pytest.raises(ConfigError, match="cannot be an environment's name"):
        remove(project, name)
    assert other.is_dir()


def test_a_declaration_that_changed_is_told_by_check_and_refused_by_sync(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    add(project, "vault", {"settings": {"train": 3}}, quiet, name="small")
    assert check_lock(project) == []
    project.file.write_text(project.file.read_text().replace("train = 3", "train = 9"))
    assert "declared with other settings" in check_lock(project)[0]
    with pytest.raises(ConfigError, match="Run `miles env lock`"):
        sync(project, quiet)
    lock(project, quiet)
    assert project.locks()["small"].splits["train"] == 9
    project.file.write_text('envs = { a = "vault" }\n')
    with pytest.raises(ConfigError, match="write envs as tables"):
        add(project, "vault", {}, quiet, name="b")


def test_what_is_wrong_in_miles_toml_is_told_by_its_key(tmp_path):
    (tmp_path / "miles.toml").write_text('[envs.a]\nref = "vault"\npyton = "3.12"\n')
    with pytest.raises(ConfigError, match=r"miles\.toml, envs\.a: unknown key 'pyton'; nearest: python"):
        Project(tmp_path).entries()
    (tmp_path / "miles.toml").write_text("")
    with pytest.raises(ConfigError, match="declares no environment 'b'"):
        Project(tmp_path).entry("b")


def test_the_nearest_miles_toml_upwards_is_the_project(tmp_path):
    (tmp_path / "miles.toml").write_text("")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert Project.find(tmp_path / "a" / "b").root == tmp_path


def test_the_lock_is_read_as_it_was_written(tmp_path):
    project = Project(tmp_path)
    entries = {
        "b": LockEntry(ref="vault", kind="miles"),
        "a": LockEntry(ref="x", kind="y", packages=("p==1 --hash=z",)),
    }
    project.write_lock(entries)
    assert project.locks() == entries
    assert list(project.locks()) == ["a", "b"]
    project.lock_file.write_text("[envs.a]\nnonsense = 1\n")
    with pytest.raises(ConfigError, match="write it anew with miles env lock"):
        project.locks()


def test_a_digest_sees_content_and_names_and_not_what_building_leaves(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = digest_of_folder(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "a.egg-info").mkdir()
    (tmp_path / "a.egg-info" / "b").write_text("x")
    assert digest_of_folder(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert digest_of_folder(tmp_path) != first


def test_a_python_that_is_not_there_is_named_with_the_ways_to_get_it():
    with pytest.raises(ConfigError, match=r"taxi needs Python >=3\.99.* and here is .*3\.11.*uv python install"):
        pythons.choose_python("", ">=3.99", "taxi")
    with pytest.raises(ConfigError, match=r"needs Python.*==3\.2\.\*"):
        pythons.choose_python("3.2", "", "taxi")
    with pytest.raises(ConfigError, match="is no Python interpreter"):
        pythons.choose_python("/bin/true", "", "taxi")
    with pytest.raises(ConfigError, match="is no Python version"):
        pythons.choose_python("snake", "", "taxi")
    assert pythons.choose_python("", ">=3.11", "taxi") == Path(sys.executable)
    assert pythons.choose_python(sys.executable, "", "taxi") == Path(sys.executable)


@pytest.mark.parametrize(
    "said, hint",
    [
        ("error: command 'gcc' failed: No such file or directory", "no C compiler: apt install"),
        ("/bin/sh: 1: cc: not found", "no C compiler: apt install"),
        ("fatal error: Python.h: No such file or directory", "headers are missing: apt install python3-dev"),
        ("no matching distribution", ""),
    ],
)
def test_what_a_build_lacks_is_named_with_how_to_get_it(said, hint):
    with pytest.raises(EnvError) as failed:
        pythons._run([sys.executable, "-c", f"import sys; sys.exit({said!r})"], "it cannot be built")
    assert failed.value.message.endswith(said) if not hint else hint in failed.value.message


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def test_an_environment_of_ones_own_goes_from_nothing_to_a_name(project, monkeypatch):
    steps = scaffold("my-sums", project.root / "my-sums")
    assert steps[0] == "miles env add ./my-sums"
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert add(project, "./my-sums", {}, quiet) == "my-sums"
    assert project.locks()["my-sums"].splits == {"train": 2000, "test": 100}
    taskset = open_env("my-sums", {"train": 3}, project=project)
    assert len(taskset.tasks("train")) == 3
    assert check_lock(project) == []
    (project.root / "my-sums" / "my_sums.py").write_text("# another one\n")
    assert "has changed since it was locked" in check_lock(project)[0]
    remove(project, "my-sums")
    assert (project.entries(), project.locks()) == ({}, {})


def test_two_folders_with_a_module_of_the_same_name_are_told_apart(project, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("a", "b"):
        scaffold("same-sums", project.root / folder / "same-sums")
    add(project, "./a/same-sums", {}, quiet, name="one")
    with pytest.raises(ConfigError, match="is loaded by that name: rename one"):
        add(project, "./b/same-sums", {}, quiet, name="two")


@pytest.mark.parametrize(
    "line, error",
    [
        ('raise RuntimeError("no luck")', r"raised RuntimeError: no luck \(.*raising_sums\.py:\d+\)"),
        ('return [{"id": "one"}]', "has a dict, which is no Task"),
    ],
)
def test_tasks_that_raise_or_are_none_are_told_with_their_place(project, monkeypatch, line, error):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "raising_sums", raising=False)
    scaffold("raising-sums", project.root / "raising-sums")
    path = project.root / "raising-sums" / "raising_sums.py"
    text = path.read_text()
    path.write_text(
        text.replace("        count = self.config.train if", f"        {line}\n        count = self.config.train if")
    )
    with pytest.raises(EnvError, match=error):
        add(project, "./raising-sums", {}, quiet)
    monkeypatch.delitem(sys.modules, "raising_sums", raising=False)
    with pytest.raises(ConfigError, match="in Miles' own process"):
        add(project, "./raising-sums", {"requires": ["six"]}, quiet)
    with pytest.raises(ConfigError, match="and no Taskset"):
        add(project, "json:JSONDecoder", {}, quiet)


@pytest.mark.parametrize("name", ["My-Sums", "a b", "-a", "a_b", ""])
def test_a_name_that_no_package_can_have_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be a package's name"):
        scaffold(name, tmp_path / "x")


def test_a_failed_addition_leaves_nothing(project):
    with pytest.raises(ConfigError, match="no module 'no_such_module'"):
        add(project, "no_such_module:Tasks", {}, quiet)
    assert not project.file.exists()
    assert not project.lock_file.exists()
    add(project, "vault", {"settings": {"train": 5, "test": 2}}, quiet)
    with pytest.raises(ConfigError, match="an environment 'vault' already"):
        add(project, "vault", {}, quiet)
    with pytest.raises(ConfigError, match="unknown key 'trian'"):
        add(project, "vault", {"settings": {"trian": 5}}, quiet, name="other")
    assert list(project.entries()) == ["vault"]


def test_declared_tasks_and_rewards_are_used_and_a_recipes_own_go_over_them(project):
    (project.root / "miles.toml").write_text(
        '[envs.small]\nref = "vault"\nsettings = { train = 9 }\ntasks = { take = 4 }\n'
    )
    with pytest.raises(ConfigError, match=r"declared.*small|unknown env 'smal'"):
        open_env("smal", {}, project=project)
    assert len(open_env("small", {}, project=project).tasks("train")) == 4
    assert len(open_env("small", {"train": 2}, project=project).tasks("train")) == 2
    assert len(open_env("small", {}, build(SelectionConfig, {"take": 7}), project=project).tasks("train")) == 7


def test_a_repository_is_cloned_at_its_commit(project, tmp_path, monkeypatch):
    source = tmp_path / "source"
    scaffold("far-away", source)
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (source / "far_away.py").write_text("broken(")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    add(project, f"git+file://{source}@{commit}", {}, quiet, name="far-away")
    assert project.locks()["far-away"].splits == {"train": 2000, "test": 100}
    assert project.locks()["far-away"].source == commit
    manage.shutil.rmtree(project.folder("far-away"))
    assert check_lock(project) == []  # cloned again, at the commit
    (project.folder("far-away") / "source" / "far_away.py").write_text("# changed")
    assert "its source has changed" in check_lock(project)[0]
    with pytest.raises(EnvError, match="git clone"):
        add(project, "git+file:///no/such/place.git", {}, quiet, name="gone")


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["uv", pytest.param("pip", marks=pytest.mark.hub)])
def test_a_python_of_its_own_is_locked_checked_and_built_again(project, monkeypatch, tool):
    if tool == "pip":
        monkeypatch.setattr(pythons, "uv", lambda: None)
    elif pythons.uv() is None:
        pytest.skip("uv is not installed")
    add(project, "gymnasium:FrozenLake-v1?is_slippery=false&count=5", {}, quiet, name="lake")
    locked = project.locks()["lake"]
    assert locked.splits == {"train": 5, "test": 5}
    assert any(line.startswith("gymnasium==") and "--hash=sha256:" in line for line in locked.packages)
    assert check_lock(project) == []
    assert sync(project, quiet) == 0
    manage.shutil.rmtree(project.folder("lake"))
    assert check_lock(project) == ["lake is not installed: miles env sync"]
    with pytest.raises(ConfigError, match="not installed here: miles env sync"):
        open_env("lake", {}, project=project)
    assert sync(project, quiet) == 1
    assert check_lock(project) == []
    text = project.file.read_text()
    project.file.write_text(text.replace("count=5", "count=6"))
    with pytest.raises(ConfigError, match="Run `miles env lock`"):
        sync(project, quiet)
    lock(project, quiet)
    assert project.locks()["lake"].splits == {"train": 6, "test": 6}
    with pytest.raises(EnvError, match="the packages cannot be resolved"):
        add(project, "gymnasium:Taxi-v4", {"requires": ["no-such-package-at-all==9"]}, quiet)
    assert list(project.entries()) == ["lake"]
