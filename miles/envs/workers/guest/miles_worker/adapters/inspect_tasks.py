"""inspect-ai: samples of a task, played by its own solver and judged by its own scorers. Settings: file, task, args.

`eval_async` runs once at a time in a process, so a sample is run here as inspect itself runs it, in contexts of its
own. That uses modules that inspect does not promise: the version is bounded where it is installed."""

import asyncio
import contextlib
import math
import os
import time

os.environ.update(INSPECT_DISPLAY="none", INSPECT_LOG_LEVEL="critical", INSPECT_EVAL_CTL_SERVER="false")
for _name in ("INSPECT_TELEMETRY", "INSPECT_API_KEY_OVERRIDE", "INSPECT_REQUIRED_HOOKS"):
    os.environ.pop(_name, None)

import anyio
from inspect_ai._eval.context import init_eval_context, init_task_context
from inspect_ai._eval.loader import load_tasks
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.run import resolve_plan
from inspect_ai._eval.task.sandbox import sandboxenv_context
from inspect_ai._eval.task.util import sample_messages
from inspect_ai._util.notgiven import NOT_GIVEN
from inspect_ai._util.working import init_sample_working_time
from inspect_ai.log._samples import active_sample
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import GenerateConfig, ModelName, get_model
from inspect_ai.model._assistant_internal import init_sample_assistant_internal
from inspect_ai.model._model import init_sample_model_data
from inspect_ai.scorer import Target, value_to_float
from inspect_ai.scorer._score import init_scoring_context
from inspect_ai.scorer._scorer import unique_scorer_name
from inspect_ai.solver import TaskState
from inspect_ai.solver._fork import set_task_generate
from inspect_ai.solver._task_state import sample_state, set_sample_state
from inspect_ai.util._display import init_display_type
from inspect_ai.util._limit import LimitExceededError
from inspect_ai.util._store import init_subtask_store
from miles_worker.protocol import Failure

# The recipe decides how the policy is sampled.
_SAMPLING = dict.fromkeys(
    (
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "seed",
        "stop_seqs",
        "frequency_penalty",
        "presence_penalty",
        "logprobs",
    )
)


def make(settings):
    init_display_type("none")
    init_eval_context("critical", "critical", False, max_subprocesses=None, task_group=None)
    return Inspect(**settings)


class Inspect:
    """Samples are tasks."""

    def __init__(self, file, task="", args=None, layer="agent"):
        wanted = f"{file}@{task}" if task else file
        found = load_tasks([wanted], dict(args or {}))
        if len(found) != 1:
            names = ", ".join(one.name for one in found)
            raise Failure(f"{wanted} has {len(found)} tasks ({names}): choose one as file.py@task", "task")
        self.task = found[0]
        self.samples = list(self.task.dataset)

    def about(self):
        return {"name": self.task.name, "layer": "agent", "splits": {"train": len(self.samples)}}

    def tasks(self, split, start, stop):
        return [
            {
                "id": f"{split}/{sample.id if sample.id is not None else start + n}",
                "prompt": _prompt(sample),
                "data": {"index": start + n},
            }
            for n, sample in enumerate(self.samples[start:stop])
        ]

    def gold(self, task):
        target = self.samples[task["index"]].target
        target = target if isinstance(target, str) else target[0] if target else ""
        return {"answer": f"ANSWER: {target}"} if target else None

    async def play(self, task, seed, host):
        return Sample(self.task, self.samples[task["index"]].model_copy(deep=True), task["index"])


class Sample:
    """One run of one sample."""

    def __init__(self, task, sample, index):
        self.task, self.sample, self.scores = task, sample, None
        if sample.id is None:
            sample.id = index + 1

    async def reset(self):
        return {"messages": [{"role": "user", "content": _prompt(self.sample)}]}

    async def run(self, endpoint, timeout_s):
        model = get_model(
            f"openai-api/miles/{endpoint['model']}",
            base_url=endpoint["base_url"],
            api_key=endpoint["api_key"],
            memoize=False,
            max_retries=2,
        )
        try:  # a task of its own: inspect keeps all in context variables
            self.scores = await asyncio.wait_for(asyncio.ensure_future(_run(self.task, self.sample, model)), timeout_s)
        except TimeoutError:
            raise Failure(f"its solver took longer than {timeout_s:g} s", "policy", "agent_timeout") from None
        except Exception as error:  # the boundary to a task's solver
            while hasattr(error, "last_attempt"):  # tenacity hides the cause
                error = error.last_attempt.exception()
            raise _failure(error) from None
        finally:
            await model.api.aclose()

    async def score(self, transcript):
        if self.scores is None:
            raise Failure("its own solver must run before it can score")
        parts, reward = {}, None
        for name, score in self.scores.items():
            for part, value in _flat(name, score.value):
                parts[part] = value_to_float()(value)
                reward = parts[part] if reward is None else reward
        if reward is None:
            raise Failure("the task has no scorer")
        return {"reward": reward, "parts": {name: value for name, value in parts.items() if math.isfinite(value)}}


