"""Admission, staleness, retries and the cursor, with episodes that end when the test says so."""

import asyncio
from dataclasses import replace

import pytest

from miles.errors import RunError
from miles.rollout.evaluation import EvalConfig, SharedEvaluator
from miles.rollout.scheduler import AsyncRollout, RolloutConfig
from miles.types import Discarded, Edge, Faulted, Finish, Scored, Task, Tree, Turn
from tests.trees import episode


class Runner:
    """Finishes each episode at once, or when `gate` opens; `outcomes` are taken in order."""

    def __init__(self, outcomes=(), gated=False):
        self.jobs, self.outcomes, self.version = [], list(outcomes), 0
        self.gate = asyncio.Event()
        self.running = self.most = 0
        if not gated:
            self.gate.set()

    def metrics(self):
        return {"sandbox/alive": 0.0}

    async def run(self, job):
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        version = self.version
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else Scored(reward=1.0)
        turn = Turn(
            id=0,
            parent=None,
            edge=Edge.ROOT,
            messages=(),
            message={},
            prompt_ids=(1,),
            output_ids=(2,),
            logprobs=(-1.0,),
            versions=(version,),
            finish=Finish.STOP,
        )
        one = episode(outcome, tree=Tree(turns=(turn,)), group=job.group_id, index=job.index)
        return replace(one, task_id=job.task.id)


def tasks(n):
    return [Task(id=f"t{i}", prompt=()) for i in range(n)]


@pytest.fixture
async def rollout_of():
    made = []

    def make(runner, n_tasks=10, state=None, version=0, **settings):
        config = RolloutConfig(**{"groups_per_step": 2, "group_size": 2, "max_episodes": 4, **settings})
        made.append(AsyncRollout(tasks(n_tasks), runner, config, state=state, version=version))
        return made[-1]

    yield make
    for rollout in made:
        await rollout.close()


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


async def test_groups_come_once_each_in_the_order_they_finished(rollout_of):
    rollout = rollout_of(Runner(), max_staleness=1)
    first = await rollout.take(2)
    rollout.advance(1)
    second = await rollout.take(2)
    assert [g.seq for g in first + second] == [0, 1, 2, 3]
    assert [[e.index for e in g.episodes] for g in first] == [[0, 1], [0, 1]]
    assert len({g.id for g in first + second}) == 4


@pytest.mark.parametrize("lag", [0, 1, 3])
async def test_no_more_is_admitted_than_the_staleness_bound_allows(rollout_of, lag):
    runner = Runner()
    rollout = rollout_of(runner, max_staleness=lag, max_episodes=100)
    rollout.start()
    for version in range(5):
        rollout.advance(version)
        await settle()
        assert len(runner.jobs) == (version + lag + 1) * 2 * 2


async def test_strictly_on_policy_alternates_without_deadlock_and_never_trains_old_tokens(rollout_of):
    runner = Runner()
    rollout = rollout_of(runner, max_staleness=0)
    for version in range(6):
        groups = await asyncio.wait_for(rollout.take(2), 2)
        assert {t.versions for g in groups for e in g.episodes for t in e.tree.turns} == {(version,)}
        runner.version = version + 1
        rollout.advance(version + 1)


async def test_two_versions_at_once_open_the_gate_for_two(rollout_of):
    runner = Runner()
    rollout = rollout_of(runner, max_staleness=0, max_episodes=100)
    rollout.start()
    await settle()
    rollout.advance(2)
    await settle()
    assert len(runner.jobs) == 3 * 2 * 2


async def test_a_finished_episode_frees_its_slot_at_once(rollout_of):
    runner = Runner(gated=True)
    rollout = rollout_of(runner, max_episodes=3, max_staleness=9)
    rollout.start()
    await settle()
    assert len(runner.jobs) == 3
    runner.gate.set()
    await rollout.take(2)
    assert runner.most == 3


async def test_a_discarded_episode_is_tried_afresh_and_counted(rollout_of):
    runner = Runner([Discarded(reason="sandbox"), Scored(reward=0.5)])
    rollout = rollout_of(runner)
    (group, _) = await rollout.take(2)
    assert sorted(job.attempt for job in runner.jobs[:4] if job.group_id == group.id) in ([0, 0, 1], [0, 0])
    counts = rollout.counters()
    assert counts["outcome/discarded"] == counts["discarded/sandbox"] == 1
    assert all(e.reward is not None for e in group.episodes)
    assert rollout.counters()["total/discarded"] == 1


async def test_a_group_left_with_too_few_is_dropped_and_replaced(rollout_of):
    outcomes = [Discarded(reason="sandbox")] * 2
    rollout = rollout_of(Runner(outcomes), retries=0, min_group=2, max_episodes=2)
    groups = await rollout.take(2)
    assert [g.seq for g in groups] == [1, 2]
    assert rollout.counters()["groups_dropped"] == 1


