"""Whole small runs: what they leave, how they stop, how they go on, what breaks them."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from miles.cli.main import main
from miles.recipes.compose import launch
from miles.recipes.config import load_recipe
from miles.rollout.rendering.families import load_rendering
from miles.rollout.session.session import ChatRequest
from miles.runs import RunFolder
from miles.trainer.checkpoints import read_state
from miles.trainer.data.batch import build_batch
from miles.trainer.data.credit import is_live
from miles.trainer.settings import AdvantageConfig
from miles.types import Group, Scored, Tree
from tests.trees import group, turn

SMALL = [
    "train.warm_start.steps=3",
    "train.steps=3",
    "train.save_every=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=3",
    "rollout.max_episodes=6",
    "eval.tasks=4",
]


class Events:
    def __init__(self):
        self.kinds = []

    def event(self, kind, data):
        self.kinds.append(kind)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run, looked at by several tests."""
    root, events = tmp_path_factory.mktemp("runs"), Events()
    folder = asyncio.run(launch(load_recipe("quickstart", [*SMALL, f"run.root={root}"]), events))
    return folder, events


def test_a_run_leaves_everything_that_was_promised(finished):
    folder, events = finished
    assert {"composed", "warm_start", "evaluating", "eval", "step", "checkpoint", "end"} <= set(events.kinds)
    assert [line["step"] for line in folder.metrics("step")] == [1, 2, 3]
    assert [line["version"] for line in folder.metrics("eval")] == [0, 3]
    assert all(line["mixed"] == 0 for line in folder.metrics("eval"))
    assert (folder.path / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in folder.checkpoints()] == ["step-000002", "step-000003"]
    assert load_rendering(folder.checkpoints()[-1] / "hf").encode("amber")
    assert "seed = 0" in folder.config.read_text()


def groups_of(folder):
    """Groups rebuilt from the episode files alone."""
    members = defaultdict(dict)
    for episode in folder.episodes("train-*"):
        if episode.reward is not None:
            members[episode.group_id][episode.index] = episode
    return {
        name: Group(id=name, seq=0, task_id=found[min(found)].task_id, episodes=tuple(found[i] for i in sorted(found)))
        for name, found in members.items()
    }


def test_every_training_row_can_be_rebuilt_from_the_episode_files(finished):
    folder, _ = finished
    groups = groups_of(folder)
    for step in folder.metrics("step"):
        batch = build_batch([groups[name] for name in step["groups"]], AdvantageConfig(), version=step["step"] - 1)
        assert batch.metrics["tokens/owned"] == step["tokens/owned"]
        assert batch.metrics["reward/mean"] == step["reward/mean"]
        assert sum(row.n_owned for row in batch.rows if is_live(row)) == step["tokens/trained"]


def test_no_token_is_trained_twice_and_none_is_older_than_allowed(finished):
    folder, _ = finished
    names = [name for step in folder.metrics("step") for name in step["groups"]]
    assert len(set(names)) == len(names) == 6
    assert max(step["staleness/max"] for step in folder.metrics("step")) <= 1


def test_engine_and_trainer_agree_on_every_logprob_they_can_compare(finished):
    folder, _ = finished
    compared = [step["logprob_diff/max"] for step in folder.metrics("step") if "logprob_diff/max" in step]
    assert compared
    assert max(compared) <= 1e-4


class TwoGroups:
    """A rollout layer of its own: any task, two made-up groups a step."""

    def __init__(self, runner, tasks):
        self.tasks = tasks

    async def groups(self):
        number = 0
        while True:
            tree = Tree(turns=(turn(0, None, [1, 2], [3, 4]),))
            yield group(1.0, 0.0, id=f"{self.tasks[number].id}", tree=tree)
            number += 1


def launched(tmp_path, *overrides):
    return asyncio.run(launch(load_recipe("quickstart", [*SMALL, *overrides, f"run.root={tmp_path}"]), Events()))


def test_everything_in_one_process_for_debuggers(tmp_path):
    folder = launched(tmp_path, "engine.name=inprocess", "trainer.ranks=0", "publish.kind=inprocess")
    assert [step["step"] for step in folder.metrics("step")] == [1, 2, 3]
    assert list(folder.logs.iterdir()) == []
    compared = [step["logprob_diff/max"] for step in folder.metrics("step") if "logprob_diff/max" in step]
    assert compared
    assert max(compared) <= 1e-4