def _failure(error):
    name = type(error).__name__
    text = f"{name}: {str(error)[:1000]}"
    if "context_length" in text or "maximum context" in text:
        return Failure(text, "policy", "context_length_exceeded")
    return Failure(
        text, "engine" if name in ("InternalServerError", "APIConnectionError", "ModelGenerateError") else "env"
    )


async def _run(task, sample, model):
    """The solver, then the scorers: what inspect does for one sample, without its log."""
    target = Target(sample.target)
    limits = {"message_limit": task.message_limit, "token_limit": task.token_limit}
    state = TaskState(
        model=ModelName(model),
        sample_id=sample.id,
        epoch=1,
        input=sample.input,
        target=target,
        choices=sample.choices,
        messages=sample_messages(sample),
        metadata=sample.metadata or {},
        **limits,
    )
    config = task.config.merge(GenerateConfig(max_retries=0)).model_copy(update=_SAMPLING)
    scorers = list(task.scorer or ())
    init_task_context(model, getattr(task, "model_roles", None) or {}, config)
    init_sample_model_data()
    set_sample_state(state)
    transcript = Transcript(log_model_api=False)
    init_transcript(transcript)
    init_subtask_store(state.store)
    init_scoring_context(scorers, target)
    init_sample_assistant_internal()

    async def generate(state, tool_calls="loop", **asked):
        kept = {name: value for name, value in asked.items() if name not in _SAMPLING and name != "cache"}
        return await task_generate(
            model=model, state=state, tool_calls=tool_calls, cache=NOT_GIVEN, config=config.merge(kept)
        )

    set_task_generate(generate)
    boxed = task.sandbox or sample.sandbox
    active_about = {"cost_limit": None, "time_limit": None, "working_limit": None, "fails_on_error": True, **limits}
    async with active_sample(
        task=task.name,
        log_location="",
        model=str(state.model),
        sample=sample,
        epoch=1,
        transcript=transcript,
        eval_id=state.uuid,
        run_id=state.uuid,
        sample_uuid=state.uuid,
        **active_about,
    ) as active:
        box = sandboxenv_context(task.name, task.sandbox, None, True, sample) if boxed else contextlib.nullcontext()
        async with box:
            init_sample_working_time(time.monotonic())
            state = await _solved(task, state, generate, active)
            return await _scored(task, state, target, scorers)


async def _solved(task, state, generate, active):
    try:
        with state._token_limit, state._cost_limit, state._message_limit:
            async with anyio.create_task_group() as group:
                active.start(group)
                try:
                    return await resolve_plan(task, None)(state, generate)
                finally:
                    group.cancel_scope.cancel()
    except BaseException as error:  # groups of a task group; what is no limit is raised again
        cause = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if not isinstance(cause, LimitExceededError):
            raise cause from None
        return sample_state() or state  # a sample at its limit is scored as it stands


async def _scored(task, state, target, scorers):
    state.completed = True
    set_sample_state(state)
    state.scores = dict(state.scores or {})
    try:
        for scorer in scorers:
            name = unique_scorer_name(scorer, list(state.scores))
            score = await scorer(state, target)
            if score is not None:
                state.scores[name] = score
    finally:
        if task.cleanup:
            await task.cleanup(state)
    return state.scores


def _flat(name, value):
    if isinstance(value, dict):
        return [(f"{name}/{key}", part) for key, part in value.items() if part is not None]
    if isinstance(value, (list, tuple)):
        return [(f"{name}/{n}", part) for n, part in enumerate(value) if part is not None]
    return [(name, value)]


def _prompt(sample):
    return sample.input if isinstance(sample.input, str) else "\n\n".join(message.text for message in sample.input)