async def test_a_group_with_one_loss_goes_on_without_it(rollout_of):
    outcomes = [Scored(reward=1.0), Discarded(reason="x"), Faulted(reason="crash")]
    rollout = rollout_of(Runner(outcomes), group_size=3, retries=0, max_episodes=1)
    (group, _) = await rollout.take(2)
    assert [e.reward for e in group.episodes] == [1.0, 0.0]


def admitted(rollout):
    """Tasks that were begun and not trained, whether they are kept or must be run again."""
    state = rollout.state()
    done = [group.seq for group in state["groups"] if group.id not in state["unfinished"]]
    return sorted(done + state["pending"] + [g.seq for g in state["groups"] if g.id in state["unfinished"]])


async def test_a_straggler_that_became_too_old_is_retried_or_kept_or_dropped(rollout_of):
    for policy, taken, pending in (("retry", [2, 3], [0, 1]), ("drop", [2, 3], [4, 5]), ("keep", [0, 1], [2, 3])):
        runner = Runner()
        rollout = rollout_of(runner, max_staleness=0, on_stale=policy)
        rollout.start()
        await settle()
        runner.version = 1
        rollout.advance(1)  # nobody took the groups of version 0 while it was current
        groups = await asyncio.wait_for(rollout.take(2), 2)
        await settle()
        seqs = sorted(g.seq for g in groups)
        assert (seqs, admitted(rollout)) == (taken, sorted(taken + pending))
        await rollout.close()


async def test_tokens_that_are_trained_are_never_older_than_the_bound(rollout_of):
    runner = Runner()
    rollout = rollout_of(runner, max_staleness=1)
    for version in range(8):
        groups = await asyncio.wait_for(rollout.take(2), 2)
        ages = [version - v for g in groups for e in g.episodes for t in e.tree.turns for v in t.versions]
        assert max(ages) <= 1
        runner.version = version + 1
        rollout.advance(version + 1)


async def test_a_full_buffer_holds_new_tasks_back_but_not_episodes_in_flight(rollout_of):
    runner = Runner(gated=True)
    rollout = rollout_of(runner, max_staleness=1, max_episodes=100)
    rollout.start()
    await settle()
    admitted = len(runner.jobs)
    runner.gate.set()
    await settle()
    assert (len(runner.jobs), admitted) == (8, 8)
    assert rollout.now()["buffered_groups"] == 4


async def test_the_order_of_tasks_is_the_same_however_often_it_is_interrupted(rollout_of):
    expected = []
    runner = Runner()
    whole = rollout_of(runner, n_tasks=5, max_staleness=0)
    for version in range(6):
        runner.version = version
        expected += [(g.seq, g.task_id) for g in await whole.take(2)]
        whole.advance(version + 1)
    seen, state = [], None
    for version in range(6):
        runner.version = version
        part = rollout_of(runner, n_tasks=5, max_staleness=1, state=state, version=version)
        seen += [(g.seq, g.task_id) for g in await part.take(2)]
        part.trained()
        part.advance(version + 1)
        state = part.state()
        await part.close()
    assert sorted(seen) == sorted(expected)
    assert len({seq for seq, _ in seen}) == 12
    assert {task for _, task in expected[:5]} == {"t0", "t1", "t2", "t3", "t4"}


async def test_what_take_was_cancelled_with_is_not_lost(rollout_of):
    rollout = rollout_of(Runner(), max_staleness=0)
    taking = asyncio.create_task(rollout.take(3))  # only two can come
    await settle()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert admitted(rollout) == [0, 1]
    assert len(await rollout.take(2)) == 2


async def test_groups_that_a_failed_step_was_given_come_back_on_resume_as_they_were(rollout_of):
    rollout = rollout_of(Runner(), max_staleness=0)
    given = await rollout.take(2)
    state = rollout.state()
    assert (state["next"], state["groups"]) == (2, given)
    runner = Runner()
    again = rollout_of(runner, max_staleness=0, state=state)
    assert await again.take(2) == given
    assert runner.jobs == []
    rollout.trained()  # the step is done, whether its weights can be published or not
    assert rollout.state()["groups"] == []


async def test_a_group_that_was_half_done_goes_on_with_the_episodes_it_lacks(rollout_of):
    runner = Runner(gated=True)
    rollout = rollout_of(runner, max_staleness=0, group_size=4, max_episodes=3)
    rollout.start()
    await settle()
    runner.gate.set()  # three of the first four episodes end, then everything else
    runner.gate.clear()
    await settle()
    state = rollout.state()
    done = {group.id: [episode.index for episode in group.episodes] for group in state["groups"]}
    second = Runner()
    resumed = rollout_of(second, max_staleness=0, group_size=4, state=state)
    groups = await resumed.take(2)
    assert sorted(g.seq for g in groups) == [0, 1]
    assert all([e.index for e in g.episodes] == [0, 1, 2, 3] for g in groups)
    ran = {(job.group_id, job.index) for job in second.jobs}
    assert not ran & {(name, index) for name, indices in done.items() for index in indices}