ALONE = ("engine.name=inprocess", "trainer.ranks=0")
DELTA = ("publish.kind=delta", "publish.full_every=3", "train.steps=5")
LORA = ("trainer.compute.lora.rank=4", "train.optim.lr=1e-2")


@pytest.mark.slow
def test_weights_reach_another_process_over_a_process_group(tmp_path):
    folder = launched(tmp_path, "publish.kind=broadcast", "train.warm_start.steps=0", "train.steps=2")
    compared = [step["logprob_diff/max"] for step in folder.metrics("step") if "logprob_diff/max" in step]
    assert max(compared) <= 1e-4
    assert [line["version"] for line in folder.metrics("eval")] == [0, 2]


@pytest.mark.parametrize("settings", [DELTA, LORA], ids=["delta", "lora"])
def test_weights_reach_the_engine_as_differences_and_as_adapters(tmp_path, settings):
    folder = launched(tmp_path, *ALONE, *settings)
    steps = folder.metrics("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    compared = [step["logprob_diff/max"] for step in steps if "logprob_diff/max" in step]
    assert max(compared) <= 1e-4
    assert {"publish_bytes", "pause_s", "transfer_s"} <= set(steps[-1])
    full = load_file(folder.checkpoints()[-1] / "hf" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in full.values())
    smallest = min(step["publish_bytes"] for step in steps)
    assert smallest < (0.98 if settings is DELTA else 0.5) * size


async def alternate(context):
    """A generation layer whose episodes are of one turn, good and bad by turns."""
    async with context.session() as session:
        done = await session.complete(ChatRequest(messages=context.task.prompt))
        done.delivered()
        return context.episode(session.tree(), Scored(reward=float(context.job.index % 2)))


PPO = ["train.advantage.estimator=gae", "train.critic.warmup_steps=1", "train.advantage.whiten=true"]
KL = ["train.kl.coefficient=0.01", "train.policy.kind=gspo", "train.policy.entropy=0.001"]
DECOUPLED = ["train.correction.anchor=recomputed", "train.minibatches=2", "train.advantage.estimator=reinforce_pp"]
DAPO = ["rollout.drop_without_difference=true", "train.advantage.overlong.limit=100", "train.policy.kind=cispo"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "metrics", "follows"),
    [
        (PPO, {"critic/error", "critic/explained"}, True),
        (KL, {"policy/kl_to_reference", "policy/entropy"}, True),
        (DECOUPLED, {"policy/effective_samples", "policy/clipped"}, False),
        (DAPO, {"policy/clipped", "groups_finished"}, False),
    ],
    ids=["ppo", "kl-gspo-entropy", "decoupled", "dapo"],
)
def test_algorithms_run_in_whole_runs_and_resume(tmp_path, settings, metrics, follows):
    generation = "generation=tests.recipes.test_compose:alternate"
    folder = launched(tmp_path, *ALONE, "publish.kind=inprocess", generation, *settings, "train.steps=2")
    assert main(["launch", "--resume", str(folder.path), "train.steps=3"]) == 0
    steps = folder.metrics("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step.get("skipped_not_finite", 0.0) == 0.0 for step in steps)
    assert metrics <= {key for step in steps for key in step}
    # a reference and a critic begin where the warm start ended
    assert (folder.path / "warmed" / "model.safetensors").exists() == follows


@pytest.mark.slow
def test_a_recipe_may_name_its_own_rollout_layer(tmp_path):
    folder = launched(tmp_path, "rollout.name=tests.recipes.test_compose:TwoGroups", "train.warm_start.steps=0")
    assert [step["groups"] for step in folder.metrics("step")][1] == ["train/2", "train/3"]
    assert json.loads((folder.checkpoints()[-1] / "state.json").read_text())["source"] == {"taken": 6}
    assert len(list(folder.episodes("train-*"))) == 12
    assert folder.metrics("step")[0]["outcome/scored"] == 4


README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = [block.partition("```")[0] for block in README.split("```python\n")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES, ids=["agent", "generation", "rollout"])
def test_the_readmes_examples_run_as_they_stand_in_the_users_own_folder(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    command = [Path(sys.executable).with_name("miles"), *code.splitlines()[0].split()[2:], *SMALL]
    dry = subprocess.run([*command, "--dry-run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (dry.returncode, '"mine:' in dry.stdout) == (0, True), dry.stderr
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (RunFolder(path) for path in (tmp_path / "runs").iterdir())
    assert {e.outcome.kind for e in run.episodes("train-*")} == {"scored"}
    assert sum(len(e.tree.turns) for e in run.episodes("train-*")) > 0


def test_the_readmes_examples_have_ten_lines_each_and_its_output_comes_first():
    bodies = [[line for line in code.splitlines() if line.strip() and line[0] not in "#fi"] for code in EXAMPLES]
    assert all(len(body) <= 10 for body in bodies)
    assert "held-out success" in "".join(README.splitlines(keepends=True)[:25])
    assert "@@" not in README


class Run:
    """`miles launch` in a process of its own."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "miles", "launch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []

    def until(self, pattern):
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        pytest.fail("the run ended first:\n" + "".join(self.lines[-30:]))

    def end(self, timeout=60):
        rest, _ = self.process.communicate(timeout=timeout)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def text(self):
        return "".join(self.lines)

    def children(self):
        """Processes of the run's own session, itself excluded."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and int(path.name) != self.process.pid:
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def worker(self, log):
        """The child whose output goes to `log`."""
        for pid in self.children():
            if Path(f"/proc/{pid}/fd/1").resolve().name == log:
                return pid
        raise AssertionError(f"no child writes {log}: {self.children()}")


def owned_by(pid):
    """Processes that a sandbox of run `pid` left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MILES_OWNER={pid}-".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture
def run_of(tmp_path):
    started = []

    def start(*arguments):
        started.append(Run(*arguments, f"run.root={tmp_path}") if arguments[0] != "--resume" else Run(*arguments))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.stdout.close()
        run.process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_resume_goes_on_where_it_was(run_of, tmp_path):
    run = run_of("quickstart", *SMALL, "train.steps=200", "train.save_every=0")
    url = run.until("session server").split("http://127.0.0.1:")[1]
    run.until(r"step 2 ")
    snapshots = set(Path("/dev/shm").glob("miles-weights-*"))
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches every process of the group
    assert run.end() == 0, run.text
    assert "stopping after this step" in run.text
    assert run.children() == {}
    assert owned_by(run.process.pid) == []
    assert len(set(Path("/dev/shm").glob("miles-weights-*")) & snapshots) < len(snapshots)
    with socket.socket() as port:
        assert port.connect_ex(("127.0.0.1", int(url))) != 0
    (folder,) = (RunFolder(path) for path in tmp_path.iterdir())
    stopped_at = folder.metrics("step")[-1]["step"]
    state = json.loads((folder.checkpoints()[-1] / "state.json").read_text())
    assert state["step"] == stopped_at
    again = run_of("--resume", str(folder.path), f"train.steps={stopped_at + 2}")
    assert again.end() == 0, again.text
    steps = folder.metrics("step")
    assert [step["step"] for step in steps] == list(range(1, stopped_at + 3))
    trained = [name[:7] for step in steps for name in step["groups"]]
    assert len(set(trained)) == len(trained)
    kept = {group.seq for group in read_state(folder.checkpoints()[-1])["source"]["groups"]}
    assert set(range(2 * stopped_at)) <= {int(name[1:]) for name in trained} | set(state["source"]["pending"]) | kept


@pytest.mark.slow
def test_ctrl_c_in_the_warm_start_loses_nothing_of_it(run_of, tmp_path):
    run = run_of("quickstart", *SMALL, "train.warm_start.steps=200")
    run.until("warm start 50/200")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.text
    (folder,) = (RunFolder(path) for path in tmp_path.iterdir())
    again = run_of("--resume", str(folder.path))
    assert again.end() == 0, again.text
    assert [line["step"] for line in folder.metrics("warm_start")] == list(range(1, 201))
    assert [line["step"] for line in folder.metrics("step")] == [1, 2, 3]


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_the_run_goes_on(run_of):
    run = run_of("quickstart", *SMALL, "train.steps=4", "rollout.retries=3")
    run.until(r"step 1 ")
    os.kill(run.worker("engine.log"), signal.SIGKILL)
    assert run.end() == 0, run.text
    assert "embedded engine died (1 of 3 restarts used)" in run.text
    assert "finished at step 4" in run.text


@pytest.mark.slow
def test_an_engine_that_may_not_restart_stops_the_run_with_a_checkpoint(run_of, tmp_path):
    run = run_of("quickstart", *SMALL, "train.steps=200", "engine.embedded.restarts=0", "rollout.discard_limit=8")
    run.until(r"step 1 ")
    os.kill(run.worker("engine.log"), signal.SIGKILL)
    assert run.end() == 1, run.text
    assert "the embedded engine died 1 times" in run.text
    assert re.search(r"saved .*/checkpoints/step-\d+; go on with `miles launch --resume", run.text)
    (folder,) = (RunFolder(path) for path in tmp_path.iterdir())
    assert folder.checkpoints()
    assert owned_by(run.process.pid) == []


@pytest.mark.slow
def test_a_killed_trainer_stops_the_run_and_names_the_log(run_of):
    run = run_of("quickstart", *SMALL, "train.steps=200")
    run.until(r"step 1 ")
    os.kill(run.worker("trainer-0.log"), signal.SIGKILL)
    assert run.end() == 1, run.text
    assert re.search(r"trainer rank 0 \(pid \d+\) ended.*trainer-0\.log", run.text)
    assert run.children() == {}


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_instructions(run_of, tmp_path):
    run = run_of("quickstart", *SMALL, "train.steps=200")
    run.until(r"step 1 ")
    (folder,) = (RunFolder(path) for path in tmp_path.iterdir())
    for path in [*(folder.path / "episodes").iterdir(), folder.path / "metrics.jsonl"]:
        path.unlink()
        path.symlink_to("/dev/full")
    assert run.end() == 1, run.text
    assert "No space left on device; free some space, then go on with `miles launch --resume" in run.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.name=valut"], "unknown env 'valut'; did you mean vault"),
        (["harness.name=raect"], "unknown harness 'raect'; did you mean react"),
        (["sandbox.backend=dockr"], "unknown sandbox 'dockr'"),
        (["engine.name=scripted"], "name an instance of it as module:attr"),
        (["generation=react"], "must name an `async def generate"),
        (["env.name=gymnasium", "env.settings.id=NoSuch-v0"], "gymnasium does not know NoSuch-v0"),
        (["env.name=guess-number", "env.settings.highest=ten"], "highest: Input should be a valid integer"),
        (["engine.name=embeded"], "unknown engine 'embeded'; did you mean embedded"),
        (["env.settings.dept=2"], "unknown key 'dept'; nearest: depth"),
        (["harness.settings.max_turns=few"], "max_turns: Input should be a valid integer"),
        (["trainer.backend=fsdpp"], "unknown trainer 'fsdpp'; did you mean fsdp"),
        (["model.path=/no/such/dir", "model.tiny=none"], "is not a model directory"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness: Input should be greater than or equal to 0"),
        (["eval.split=valid"], "env vault has no split 'valid'; it has train and test"),
        (
            ["harness.name=nowhere:agent"],
            "there is no module 'nowhere'. If it is your own file, run miles in the folder",
        ),
        (["model.path=/tmp"], "model.path=/tmp is not a model directory"),
        (["model.gguf=none.gguf"], "there is no file none.gguf"),
        (["model.gguf=no_such_package:m.gguf"], "the package 'no_such_package' is not installed"),
        (["train.policy.kind=gsop"], "unknown loss 'gsop'; did you mean gspo"),
        (["train.advantage.estimator=groq"], "unknown advantage 'groq'; did you mean grpo"),
        (["publish.kind=broadcast", "trainer.ranks=0"], "publish.kind=broadcast needs two processes"),
        (["train.distill.coefficient=1"], "distillation needs a teacher"),
        (["train.kl.reference=/nope", "train.kl.coefficient=1"], "train.kl.reference=/nope is not a model directory"),
        (["rollout.group_size=1"], "compares siblings: set rollout.group_size to 2 or more"),
        (["train.correction.low=9"], "low=9 is above high=8: every token would be left out"),
        (["trainer.compute.lora=null"], "or `none` to leave it out"),
    ],
)
def test_what_the_user_can_mend_is_told_at_once(capsys, tmp_path, overrides, message):
    assert main(["launch", "quickstart", *SMALL, *overrides, f"run.root={tmp_path}"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_taken_port_and_a_model_without_tokenizer(run_of, model, tmp_path_factory):
    bare = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    run = run_of("quickstart", *SMALL, "model.tiny=none", f"model.path={bare}")
    assert (run.end(), "has no tokenizer" in run.text) == (2, True), run.text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = run_of("quickstart", *SMALL, f"session.port={taken.getsockname()[1]}")
        assert (run.end(), "session.port=0" in run.text) == (2, True), run.text
    assert run.children() == {}
