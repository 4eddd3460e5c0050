"""A third party's program: the harness.toml of docs/harnesses.md, installed from a wheel, played in a sandbox."""

import asyncio
import re
import zipfile
from pathlib import Path

import pytest

from miles.cli.main import main
from miles.config import build
from miles.errors import ConfigError, HarnessError
from miles.harnesses.base import SessionNeeds
from miles.harnesses.description import describe
from miles.harnesses.install import install, installed
from miles.harnesses.program import program_class
from miles.recipes.harnesscheck import benching, check_harness
from miles.types import Scored

DOCS = Path(__file__).parents[2] / "docs" / "harnesses.md"
AGENT = """
import json, os, subprocess, sys, urllib.request

if "--version" in sys.argv:
    print("loop-agent 0.3.1")
    sys.exit()
most = int(sys.argv[sys.argv.index("--turns") + 1]) if "--turns" in sys.argv else 50
shell = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
for turn in range(most):
    body = json.dumps({"model": "any", "messages": messages, "tools": [shell]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["LOOP_KEY"], "Content-Type": "application/json"}
    for attempt in range(4):
        try:
            request = urllib.request.Request(os.environ["LOOP_URL"] + "/chat/completions", body, headers)
            answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
            break
        except urllib.error.HTTPError as error:
            if error.code < 500:
                sys.exit("refused")
    messages.append(answer)
    if not answer.get("tool_calls"):
        sys.exit()
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
sys.exit(3)
"""


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The documented harness.toml, its package a wheel in the same folder."""
    folder = tmp_path_factory.mktemp("loop")
    wheel = folder / "loop_agent-0.3.1-py3-none-any.whl"
    facts = "loop_agent-0.3.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("loop_agent/__main__.py", AGENT)
        archive.writestr("loop_agent/__init__.py", "")
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: loop-agent\nVersion: 0.3.1\n")
        archive.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{facts}/RECORD", "")
    text = re.search(r"```toml\n(title = .*?)```", DOCS.read_text(), re.DOTALL)[1]
    path = folder / "harness.toml"
    path.write_text(text.replace("loop-agent==0.3.1", f"loop-agent @ file://{wheel}"))
    return path


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILES_HOME", str(tmp_path_factory.mktemp("home")))
        yield


async def test_it_is_installed_once_and_plays(described):
    shown = []
    report, found = await check_harness(
        str(described),
        {},
        only=["gets over a failing engine", "acts in an environment"],
        tell=lambda *told: shown.append(told),
    )
    assert [entry["status"] for entry in report] == ["ok"] * 3, shown
    assert (found.extended, found.causes) == (4, {})
    name, description = described.parent.name, describe(described)
    assert install(name, description, described.parent, tell=pytest.fail) == installed(
        name, description, described.parent
    )


async def test_its_settings_reach_it_and_its_end_is_judged_by_the_records(described):
    async with benching(str(described), {"max_turns": 2}) as bench:
        episode = await bench.play(bench.solving())
        assert len(episode.tree.turns) == 2
        assert episode.outcome == Scored(reward=0.0, parts={"checks": 0.0})  # a terminal is scored as it stands
        assert any("exited 3" in line for line in episode.log)
    with pytest.raises(ConfigError, match="unknown key 'turns'; nearest: max_turns"):
        async with benching(str(described), {"turns": 2}):
            pass


def test_another_version_than_the_described_one_is_refused_and_leaves_nothing(described, tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    description = describe(described)
    other = description.model_copy(update={"version": "0.4.0"})
    with pytest.raises(HarnessError, match=r"Loop 0\.4\.0 was asked for, and .* says 'loop-agent 0\.3\.1'"):
        install("loop", other, described.parent, tell=lambda text: None)
    assert installed("loop", other, described.parent) is None
    assert [path.name for path in (tmp_path / "harnesses").iterdir() if path.is_dir()] == []


def test_a_package_that_is_not_there_is_told(described, tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    description = describe(described)
    none = description.install.model_copy(update={"pip": (f"loop-agent @ file://{tmp_path}/none.whl",)})
    with pytest.raises(HarnessError, match="Loop cannot be installed"):
        install("loop", description.model_copy(update={"install": none}), tmp_path, tell=lambda text: None)


def write(tmp_path, text):
    path = tmp_path / "harness.toml"
    path.write_text(text)
    return path


LEAST = 'title = "T"\nversion = "1"\ndialect = "chat"\n[install]\ncheck = ["true"]\n[run]\ncommand = ["go"]\n'


def test_what_is_wrong_in_a_description_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"harness\.toml: unknown key 'run\.comand'; nearest: run\.command"):
        describe(write(tmp_path, LEAST.replace("command", "comand")))
    with pytest.raises(ConfigError, match="dialect"):
        describe(write(tmp_path, LEAST.replace('"chat"', '"smoke signals"')))
    with pytest.raises(ConfigError, match=r"is not valid TOML"):
        describe(write(tmp_path, "title = "))
    with pytest.raises(ConfigError, match="there is no module 'none'"):
        program_class(write(tmp_path, f'plugin = "none:Here"\n{LEAST}'))
    with pytest.raises(ConfigError, match="is no subclass of ProgramHarness"):
        program_class(write(tmp_path, f'plugin = "json:JSONDecoder"\n{LEAST}'))


def test_values_are_filled_in_quoted_and_missed(tmp_path):
    text = LEAST.replace('["go"]', '["go", "$prompt"]')
    text += 'files = { "$home/a" = \'{"said": ${prompt_json}, "cost": "$$1"}\' }\n'
    text += '[when.fast]\narguments = ["--fast"]\n[unless.fast]\nenv = { SLOW = "1" }\n'
    text += '[settings.fast]\ndefault = false\nhelp = "Whether it hurries."\n'
    made = program_class(write(tmp_path, text))
    launch = made.description.launch({"prompt": 'say "hi"', "home": "/h", "fast": True})
    assert launch.command == ("go", 'say "hi"', "--fast")
    assert launch.files == {"/h/a": '{"said": "say \\"hi\\"", "cost": "$1"}'}
    assert launch.env == {}
    slow = made.description.launch({"prompt": "", "home": "/h", "fast": False})
    assert (slow.command, slow.env) == (("go", ""), {"SLOW": "1"})
    with pytest.raises(ConfigError, match=r"names 'prompt'; a value is one of fast, home"):
        made.description.launch({"home": "/h", "fast": False})
    assert made(build(made.config_class, {"fast": True})).needs == SessionNeeds(wishes="record")


def test_a_folder_is_a_program_and_is_installed_anew_when_it_changes(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "agent.py").write_text(AGENT)
    text = 'title = "F"\nversion = "1"\ndialect = "chat"\n[install]\nfolder = "src"\n'
    text += '[run]\ncommand = ["python3", "$root/agent.py"]\nstdin = "$prompt"\n'
    text += 'env = { LOOP_URL = "$base_url", LOOP_KEY = "$api_key" }\n'
    text += '[trial]\ntool = "shell"\narguments = { command = "$command" }\n'
    path = write(tmp_path, text)
    report, _ = asyncio.run(
        check_harness(str(path), {}, only=["an agent that does nothing scores nothing"], tell=print)
    )
    assert [entry["status"] for entry in report] == ["ok", "ok"]
    first = install("f", describe(path), tmp_path, tell=print)
    (tmp_path / "src" / "agent.py").write_text(f"{AGENT}\n# changed")
    assert install("f", describe(path), tmp_path, tell=print).folder != first.folder


def test_a_recipe_takes_it_by_its_path(described, tmp_path, capsys):
    words = ["launch", "terminal-claude-code", "--smoke", "--dry-run", f"harness.name={described}"]
    assert main([*words, "harness.settings={max_turns=3}", f"run.root={tmp_path}"]) == 0
    assert f'name = "{described}"' in capsys.readouterr().out
    assert main([*words, "harness.settings={turns=3}"]) == 2
    assert "unknown key 'turns'; nearest: max_turns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[run.env]\nA = "$promt"', "names 'promt'; a value is one of"),
        ('[run.env]\nA = "costs $5"', "Invalid placeholder"),
        ("[when.mcpurl]\n", "when.mcpurl is no value; there are:"),
        ("[unless.sytem]\n", "unless.sytem is no value"),
        ('[settings.prompt]\ndefault = ""\nhelp = "x"', "settings.prompt: this name is taken"),
        ('[settings.model_dump]\ndefault = ""\nhelp = "x"', "settings.model_dump: this name is taken"),
        ('[session]\ncanonicalisers = ["sort"]', "unknown canonicaliser 'sort'"),
    ],
)
def test_mistakes_are_found_when_the_file_is_read(tmp_path, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        describe(write(tmp_path, f"{LEAST}{more}\n"))


def test_packages_need_a_check_and_versions_are_compared_whole(tmp_path):
    with pytest.raises(ConfigError, match=r"install\.check: say which command tells the version"):
        describe(write(tmp_path, LEAST.replace('check = ["true"]', 'pip = ["x==1"]')))
    path = write(
        tmp_path, LEAST.replace('version = "1"', 'version = "1.2"').replace('["true"]', '["echo", "T 11.2.7"]')
    )
    with pytest.raises(HarnessError, match=r"T 1\.2 was asked for"):
        install("t", describe(path), tmp_path, tell=print)
