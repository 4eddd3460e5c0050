"""Who gets which GPU, and what cannot be placed."""

import pytest

from miles.cli.main import main
from miles.errors import ConfigError
from miles.recipes.config import load_recipe
from miles.recipes.placement import place, what_is_missing


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch):
    monkeypatch.setattr("miles.recipes.placement.gpus_here", lambda: 2)


def config(*overrides, recipe="quickstart"):
    return load_recipe(recipe, ["engine.name=sglang", *overrides])


def test_trainer_and_server_share_a_gpu_only_when_told_how():
    with pytest.raises(ConfigError, match=r"share a GPU: say with engine\.sglang\.memory=0\.3"):
        place(config())
    shared = place(config("engine.sglang.memory=0.3"))
    assert (shared.trainer, shared.engines, shared.shared) == ((0,), ((0,),), True)
    apart = place(config("engine.sglang.gpus=[1]"))
    assert (apart.engines, apart.shared) == (((1,),), False)
    assert apart.lines() == ["trainer: 1 ranks on node 0: GPU 0", "sglang-0: 1 GPUs, node 0: GPU 1"]


def test_nccl_is_not_asked_to_connect_two_processes_on_one_gpu():
    sends = ("publish.kind=broadcast", "publish.backend=nccl")
    with pytest.raises(ConfigError, match=r"on GPU 0: give the servers others with engine\.sglang\.gpus"):
        place(config("engine.sglang.memory=0.3", *sends))
    assert not place(config("engine.sglang.gpus=[1]", *sends)).shared
    assert place(config("engine.sglang.memory=0.3", sends[0], "publish.backend=gloo")).shared


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="needs 3 GPUs, and 1 nodes have 2 each"):
        place(config("engine.sglang.gpus=[2]"))
    torn = ["engine.sglang.tp=2", "engine.sglang.gpus=[3,4]", "cluster.nodes=2", "cluster.gpus_per_node=4"]
    with pytest.raises(ConfigError, match="sglang-0 has 2 GPUs on 2 nodes, not all of each"):
        place(config(*torn))
    monkeypatch.setattr("miles.recipes.placement.gpus_here", lambda: 0)
    assert place(config("engine.sglang.gpus=[7]")) is None


@pytest.mark.parametrize(
    ("recipe", "servers", "missing"),
    [
        ("smollm2-h200", [1], ""),
        ("qwen3-4b-1node", [1] * 4, "it needs 8 GPUs, and this machine has 2"),
        ("glm-64gpu", [8] * 4, "its trainer ranks are on several nodes"),
    ],
)
def test_recipes_say_where_they_run(recipe, servers, missing):
    found = config(recipe=recipe)
    assert [len(gpus) for gpus in place(found).engines] == servers
    assert missing in what_is_missing(found)
    assert bool(missing) == bool(what_is_missing(found))


def test_a_dry_run_tells_the_placement_and_a_launch_what_is_missing(model, capsys):
    assert main(["launch", "glm-64gpu", "--dry-run", f"model.path={model}"]) == 0
    told = capsys.readouterr().out
    assert "# sglang-3: 8 GPUs, node 14: GPU 0, 1, 2, 3; node 15: GPU 0, 1, 2, 3" in told
    assert main(["launch", "qwen3-4b-1node", f"model.path={model}"]) == 2
    assert "cannot be launched here: it needs 8 GPUs" in capsys.readouterr().err
