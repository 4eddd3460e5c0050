"""What one SGLang server can do, found out by asking it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.http import Http
from miles.types import WeightVersion

__all__ = ["ServerFacts", "ask_facts", "served_version", "version_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Capabilities and sizes of a server; tokens are counted for each data-parallel copy.

    `brackets`: weight updates by value and over a process group stand between begin_weight_update and
    end_weight_update, and a retracted request does not stop the cache from being flushed (0.5.21 and newer).
    `shape`: (layers, experts of a token) of the recorded routing, where it is recorded.
    """

    release: str
    model_path: str
    context: int
    cache_tokens: int
    copies: int
    ranks: int
    brackets: bool
    ready: bool
    lora: bool
    deterministic: bool
    routing: bool
    shape: tuple[int, int] | None = None


async def ask_facts(http: Http) -> tuple[ServerFacts, WeightVersion]:
    """Facts of the server and the weights that it serves; ConfigError when it is no SGLang server."""
    info = await _first(http, "/server_info", "/get_server_info")
    if "max_total_num_tokens" not in info:
        raise ConfigError(
            f"{http.base_url} is no SGLang server: its /server_info does not say how many tokens it holds"
        )
    served = (await _first(http, "/v1/models")).get("data") or [{}]
    limits = [info.get("context_length"), served[0].get("max_model_len"), info["max_total_num_tokens"]]
    path, routing = str(info.get("model_path") or ""), bool(info.get("enable_return_routed_experts"))
    facts = ServerFacts(
        release=str(info.get("version") or ""),
        model_path=path,
        context=min(int(limit) for limit in limits if limit),
        cache_tokens=int(info["max_total_num_tokens"]),
        copies=int(info.get("dp_size") or 1),
        ranks=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
        brackets=await _has(http, "/begin_weight_update"),
        ready=await _has(http, "/ready"),
        lora=bool(info.get("enable_lora")),
        deterministic=bool(info.get("enable_deterministic_inference")),
        routing=routing,
        shape=_routing_shape(Path(path)) if routing else None,
    )
    return facts, await served_version(http)


async def served_version(http: Http) -> WeightVersion:
    """The weights that a server says it serves."""
    return version_of((await _first(http, "/model_info", "/get_model_info")).get("weight_version"))


def version_of(name: Any) -> WeightVersion:
    """Servers name versions by text; one that is no number is that of the first weights."""
    return int(name) if str(name).isdecimal() else 0


async def _first(http: Http, *paths: str) -> dict[str, Any]:
    """The first of several names of one thing that this server has."""
    for path in paths:
        reply = await http.get(path)
        if reply.status == 200:
            data = reply.json()
            return data if isinstance(data, dict) else {}
    return {}


async def _has(http: Http, path: str) -> bool:
    """Whether there is such a path: one that takes only POST refuses a GET in another way than an unknown one."""
    return (await http.get(path)).status != 404


def _routing_shape(model: Path) -> tuple[int, int]:
    path = model / "config.json"
    try:
        config: Mapping[str, Any] = json.loads(path.read_text())
        text = config.get("text_config") or config
        return int(text["num_hidden_layers"]), int(text["num_experts_per_tok"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"recorded routing cannot be read without {path} ({type(error).__name__} {error}): serve the model from a "
            "directory that this machine sees too"
        ) from error
