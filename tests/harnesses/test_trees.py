"""Sub-agents and compaction of real programs: edges, rows that own each sampled token once, and a step on them."""

import asyncio
from collections import Counter

import pytest

from miles.errors import HarnessError
from miles.recipes.harnesscheck import Player, benching
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.session.config import SessionConfig
from miles.trainer.data.batch import normalize
from miles.trainer.data.rows import tree_rows
from miles.trainer.settings import BackendConfig, OptimConfig, StepSpec
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.trajectories import Trajectory
from miles.types import Edge, Finish, Scored

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

LOOK = {"run": "cat total.py"}
MEND = {
    "run": """python3 -c 's = open("total.py").read(); open("total.py", "w").write(s.replace("last)", "last + 1)"))'"""
}
ERRAND = "Read total.py and say in one sentence which number its range leaves out."
FOUND = "Its range leaves out the last number."
SUMMARY = "The sum of total.py misses the last number; nothing is mended yet."
SPAWNS = {
    "claude-code": ("Agent", {"description": "Look", "prompt": ERRAND, "subagent_type": "general-purpose"}),
    "codex": ("spawn_agent", {"message": ERRAND}),
    "qwen-code": ("agent", {"description": "Look", "prompt": ERRAND, "subagent_type": "general-purpose"}),
    "opencode": ("task", {"description": "Look", "prompt": ERRAND, "subagent_type": "general"}),
    "kimi-code": ("Agent", {"description": "Look", "prompt": ERRAND}),
}
SOLVED = Scored(reward=1.0, parts={"checks": 1.0})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model that takes the ids of any text, and long rows."""
    directory = tmp_path_factory.mktemp("tiny")
    config = TinyModelConfig(hidden=32, layers=1, context=1 << 17)
    make_tiny_model(directory, config, seed=0, words=[], tools=[], example=[{"role": "user", "content": "hello"}])
    return directory


async def play(name, settings, scripts, *, context=1 << 20, max_tokens=4096, **player):
    """(Episode, the session's report) of the terminal task `python-sum-range`."""
    try:
        async with benching(name, settings) as bench:
            scripted = Player(bench.trial, {**scripts, "*": [*scripts["*"], bench.trial.finish]}, **player)
            session = SessionConfig(drain_s=5.0, train_compaction=True)
            episode = await bench.play(scripted, session=session, context=context, max_tokens=max_tokens)
            return episode, bench.sessions[-1].report()
    except HarnessError as error:
        if "cannot be installed" in str(error):
            pytest.skip(str(error))
        raise


def lines(tree):
    """How many turns each conversation has, and how its branches begin."""
    begun = [turn.edge.value for turn in tree.turns if turn.edge is not Edge.EXTEND]
    return Counter(tree.line(turn.id) for turn in tree.turns), begun


async def train_once(episode, tiny, tmp_path):
    """Each trainable token is owned by exactly one row of the exported tree, and a step on the rows trains all."""
    tree = Trajectory.from_line(Trajectory.of_episode(episode).to_line()).tree
    assert tree == episode.tree
    rows = tree_rows(tree)
    sampled = sum(len(turn.output_ids) for turn in tree.turns if turn.trainable)
    assert sum(row.n_owned for row in rows) == sampled > 0
    scaled = normalize(rows, {"": sampled}, unit="episode", constant=1.0)
    async with Trainer(tiny, tmp_path, TrainerConfig(ranks=0, compute=BackendConfig(micro_tokens=1 << 17))) as trainer:
        metrics = await trainer.step(scaled, StepSpec(loss="policy", version=1), OptimConfig(lr=1e-3))
    assert metrics["tokens/trained"] == sampled


@pytest.mark.parametrize(
    "name, settings",
    [
        ("claude-code", {"tools": "Agent,Bash"}),
        ("claude-code", {"tools": "Agent,Bash", "background": True}),
        ("codex", {"subagents": True, "bare": True}),
        ("qwen-code", {}),
        ("opencode", {"bare": True}),
        ("kimi-code", {}),
    ],
    ids=["claude-code", "claude-code-background", "codex", "qwen-code", "opencode", "kimi-code"],
)
async def test_a_sub_agent_is_a_branch_of_the_call_that_started_it(name, settings, tiny, tmp_path):
    tool, arguments = SPAWNS[name]
    spawn = {"tool": tool, "arguments": arguments}
    episode, _ = await play(name, settings, {ERRAND: [LOOK, FOUND], "*": [spawn, MEND]})
    assert episode.outcome == SOLVED, episode.log[-20:]
    tree = episode.tree
    counts, begun = lines(tree)
    assert counts["subagent"] == 2
    assert set(counts) == {"main", "subagent"}
    assert begun == ["root", "subagent"]
    child = next(turn for turn in tree.turns if turn.edge is Edge.SUBAGENT)
    spawner = tree.turns[child.origin if child.origin is not None else child.parent]
    assert spawner.id == 0
    assert spawner.message["tool_calls"][0]["function"]["name"] == tool
    if name in ("claude-code", "opencode"):
        await train_once(episode, tiny, tmp_path)


async def test_a_parent_that_ends_before_its_child_leaves_an_untrained_turn(tiny, tmp_path):
    async def before(number, prompt):
        if ERRAND in prompt.partition("<|im_start|>assistant")[0] and FOUND not in prompt and "cat total.py" in prompt:
            await asyncio.sleep(60)

    tool, arguments = SPAWNS["codex"]
    scripts = {ERRAND: [LOOK, FOUND], "*": [{"tool": tool, "arguments": arguments}, MEND]}
    episode, _ = await play("codex", {"subagents": True, "bare": True}, scripts, before=before)
    assert episode.outcome == SOLVED, episode.log[-20:]
    assert episode.timings["agent"] < 30
    left = episode.tree.turns[-1]
    assert episode.tree.line(left.id) == "subagent"
    assert (left.finish, left.trainable) == (Finish.ABORT, False)
    await train_once(episode, tiny, tmp_path)


FLOOD = {"run": "seq 1 700"}
COMPACTING = {
    "claude-code": ({"bare": True, "tools": "Bash", "compact_percent": 8}, 100_000, 4096),
    "codex": ({"bare": True, "compact_at": 16_000}, 100_000, 4096),
    "opencode": ({"bare": True}, 20_000, 1500),
}


@pytest.mark.parametrize("name", COMPACTING)
async def test_compaction_is_a_branch_and_the_work_goes_on_from_its_summary(name, tiny, tmp_path):
    settings, context, max_tokens = COMPACTING[name]
    told = f"<summary>{SUMMARY}</summary>"
    asks = ["CRITICAL: Respond with TEXT ONLY", "a CONTEXT CHECKPOINT COMPACTION", "<conversation>"]
    goes_on = [MEND, "The task is done."]
    scripts = {SUMMARY: goes_on, "What did we do so far?": goes_on, "*": [LOOK, FLOOD, FLOOD, FLOOD, FLOOD, FLOOD]}
    episode, _ = await play(
        name, settings, scripts, context=context, max_tokens=max_tokens, tails=dict.fromkeys(asks, told), aside=told
    )
    assert episode.outcome == SOLVED, episode.log[-20:]
    tree = episode.tree
    counts, begun = lines(tree)
    assert counts["compaction"] == 1
    assert set(counts) == {"main", "compaction"}
    assert begun == ["root", "compaction_request", "compacted"]
    request, after = (
        next(t for t in tree.turns if t.edge is edge) for edge in (Edge.COMPACTION_REQUEST, Edge.COMPACTED)
    )
    assert after.origin == request.id
    assert SUMMARY in request.message["content"]
    await train_once(episode, tiny, tmp_path)
