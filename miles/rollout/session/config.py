"""Settings of the session server."""

from typing import Literal

from pydantic import Field

from miles.config import Config
from miles.rollout.rendering.rendering import RenderingConfig

__all__ = ["SessionConfig"]


class SessionConfig(Config):
    """The session server's address, its limits, and what of a tree is trained."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    ttl_s: float = Field(3600.0, gt=0)
    """A session older than this answers nothing more."""
    max_body_mib: int = Field(64, gt=0)
    """Largest request body, after decompression."""
    in_flight: int = Field(16, gt=0)
    """Most concurrent model calls of one session."""
    grace_s: float = Field(2.0, ge=0)
    """How long a generation goes on after its client went away."""
    drain_s: float = Field(0.0, ge=0)
    """How long closing a session waits for model calls in flight (sub-agents that outlive their parent)."""
    keepalive_s: float = Field(3.0, gt=0)
    """Silence after which a streaming client gets a sign of life."""
    models: dict[str, str] = Field(default_factory=dict)
    """Who answers a requested model name: pattern -> policy, untrained (the policy, not trained on) or another
    engine's name. The first pattern that fits wins; every other name is the policy."""
    train_side: bool = False
    """Whether side calls (titles, memory) are trained."""
    train_compaction: bool = False
    """Whether the summaries that harnesses ask for are trained."""
    wishes: Literal["refuse", "record"] = "refuse"
    """What becomes of a forced tool choice or output format, which exact sampling cannot honour."""
    report_truncation: bool = True
    """Whether clients are told that an answer was cut at its token limit. Codex ends on being told."""
    canonicalisers: tuple[str, ...] = ()
    """Changes to requests before tokenising: strip_billing, freeze_clock, sort_tool_results, or module:attr."""
    rendering: RenderingConfig = RenderingConfig()
    """How conversations become tokens."""
