"""Prime verifiers before 0.4: a package with `load_environment`. Settings: id, and that function's arguments.

The environment's own loop plays against the endpoint; a failed model call and a reward function that raises are told
apart from a bad answer, which verifiers itself counts as 0.
"""

import asyncio
import contextvars
import functools
import inspect
import json
import os
import signal

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import httpx
import verifiers as vf
from miles_worker.protocol import Failure
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

_RAISED = contextvars.ContextVar("reward functions that raised")


def make(settings):
    settings = dict(settings)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        env = vf.load_environment(settings.pop("id"), **settings)
    except (ImportError, TypeError, ValueError) as error:
        raise Failure(f"verifiers cannot load it: {type(error).__name__}: {error}", "task") from error
    for number, handler in handlers.items():  # verifiers takes them
        signal.signal(number, handler)
    return Verifiers(env)


class Verifiers:
    """Rows of its datasets are tasks."""

    def __init__(self, env):
        self.env = env
        _watch(env.rubric)
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self.rows = {"train": self._rows(env.get_dataset) if _has(env, "dataset") else []}
        if _has(env, "eval_dataset"):  # asked without one, it gives the training rows
            self.rows["test"] = self._rows(env.get_eval_dataset)

    @staticmethod
    def _rows(get):
        return [dict(row) for row in get()]

    def about(self):
        splits = {split: len(rows) for split, rows in self.rows.items() if rows}
        return {"name": getattr(self.env, "env_id", "") or type(self.env).__name__, "layer": "agent", "splits": splits}

    def tasks(self, split, start, stop):
        rows = self.rows[split][start:stop]
        return [
            {
                "id": f"{split}/{start + n}",
                "prompt": _messages(row.get("prompt")),
                "data": {"split": split, "index": start + n},
            }
            for n, row in enumerate(rows)
        ]

    async def play(self, task, seed, host):
        return Rollout(self, dict(self.rows[task["split"]][task["index"]]))

    def gold(self, task):
        answer = self.rows[task["split"]][task["index"]].get("answer")
        return {"answer": str(answer)} if answer not in (None, "") else None


class _Client(OpenAIChatCompletionsClient):
    """Remembers what the endpoint did: environments hide it."""

    def __init__(self, client):
        super().__init__(client)
        self.failures = []

    async def get_response(self, *args, **kwargs):
        try:
            return await super().get_response(*args, **kwargs)
        except Exception as error:  # kept and raised again
            self.failures.append(error)
            raise


class Rollout:
    """One rollout of one row."""

    def __init__(self, verifiers, row):
        self.verifiers, self.row = verifiers, row
        self.result = None

    async def reset(self):
        return {"messages": _messages(self.row.get("prompt"))}

    async def run(self, endpoint, timeout_s):
        raised = []
        _RAISED.set(raised)
        client = _Client(
            AsyncOpenAI(
                base_url=endpoint["base_url"],
                api_key=endpoint["api_key"],
                max_retries=2,
                http_client=self.verifiers.http,
            )
        )
        env = self.verifiers.env
        try:
            async with asyncio.timeout(timeout_s):
                if getattr(env, "requires_group_rollouts", False):
                    raise Failure("it scores rollouts in groups: play it at the rollout layer", "unsupported")
                out = await env.run_rollout(self.row, client, endpoint["model"], {}, max_retries=0)
        except TimeoutError:
            raise Failure(f"its loop took longer than {timeout_s:g} s", "policy", "agent_timeout") from None
        except Failure:
            raise
        except Exception as error:  # the boundary to an environment's code
            ours = any(error is failure for failure in client.failures)
            raise Failure(f"{type(error).__name__}: {error}", "engine" if ours else "env") from error
        overflow = [failure for failure in client.failures if isinstance(failure, vf.OverlongPromptError)]
        empty = [failure for failure in client.failures if type(failure).__name__ == "EmptyModelResponseError"]
        failed = [failure for failure in client.failures if failure not in (*overflow, *empty)]
        if failed:
            raise Failure(f"the model endpoint failed: {failed[0].__cause__ or failed[0]!r}", "engine")
        if empty:
            raise Failure("the model said nothing and called no tool", "policy", "empty_answer")
        if out.get("error"):
            raise Failure(json.dumps(out["error"], default=str)[:1000])
        if overflow:
            raise Failure("the conversation outgrew the context", "policy", "context_length_exceeded")
        if raised:
            raise Failure("a reward function raised: " + "; ".join(raised))
        self.result = out

    async def score(self, transcript):
        if self.result is None:
            raise Failure("its own loop must run before it can score")
        metrics = {name: value for name, value in (self.result.get("metrics") or {}).items() if value is not None}
        return {"reward": self.result["reward"], "parts": metrics}


def _has(env, name):
    return getattr(env, name, None) is not None or getattr(env, f"{name}_source", None) is not None


def _messages(prompt):
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [json.loads(json.dumps(_wire(message), default=str)) for message in prompt or ()]


def _wire(message):
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)


def _watch(rubric):
    """verifiers logs a reward function that raises and counts 0: keep what it raised."""
    for inner in getattr(rubric, "rubrics", ()):
        _watch(inner)

    def watched(function):
        @functools.wraps(function)  # its signature says what it is given
        async def call(*args, **kwargs):
            try:
                value = function(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:  # kept and raised again
                _RAISED.get([]).append(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}")
                raise

        return call

    rubric.funcs[:] = [watched(function) for function in rubric.funcs]
