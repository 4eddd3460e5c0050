import json

import pytest

from miles.errors import ConfigError, RunError
from miles.runs import RunFolder, list_runs
from tests.trees import episode


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "demo")


def test_what_is_written_is_read_back(folder):
    folder.log("step", {"step": 1, "reward/mean": 0.5})
    folder.log("eval", {"step": 1})
    folder.write_episode("train-v0", episode(1.0))
    folder.write_episode("train-v0", episode(0.0, index=1))
    assert [line["kind"] for line in folder.metrics()] == ["step", "eval"]
    assert folder.metrics("step")[0]["reward/mean"] == 0.5
    assert list(folder.episodes("train-*")) == [episode(1.0), episode(0.0, index=1)]


def test_two_runs_in_the_same_second_have_their_own_folders(tmp_path):
    one, two = RunFolder.create(tmp_path, "demo"), RunFolder.create(tmp_path, "demo")
    assert one.path != two.path


def test_a_line_cut_by_a_crash_is_left_out(folder):
    folder.log("step", {"step": 1})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    assert len(folder.metrics()) == 1
    folder.log("resume", {"step": 1})
    assert [line["kind"] for line in folder.metrics()] == ["step", "resume"]


def test_what_a_resumed_run_does_again_counts_once(folder):
    for step in (1, 2, 3):
        folder.log("step", {"step": step, "try": 1})
    folder.log("resume", {"step": 1})
    folder.log("step", {"step": 2, "try": 2})
    assert [(line["step"], line["try"]) for line in folder.metrics("step")] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes/train.jsonl"])
def test_a_full_disk_is_a_clear_stop(folder, name):
    (folder.path / name).symlink_to("/dev/full")
    with pytest.raises(RunError, match=rf"cannot write .*{name}: No space left on device; free some space.*--resume"):
        folder.log("step", {}) if name == "metrics.jsonl" else folder.write_episode("train", episode(1.0))


def test_a_checkpoint_counts_only_when_it_is_whole_and_old_ones_go(folder):
    for step in (5, 10, 15):
        partial = folder.new_checkpoint(step)
        (partial / "weights").write_text("w")
        if step < 15:
            folder.finish_checkpoint(partial, {"step": step}, keep=1)
    (only,) = folder.checkpoints()
    assert (only.name, json.loads((only / "state.json").read_text())) == ("step-000010", {"step": 10})


def test_a_folder_that_is_no_run_or_cannot_be_made(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"set run\.root to a writable folder"):
        RunFolder.create(tmp_path / "file", "demo")


def test_runs_are_listed_oldest_first(tmp_path):
    names = []
    for name in ("a", "b"):
        run = RunFolder.create(tmp_path, name)
        run.write_config("")
        names.append(run.path.name)
    assert [run.path.name for run in list_runs(tmp_path)] == names
