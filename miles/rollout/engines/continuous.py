"""The embedded engine's core: transformers' continuous batching with exact versions per token.

Imported only where torch may live: the engine's own process, or a test. Prefix blocks are shared
between requests; on a weight update they are forgotten, and (mode `recompute`) requests in flight
are prefilled again under the new weights, so that every sampled token's logprob belongs exactly to
the version it carries. Mode `keep` goes on with the old keys and values, as SGLang's in-place mode.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.logging import disable_progress_bar

from miles.broadcast import join, receive
from miles.deltas import LocalCheckpoint
from miles.errors import EngineError, EngineLost
from miles.models import CheckpointWriter, load_model
from miles.processes import Reply, deferred, scratch_folder
from miles.types import BroadcastPlan, Finish, Generated, Weights

__all__ = ["ContinuousEngine"]


@dataclass
class _Pending:
    reply: Reply
    max_tokens: int
    stop: frozenset[int]
    marks: list[tuple[int, int]] = field(default_factory=list)  # (first token index, version)


class ContinuousEngine:
    """Owns one copy of the model and the batching thread. All methods may be called from one thread."""

    def __init__(
        self,
        model: str | Path | Any,
        *,
        version: int = 0,
        temperature: float = 1.0,
        max_batch_requests: int = 32,
        max_batch_tokens: int = 512,
        page_size: int = 16,
        cache_tokens: int = 32_768,
        on_update: str = "recompute",
        threads: int = 1,
        seed: int = 0,
        exit_when_dead: bool = False,
    ) -> None:
        disable_progress_bar()
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        if isinstance(model, str | Path):
            model = load_model(model)
        self._model, self._exit_when_dead = model, exit_when_dead
        self._writer = CheckpointWriter(model)
        self._version = version
        self._on_update = on_update
        self._updates = [(0.0, version)]
        self._local: LocalCheckpoint | None = None
        self._group: tuple[str, Any] | None = None
        self._first: dict[str, torch.Tensor] = {}  # weights below an adapter
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.Lock()
        generation = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(
            return_logprobs=True,
            page_size=page_size,
            allow_block_sharing=True,
            num_blocks=max(8, cache_tokens // page_size),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_batch_requests,
            use_async_batching=False,
            use_cuda_graph=False,
            seed=seed,
        )
        self._manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()
        self._closing = False
        self._dispatcher = threading.Thread(target=self._dispatch, daemon=True)
        self._dispatcher.start()

    @deferred
    def generate(
        self,
        reply: Reply,
        *,
        id: str,
        prompt_ids: list[int],
        max_tokens: int,
        stop: list[int],
        streaming: bool,
    ) -> None:
        """Queue one generation; `reply` gets a Generated at the end, and the ids so far when streaming."""
        with self._lock:
            self._pending[id] = _Pending(reply, max_tokens, frozenset(stop))
        accepted = self._manager.add_request(
            list(prompt_ids), request_id=id, max_new_tokens=max_tokens, streaming=streaming, eos_token_id=stop
        )
        if accepted is None:
            with self._lock:
                self._pending.pop(id, None)
            raise EngineError("the batching loop has stopped; see the engine's log")

    def abort(self, id: str) -> None:
        """Stop a generation; its answer is an empty one with finish `abort`."""
        self._manager.cancel_request(id)
        with self._lock:
            pending = self._pending.pop(id, None)
        if pending is not None:
            pending.reply(Generated(output_ids=(), logprobs=(), versions=(), finish=Finish.ABORT))

    def load_published(self, weights: Weights) -> float:
        """Serve a published version: a directory, and deltas on it, an adapter, or what is being broadcast. Seconds of
        standing still."""
        if weights.broadcast is not None:
            return self._received(weights.broadcast, weights.version)
        directory = weights.directory
        if directory is None or not any(directory.glob("*.safetensors")):
            raise EngineError(f"no *.safetensors in {directory}; the publisher writes them before it calls load")
        if weights.adapter is not None:
            return self.load_tensors(self._merged(directory), weights.version)
        if not weights.deltas:
            return self.load_tensors(_read(directory), weights.version)
        if self._local is None:
            self._local = LocalCheckpoint(scratch_folder("received", directory.parent.parent))
        changed = self._local.sync(directory, weights.deltas)
        tensors = _read(self._local.directory)
        return self.load_tensors({n: t for n, t in tensors.items() if changed is None or n in changed}, weights.version)

    def _received(self, plan: BroadcastPlan, version: int) -> float:
        if self._group is None or self._group[0] != plan.group:
            self._group = plan.group, join(plan, 1)
        return self.load_tensors(dict(receive(self._group[1], plan, torch.device("cpu"))), version)

    def _merged(self, directory: Path) -> dict[str, torch.Tensor]:
        """The weights that an adapter changes: W + alpha/r * B A, from the first weights and peft's files."""
        settings = json.loads((directory / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"]
        adapter = _read(directory)
        own = self._model.state_dict()
        merged = {}
        for name, a in adapter.items():
            if not name.endswith(".lora_A.weight"):
                continue
            target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            if target not in own:
                raise EngineError(
                    f"the adapter changes {target}, which this model does not have: is it the same model?"
                )
            base = self._first.setdefault(target, own[target].clone())
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            merged[target] = (base.float() + scale * (b.float() @ a.float()).to(base.device)).to(base.dtype)
        return merged

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], version: int) -> float:
        """Copy weights by their HF names between two steps of the loop. Partial sets are allowed. Seconds of pause."""
        unknown = [name for name in tensors if not self._writer.knows(name)]
        if unknown:
            raise EngineError(f"published weights {unknown[:3]} are not in this model; are the two the same model?")
        with self._manager.pause(), torch.no_grad(), self._lock:
            began = time.monotonic()
            for name, tensor in tensors.items():
                self._writer.write(name, tensor)
            self._mark_and_forget(version)
            return time.monotonic() - began

    def _mark_and_forget(self, version: int) -> None:
        """Inside a pause: note where each request's next version begins, drop stale keys and values."""
        processor = self._manager.batch_processor
        scheduler, cache = processor.scheduler, processor.cache
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        for state in states:
            pending, done = self._pending.get(state.request_id), len(state.logprobs)
            if pending is None:
                continue
            if done and not pending.marks:
                pending.marks.append((0, self._version))
            if pending.marks and pending.marks[-1][0] == done:
                pending.marks.pop()
            if done or pending.marks or state.request_id in scheduler.active_requests:
                pending.marks.append((done, version))
        if self._on_update == "recompute":
            for state in list(scheduler.active_requests.values()):
                again = state.create_equivalent_initial_request()
                cache.free_blocks(state.request_id, no_cache=True)
                scheduler.finish_request(state.request_id)
                scheduler.add_waiting_request(again)
        cache.evict_cached_blocks()
        self._updates.append((time.perf_counter(), version))
        self._version = version

    def _dispatch(self) -> None:
        while not self._closing:
            output = self._manager.get_result(timeout=0.2)
            if output is not None:
                self._answer(output)
            elif not self._manager.is_running():
                self._fail_all()
                if self._exit_when_dead:  # the client sees a lost engine and starts another process
                    os._exit(1)
                return

    def _answer(self, output: Any) -> None:
        done = output.is_finished()
        with self._lock:
            pending = self._pending.pop(output.request_id, None) if done else self._pending.get(output.request_id)
        if pending is None:
            return
        if output.error is not None:
            pending.reply(error=EngineError(f"generation failed: {output.error}"))
        elif not done:
            pending.reply(tuple(output.generated_tokens), last=False)
        else:
            try:
                pending.reply(self._generated(output, pending))
            except (ValueError, IndexError) as error:
                pending.reply(error=EngineError(f"the batching loop returned uneven lists: {error}"))

    def _generated(self, output: Any, pending: _Pending) -> Generated:
        ids = tuple(output.generated_tokens)
        started = output.lifespan[0]
        first = [version for at, version in self._updates if at <= started][-1]
        marks = pending.marks or [(0, first)]
        ends = [start for start, _ in marks[1:]] + [len(ids)]
        versions = [v for (start, v), end in zip(marks, ends, strict=True) for _ in range(start, end)]
        stopped = bool(ids) and ids[-1] in pending.stop
        return Generated(
            output_ids=ids,
            logprobs=tuple(output.logprobs),
            versions=tuple(versions),
            finish=Finish.STOP if stopped else Finish.LENGTH,
        )

    def _fail_all(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for item in pending.values():
            item.reply(error=EngineLost("the batching loop ended; see the engine's log"))

    def close(self) -> None:
        """Stop the loop and the dispatcher."""
        self._closing = True
        if self._local is not None:
            shutil.rmtree(self._local.directory, ignore_errors=True)
        self._manager.stop(block=True, timeout=10, hard_stop=True)
        self._dispatcher.join(timeout=2)


def _read(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors
