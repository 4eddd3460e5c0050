import json

from miles.cli.main import main
from miles.runs import RunFolder
from miles.trajectories import open_trajectories
from tests.trees import episode


def test_verify_prints_a_table_and_json(model, capsys):
    assert main(["session", "verify", "--model", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "family qwen3" in shown
    assert "typed control tokens" in shown
    assert "FAILED" not in shown
    assert main(["session", "verify", "--model", str(model), "--json", "--thinking"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["checks"])) == (True, 10)
    assert all(check["ok"] for check in told["checks"])


def test_verify_fails_when_a_token_is_lost(model, capsys, monkeypatch):
    from miles.rollout.rendering.rendering import Rendering

    honest = Rendering.bridge

    def lossy(self, *arguments):
        ids = honest(self, *arguments)
        return ids and ids[1:]

    monkeypatch.setattr(Rendering, "bridge", lossy)
    monkeypatch.setattr("miles.rollout.session.recorder.Recorder.attach", lambda self, match, prompt: (0, []))
    assert main(["session", "verify", "--model", str(model)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_verify_of_a_directory_without_tokenizer_says_so(tmp_path, capsys):
    assert main(["session", "verify", "--model", str(tmp_path)]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_export_writes_the_trees_of_a_run(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_config("")
    folder.write_episode("train-000001", episode(1.0))
    folder.write_episode("eval-000001", episode(0.0))
    out = tmp_path / "out.jsonl"
    assert main(["session", "export", str(folder.path), "--pattern", "train-*", "--output", str(out)]) == 0
    with open_trajectories(out) as read:
        assert [trajectory.reward for trajectory in read] == [1.0]
    assert main(["session", "export", folder.path.name, "--root", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["session", "export", str(folder.path), "--pattern", "none-*"]) == 2
    assert "no episodes that match 'none-*'" in capsys.readouterr().err
