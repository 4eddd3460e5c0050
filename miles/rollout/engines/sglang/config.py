"""Settings of SGLang servers."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from miles.config import Config

__all__ = ["OnUpdate", "SGLangConfig"]

OnUpdate = Literal["resume", "retract", "in_place"]


class SGLangConfig(Config):
    """Servers that are launched here, or that run already."""

    urls: tuple[str, ...] = ()
    """Servers that run already; empty: `servers` are launched here."""
    servers: int = Field(1, gt=0)
    """Servers to launch."""
    router: str = ""
    """A stock router in front of `urls`: it gets the generations, with the session as routing key."""
    python: Path | None = None
    """Python that has SGLang; by default the one of `miles engine install sglang`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the launched servers."""
    gpus: tuple[int, ...] = ()
    """GPUs for the launched servers, tp x dp each; empty: every one begins at GPU 0, the trainer's first."""
    tp: int = Field(1, gt=0)
    """GPUs that one copy of the model is split over (tensor parallel)."""
    dp: int = Field(1, gt=0)
    """Copies of the model in one server (data parallel)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type that the server computes in; auto: that of the published weights."""
    memory: float | None = Field(None, gt=0.0, lt=1.0)
    """Share of a GPU's memory for weights and cache; needed where the trainer uses the same GPU."""
    cache_tokens: int | None = Field(None, gt=0)
    """Tokens of keys and values kept; None: what `memory` holds."""
    context: int | None = Field(None, gt=0)
    """Longest prompt and answer together; None: what the model can."""
    max_requests: int | None = Field(None, gt=0)
    """Requests decoded together; None: the server's choice."""
    cuda_graphs: bool = True
    """Whether decoding uses CUDA graphs."""
    attention: str = ""
    """Attention backend; empty: the server's choice."""
    deterministic: bool = False
    """Kernels whose results do not depend on the batch, and a seed for every request."""
    on_policy_target: Literal["", "fsdp"] = ""
    """fsdp: the kernels that come nearest to a PyTorch trainer (`--rl-on-policy-target`); slower."""
    record_routing: bool = False
    """Whether the experts of a mixture are recorded, for routing replay."""
    flags: tuple[str, ...] = ()
    """More arguments of the launched servers, as on SGLang's command line."""
    on_update: OnUpdate = "resume"
    """Requests in flight at a weight update. resume: each goes on as a new request under the new weights, its versions
    exact. retract: the server queues them again. in_place: they keep keys and values of the old weights."""
    affinity: bool = True
    """Whether a session stays on one server, where its prefix is cached; false: servers take turns."""
    reserve: float = Field(1.0, ge=0.0, le=1.0)
    """Share of a request's max_tokens that must be free in the cache before it is sent."""
    idle_s: float = Field(120.0, gt=0.0)
    """How long the cache of a session that asks nothing is kept free for it."""
    start_s: float = Field(600.0, gt=0.0)
    """What a server gets to come up; compiling kernels takes minutes the first time."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Longest silence of a server that is answering."""
    probe_s: float = Field(5.0, gt=0.0)
    """Seconds between looks whether a server lives."""
    restarts: int = Field(3, ge=0)
    """How often one server is replaced before the run goes on without it."""

    @model_validator(mode="after")
    def _fits(self) -> "SGLangConfig":
        if self.gpus and len(self.gpus) != self.servers * self.tp * self.dp:
            raise ValueError(
                f"engine.sglang.gpus names {len(self.gpus)} GPUs; {self.servers} servers of {self.tp * self.dp} need "
                f"{self.servers * self.tp * self.dp}"
            )
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError("engine.sglang.gpus names a GPU twice; leave it empty to share the trainer's")
        if self.router and not self.urls:
            raise ValueError("engine.sglang.router needs engine.sglang.urls: weights go to the servers themselves")
        if self.router and self.record_routing:
            raise ValueError("the stock router drops the fields that record routing: leave engine.sglang.router empty")
        return self
