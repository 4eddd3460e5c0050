"""Which GPUs a run uses for what: found before anything starts, told in one line each, refused where it cannot fit."""

from dataclasses import dataclass
from pathlib import Path

from miles.errors import ConfigError
from miles.recipes.config import RunConfig

__all__ = ["Placement", "gpus_here", "place", "what_is_missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs are numbered through all nodes: node n has n * gpus_per_node to (n + 1) * gpus_per_node - 1."""

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    gpus_per_node: int

    @property
    def shared(self) -> bool:
        """Whether the trainer and an engine compute on the same GPU."""
        return any(set(engine) & set(self.trainer) for engine in self.engines)

    def lines(self) -> list[str]:
        """For people."""
        told = [f"trainer: {len(self.trainer)} ranks on {self._where(self.trainer)}"]
        told += [f"sglang-{n}: {len(gpus)} GPUs, {self._where(gpus)}" for n, gpus in enumerate(self.engines)]
        return told

    def _where(self, gpus: tuple[int, ...]) -> str:
        by_node: dict[int, list[int]] = {}
        for gpu in gpus:
            by_node.setdefault(gpu // self.gpus_per_node, []).append(gpu % self.gpus_per_node)
        return "; ".join(f"node {node}: GPU {', '.join(map(str, found))}" for node, found in by_node.items())


def gpus_here() -> int:
    """NVIDIA GPUs of this machine."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()])


def place(config: RunConfig) -> Placement | None:
    """Trainer ranks first, then the servers on the GPUs that engine.sglang.gpus names, else beside the trainer's.

    None where there are no GPUs. ConfigError when they do not fit into the cluster's, when a server would have parts of
    several nodes, or when trainer and server share a GPU and engine.sglang.memory does not say how, or NCCL would have
    to connect them there.
    """
    cluster, engine = config.cluster, config.engine.sglang
    per_node = cluster.gpus_per_node or gpus_here()
    if not per_node:
        return None
    trainer = tuple(range(max(1, config.trainer.ranks)))
    placement = Placement(trainer=trainer, engines=_engines(config), gpus_per_node=per_node)
    wanted = max([*trainer, *(gpu for gpus in placement.engines for gpu in gpus)]) + 1
    if wanted > cluster.nodes * per_node:
        raise ConfigError(f"this recipe needs {wanted} GPUs, and {cluster.nodes} nodes have {per_node} each")
    for number, gpus in enumerate(placement.engines):
        nodes = {gpu // per_node for gpu in gpus}
        if len(nodes) > 1 and len(nodes) * per_node != len(gpus):
            raise ConfigError(
                f"sglang-{number} has {len(gpus)} GPUs on {len(nodes)} nodes, not all of each: choose "
                "engine.sglang.gpus, tp and dp so that a server is within a node, or has whole nodes"
            )
    if placement.shared and engine.memory is None:
        raise ConfigError(
            "the trainer and a server share a GPU: say with engine.sglang.memory=0.3 how much of it the server takes, "
            "or give the servers GPUs of their own with engine.sglang.gpus"
        )
    sends = config.publish.kind == "broadcast" and config.publish.backend == "nccl"
    if sends and any(placement.trainer[0] in gpus for gpus in placement.engines):
        raise ConfigError(
            f"NCCL cannot connect two processes on one GPU, and the trainer's first rank and a server are on GPU "
            f"{placement.trainer[0]}: give the servers others with engine.sglang.gpus, or set publish.backend=gloo"
        )
    return placement


def _engines(config: RunConfig) -> tuple[tuple[int, ...], ...]:
    """GPUs of every server that a run launches."""
    engine = config.engine.sglang
    if config.engine.name != "sglang" or engine.urls:
        return ()
    share = engine.tp * engine.dp
    flat = engine.gpus or tuple(range(share)) * engine.servers
    return tuple(flat[number * share : (number + 1) * share] for number in range(engine.servers))


def what_is_missing(config: RunConfig) -> str:
    """Why `config` cannot be launched on this machine as it is; empty when it can."""
    placement = place(config)
    if placement is None:
        return ""
    if config.cluster.nodes == 1:
        needed = {*placement.trainer, *(gpu for gpus in placement.engines for gpu in gpus)}
        missing = needed - set(range(gpus_here()))
        return f"it needs {len(needed)} GPUs, and this machine has {gpus_here()}" if missing else ""
    if max(placement.trainer) >= placement.gpus_per_node:
        return "its trainer ranks are on several nodes, and Miles launches ranks on one machine so far"
    return "its servers are on other nodes: `miles engine start` there, and name them in engine.sglang.urls"
