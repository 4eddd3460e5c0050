"""Recipes that learn from a file, through the command line, with a real tiny model."""

import asyncio
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from miles.cli.main import main
from miles.cli.progress import PlainReporter
from miles.config import build, read_toml
from miles.envs.vault import VaultTaskset
from miles.errors import ConfigError
from miles.recipes.offline import OfflineRun, launch_offline, read_units
from miles.runs import list_runs
from miles.trainer.offline import OfflineConfig


@pytest.fixture
def conversations():
    demonstrations = VaultTaskset().demonstrations(0)
    return [{"messages": m, "tools": t} for (m, t), _ in zip(demonstrations, range(40), strict=False)]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(tmp_path, model, data, *, loss="sft", extra=""):
    path = tmp_path / f"{loss}.toml"
    path.write_text(f"""
        name = "{loss}"
        [run]
        root = "{tmp_path}/runs"
        [model]
        path = "{model}"
        [trainer]
        ranks = 0
        [offline]
        path = "{data}"
        loss = "{loss}"
        batch = 8
        held_out = 8
        {extra}
        [offline.optim]
        kind = "muon"
        lr = 5e-3
        """)
    return str(path)


def the_run(tmp_path):
    (run,) = list_runs(tmp_path / "runs")
    return run


def test_supervised_steps_lower_the_held_out_loss_and_a_resumed_run_goes_on(model, tmp_path, conversations, capsys):
    data = written(tmp_path / "data.jsonl", conversations)
    path = recipe(tmp_path, model, data, extra="steps = 12\neval_every = 6")
    assert main(["launch", path]) == 0
    run = the_run(tmp_path)
    held_out = [line["loss"] for line in run.metrics("held_out")]
    assert len(held_out) == 3
    assert held_out[-1] < 0.8 * held_out[0]
    assert "held-out loss" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(run.checkpoints()[-1] / "hf")
    assert main(["launch", "--resume", str(run.path), "offline.steps=14"]) == 0
    assert [line["step"] for line in run.metrics("supervised")] == list(range(1, 15))
    assert main(["runs", "show", str(run.path)]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_a_resumed_run_sees_the_lines_that_an_uninterrupted_one_sees(model, tmp_path, conversations):
    data = written(tmp_path / "data.jsonl", conversations[:13])  # five to train on: passes end within batches
    losses = {}
    for name, stops in (("whole", [6]), ("parts", [1, 2, 5, 6])):
        root = tmp_path / name
        root.mkdir()
        path = recipe(root, model, data, extra="steps = 6\neval_every = 100")
        main(["launch", path, f"offline.steps={stops[0]}"])
        for stop in stops[1:]:
            main(["launch", "--resume", str(the_run(root).path), f"offline.steps={stop}"])
        losses[name] = [line["loss"] for line in the_run(root).metrics("supervised")]
    assert losses["parts"] == losses["whole"]


def test_preferences_are_learned(model, tmp_path, conversations, capsys):
    lines = [
        {
            "prompt": line["messages"][:-1],
            "tools": line["tools"],
            "chosen": line["messages"][-1:],
            "rejected": [{"role": "assistant", "content": "amber"}],
        }
        for line in conversations
    ]
    data = written(tmp_path / "data.jsonl", lines[:14])  # six pairs for batches of eight: some come twice in a step
    path = recipe(tmp_path, model, data, loss="dpo", extra="steps = 10")
    assert main(["launch", path]) == 0
    run = the_run(tmp_path)
    first, last = run.metrics("held_out")[0], run.metrics("held_out")[-1]
    assert run.metrics("supervised")[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are the same
    assert last["loss"] < 0.6
    assert last["accuracy"] == 1.0
    assert run.metrics("supervised")[-1]["dpo/accuracy"] > 0.9


def test_a_message_can_be_context_only(rendering, tmp_path, conversations):
    longest = max(conversations, key=lambda line: len(line["messages"]))
    messages = longest["messages"]
    marked = [{**m, "train": False} if m["role"] == "assistant" else m for m in messages[:-1]] + list(messages[-1:])
    lines = [longest, {**longest, "messages": marked}]
    config = OfflineConfig(path=written(tmp_path / "d.jsonl", lines))
    (whole,), (last_only,) = read_units(config, rendering)
    assert whole.ids.tolist() == last_only.ids.tolist()
    assert 0 < last_only.n_owned < whole.n_owned
    assert last_only.owned.nonzero()[0].min() > whole.owned.nonzero()[0].min()


@pytest.mark.parametrize(
    "line, says",
    [
        ("{not json", "line 2 is not JSON: .* at column 2"),
        ('{"text": "x"}', "line 2 has no 'messages'; offline.loss=sft wants"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: no assistant message to learn from"),
    ],
)
def test_a_bad_line_is_named(rendering, tmp_path, conversations, line, says):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(conversations[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=says):
        list(read_units(OfflineConfig(path=path), rendering))


def test_what_the_user_can_mend_is_told(model, tmp_path, conversations, capsys):
    missing = recipe(tmp_path, model, tmp_path / "none.jsonl")
    assert main(["launch", missing]) == 2
    few = recipe(tmp_path, model, written(tmp_path / "few.jsonl", conversations[:8]))
    assert main(["launch", few]) == 2
    assert the_run(tmp_path).metrics("end")[0]["error"]
    said = capsys.readouterr().err
    assert "no such file" in said
    assert "nothing is left to train" in said


async def test_a_run_writes_a_checkpoint_when_asked_from_outside(model, tmp_path, conversations, capsys):
    data = written(tmp_path / "data.jsonl", conversations)
    path = recipe(tmp_path, model, data, extra="steps = 100000")
    config = build(OfflineRun, read_toml(Path(path)))
    running = asyncio.create_task(launch_offline(config, PlainReporter()))
    while not (runs := list_runs(tmp_path / "runs")) or not runs[0].metrics("supervised"):  # noqa: ASYNC110  files tell nobody
        await asyncio.sleep(0.05)
    assert await asyncio.to_thread(main, ["runs", "save", str(runs[0].path)]) == 0
    assert "loadable model" in capsys.readouterr().out
    (checkpoint,) = runs[0].checkpoints()
    assert (checkpoint / "hf" / "model.safetensors").exists()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    runs[0].log("end", {"step": 1, "stopped": True})
    assert await asyncio.to_thread(main, ["runs", "save", str(runs[0].path)]) == 2
    assert "has ended; its newest checkpoint is" in capsys.readouterr().err
    assert not (runs[0].path / "save-now").exists()