async def test_a_half_done_group_of_smaller_groups_is_done_and_one_of_other_tasks_begins_again(rollout_of):
    runner = Runner(gated=True)
    rollout = rollout_of(runner, max_staleness=0, group_size=4, max_episodes=3)
    rollout.start()
    await settle()
    runner.gate.set()
    runner.gate.clear()
    await settle()
    state = rollout.state()
    smaller = rollout_of(Runner(), max_staleness=0, group_size=3, state=state)
    groups = await asyncio.wait_for(smaller.take(2), 2)
    assert sorted((g.seq, len(g.episodes)) for g in groups) == [(0, 3), (1, 3)]
    second = Runner()
    others = rollout_of(second, n_tasks=7, max_staleness=0, group_size=4, state=state)
    for group in await asyncio.wait_for(others.take(2), 2):
        assert len({episode.task_id for episode in group.episodes}) == 1


async def test_when_no_group_has_a_difference_the_run_says_so(rollout_of):
    rollout = rollout_of(Runner(), drop_without_difference=True, discard_limit=5)
    with pytest.raises(RunError, match="5 groups in a row had equal rewards"):
        await asyncio.wait_for(rollout.take(2), 5)


async def test_groups_without_difference_are_replaced_when_asked(rollout_of):
    outcomes = [Scored(reward=1.0), Scored(reward=1.0), Scored(reward=1.0), Scored(reward=0.0)]
    rollout = rollout_of(Runner(outcomes * 10), max_episodes=1, max_staleness=0, drop_without_difference=True)
    groups = await rollout.take(2)
    assert [g.seq for g in groups] == [1, 3]
    assert rollout.counters()["groups_replaced"] == 2


async def test_an_episode_that_cancels_itself_stops_the_run_instead_of_hanging_it(rollout_of):
    class Cancels(Runner):
        async def run(self, job):
            raise asyncio.CancelledError

    with pytest.raises(RunError, match="cancelled from within"):
        await asyncio.wait_for(rollout_of(Cancels()).take(2), 2)


async def test_one_engine_death_does_not_end_the_run(rollout_of):
    outcomes = [Discarded(reason="engine")] * 64
    rollout = rollout_of(Runner(outcomes), max_episodes=64, max_staleness=15, discard_limit=64)
    assert len(await asyncio.wait_for(rollout.take(2), 2)) == 2


async def test_endless_discards_stop_the_run_with_the_reason(rollout_of):
    outcomes = [Discarded(reason="sandbox", detail="no space left")] * 100
    rollout = rollout_of(Runner(outcomes), discard_limit=10, retries=1)
    with pytest.raises(RunError, match="10 episodes in a row were discarded, last for 'sandbox': no space left"):
        await asyncio.wait_for(rollout.take(2), 2)


async def test_engines_that_never_catch_up_stop_the_run(rollout_of):
    rollout = rollout_of(Runner(), max_staleness=0, discard_limit=5)
    rollout.advance(7)  # the runner goes on sampling with version 0
    with pytest.raises(RunError, match=r"5 groups in a row were too old \(version 0 at 7\).*max_staleness"):
        await asyncio.wait_for(rollout.take(2), 5)


async def test_an_error_of_the_recorder_reaches_whoever_waits(rollout_of):
    def full(episode):
        raise RunError("disk full")

    rollout = AsyncRollout(tasks(3), Runner(), RolloutConfig(groups_per_step=1, group_size=2), on_episode=full)
    with pytest.raises(RunError, match="disk full"):
        await asyncio.wait_for(rollout.take(1), 2)
    await rollout.close()


async def test_evaluation_pauses_training_and_names_its_version(rollout_of):
    runner = Runner()
    rollout = rollout_of(runner, max_staleness=0)
    rollout.start()
    await settle()
    before = len(runner.jobs)
    runner.version = 7
    runner.outcomes = [Scored(reward=1.0), Discarded(reason="x"), Faulted(reason="y"), Scored(reward=0.5)]
    evaluator = SharedEvaluator(tasks(5), runner, rollout.paused, EvalConfig(tasks=3, concurrency=1))
    result = await evaluator.evaluate(7)
    assert (result["version"], result["reward"], result["episodes"], result["mixed"]) == (7, 0.5, 3, 0)
    assert result["outcomes"] == {"scored": 2, "faulted": 1}
    assert len(runner.jobs) == before + 4
    runner.version = 8
    assert (await evaluator.evaluate(7))["mixed"] == 3


def test_a_taskset_without_tasks_is_refused():
    with pytest.raises(RunError, match="no training tasks"):
        AsyncRollout([], Runner())
