"""Exactness under fire: random interleavings of everything that goes wrong, checked against the engine's own log."""

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from miles.errors import EngineError, EngineLost, MilesError
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.session import ChatRequest, Session
from miles.types import Edge, Finish, Generated, Limits

FAULTS = ["none", "length", "abort", "abort_empty", "error", "lost", "short_logprobs", "no_ids", "new_weights"]


class Engine:
    """Answers when told to; keeps what it was asked and what it really gave."""

    context_length = 4096

    def __init__(self, rendering):
        self.rendering, self.version = rendering, 0
        self.waiting, self.given, self.asked = {}, {}, {}

    def release(self, session):
        pass

    async def generate(self, request, on_tokens=None):
        gate = asyncio.get_running_loop().create_future()
        self.waiting[request.id] = gate
        self.asked[request.id] = list(request.prompt_ids)
        began = self.version
        try:
            fault, word = await gate
        finally:
            self.waiting.pop(request.id, None)
        return self._answer(request, fault, word, began)

    def _answer(self, request, fault, word, began):
        if fault in ("error", "lost"):
            raise EngineError("boom") if fault == "error" else EngineLost("gone")
        ids = tuple(self.rendering.encode(f"answer {word}<|im_end|>"))
        finish = {"length": Finish.LENGTH, "abort": Finish.ABORT, "abort_empty": Finish.ABORT}.get(fault, Finish.STOP)
        ids = () if fault in ("abort_empty", "no_ids") else ids[:-1] if fault in ("length", "abort") else ids
        logprobs = tuple(-1.0 / (2 + place + len(self.given)) for place in range(len(ids)))
        half = len(ids) // 2 if fault == "new_weights" else len(ids)
        versions = (*(began,) * half, *(began + 1,) * (len(ids) - half))
        if fault == "new_weights":
            self.version = began + 1
        if fault == "short_logprobs":
            logprobs = logprobs[:-1]
        good = fault not in ("short_logprobs", "no_ids")
        answer = Generated(output_ids=ids, logprobs=logprobs, versions=versions, finish=finish)
        if good:
            self.given[request.id] = answer
        return answer


class Fire(RuleBasedStateMachine):
    rendering = None

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = Engine(self.rendering)
        self.session = Session(
            self.engine, self.rendering, SessionConfig(grace_s=0), limits=Limits(turns=200), max_tokens=64
        )
        self.tasks, self.answers = [], []

    def settle(self, turns=6):
        async def pause():
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pause())

    def ask(self, messages, *, received=True):
        async def run():
            done = await self.session.complete(ChatRequest(messages=tuple(messages)))
            if received:
                done.delivered()
                self.answers.append(([*messages], done.message))
            return done

        self.tasks.append(self.loop.create_task(run()))
        self.settle()

    @rule(word=st.sampled_from("ab"), received=st.booleans())
    def start(self, word, received):
        self.ask([{"role": "user", "content": f"open {word}"}], received=received)

    @rule(pick=st.integers(0, 50), word=st.sampled_from("ab"), way=st.sampled_from(["same", "parts", "edited"]))
    def go_on(self, pick, word, way):
        if not self.answers:
            return
        messages, answer = self.answers[pick % len(self.answers)]
        if way == "parts":
            answer = {**answer, "content": [{"type": "text", "text": answer["content"]}], "index": 0}
        if way == "edited":
            answer = {**answer, "content": answer["content"] + " changed"}
        self.ask([*messages, answer, {"role": "user", "content": f"and {word}"}])

    @rule(pick=st.integers(0, 50))
    def ask_again(self, pick):
        if self.answers:
            self.ask(self.answers[pick % len(self.answers)][0])

    @rule(pick=st.integers(0, 50), fault=st.sampled_from(FAULTS), word=st.sampled_from("xyz"))
    def answer_one(self, pick, fault, word):
        if self.engine.waiting:
            gates = list(self.engine.waiting.values())
            gate = gates[pick % len(gates)]
            if not gate.done():
                gate.set_result((fault, word))
            self.settle()

    @rule(pick=st.integers(0, 50))
    def client_goes_away(self, pick):
        if self.tasks:
            self.tasks[pick % len(self.tasks)].cancel()
            self.settle()

    @invariant()
    def every_token_is_the_engines(self):
        tree = self.session.tree()
        for turn, record in zip(tree.turns, self.session.recorder.records.all, strict=True):
            path = tree.path(turn.id)
            above = [i for t in path[:-1] for i in (*t.prompt_ids, *t.output_ids)]
            assert [*above, *turn.prompt_ids] == self.engine.asked[record.token]
            given = self.engine.given.get(record.token)
            if given is None:
                assert (turn.output_ids, turn.note) == ((), "aborted")
                continue
            assert (turn.output_ids, turn.logprobs, turn.versions) == (
                given.output_ids,
                given.logprobs,
                given.versions,
            )
            assert turn.trainable == (record.delivered and not record.superseded and given.finish is not Finish.ABORT)
            assert turn.parent is None or turn.parent < turn.id
        committed = {record.token for record in self.session.recorder.records.all}
        assert {token for token in self.engine.given if token not in committed} == set()
        superseded = [t for t in tree.turns if t.note == "superseded"]
        assert all(any(o.edge is Edge.RETRY and o.id > t.id for o in tree.turns) for t in superseded)

    def teardown(self):
        try:
            self.end()
        finally:
            self.loop.close()

    def end(self):
        tree = self.loop.run_until_complete(asyncio.wait_for(self.session.close(), 5))
        self.every_token_is_the_engines()
        assert replace(tree) == self.session.tree()

        async def ended():
            return await asyncio.gather(*self.tasks, return_exceptions=True)

        outcomes = self.loop.run_until_complete(ended())
        bad = [o for o in outcomes if isinstance(o, Exception) and not isinstance(o, MilesError)]
        assert bad == []
        assert self.engine.waiting == {}


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_no_interleaving_loses_or_changes_a_token(rendering, examples):
    Fire.rendering = rendering
    chosen = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Fire, settings=chosen)
