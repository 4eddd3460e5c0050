"""What a recipe says: one model of all sections, TOML files, dotted overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from miles.config import Config, apply_overrides, build, read_toml
from miles.envs.rewards import JudgeConfig
from miles.envs.selection import SelectionConfig
from miles.errors import ConfigError
from miles.recipes.tiny_model import TinyModelConfig
from miles.rollout.engines.embedded import EmbeddedConfig
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.episode import EpisodeConfig
from miles.rollout.evaluation import EvalConfig
from miles.rollout.scheduler import RolloutConfig
from miles.rollout.session.server import SessionConfig
from miles.sandboxes.pool import SandboxConfig
from miles.trainer.loop import TrainConfig
from miles.trainer.publish import PublishConfig
from miles.trainer.trainer import TrainerConfig

__all__ = ["Recipe", "RunConfig", "is_offline", "list_recipes", "load_recipe", "recipe_path", "smoked"]

_HERE = Path(__file__).parent


class RunSection(Config):
    """The run itself."""

    root: Path = Path("runs")
    """Folder that run folders are made in."""
    seed: int = 0
    """Seed of the model, the order of tasks, sampling and demonstrations."""


class ModelSection(Config):
    """Where the first weights come from; a path wins over a GGUF file, that over a model made on the spot."""

    path: Path | None = None
    """A Hugging Face model directory with a tokenizer."""
    gguf: str | None = None
    """A GGUF file, or PACKAGE:FILE inside an installed package; converted into the run folder."""
    tiny: TinyModelConfig | None = None
    """Make a tiny model for the taskset's vocabulary."""

    @model_validator(mode="after")
    def _given(self) -> "ModelSection":
        if self.path is None and self.gguf is None and self.tiny is None:
            raise ValueError(
                "give model.path (a model directory), model.gguf (a file) or model.tiny (made on the spot)"
            )
        return self


class PluginSection(Config):
    """A plug-in by registry name or module:attr, and its own settings."""

    name: str
    """Registry name, or module:attr."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of the plug-in's own config."""


class EnvSection(PluginSection):
    """An environment: declared in miles.toml, built in, offered by a package, or module:attr."""

    tasks: SelectionConfig = SelectionConfig()
    """Which of its tasks; what is given here replaces what miles.toml says."""
    rewards: dict[str, JudgeConfig] = Field(default_factory=dict)
    """Parts of the reward; empty: the environment's own, or what miles.toml says."""


class HarnessSection(PluginSection):
    """The program around the model."""

    name: str = ""
    """Registry name, or module:attr; empty: the environment's own agent where it brings one, else react."""


class EngineSection(Config):
    """Which engine serves the policy."""

    name: str = "embedded"
    """Registry name, or module:attr."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    """Settings of the embedded engine."""
    sglang: SGLangConfig = SGLangConfig()
    """Settings of SGLang servers."""


class ClusterSection(Config):
    """The machines that a recipe is meant for; `miles launch --dry-run` tells who gets which GPU."""

    nodes: int = Field(1, gt=0)
    """Machines."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each; 0: as many as this machine has."""


class SamplingSection(Config):
    """How the policy is sampled. Clients' own wishes are recorded and ignored."""

    temperature: float = Field(1.0, gt=0.0)
    """Sampling temperature, used by engine and trainer alike."""
    max_tokens: int = Field(512, gt=0)
    """New tokens of one model call at most."""


class Recipe(Config):
    """What every recipe says."""

    name: str
    """Name of the recipe; run folders begin with it."""
    description: str = ""
    """One line for `miles recipe list`."""
    run: RunSection = RunSection()
    """The run itself."""
    model: ModelSection
    """First weights."""
    smoke: dict[str, Any] = Field(default_factory=dict)
    """Sections that `--smoke` puts in the place of those of the same name: the same run, small enough for a laptop."""


class RunConfig(Recipe):
    """A recipe that trains an agent in an environment."""

    env: EnvSection
    """The taskset."""
    harness: HarnessSection = HarnessSection()
    """Agent layer: the program around the model."""
    generation: str | None = None
    """Generation layer: module:attr of `async generate(context) -> Episode`; replaces the harness."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where commands run."""
    engine: EngineSection = EngineSection()
    """Inference."""
    cluster: ClusterSection = ClusterSection()
    """Machines and GPUs."""
    sampling: SamplingSection = SamplingSection()
    """Sampling of the policy."""
    session: SessionConfig = SessionConfig()
    """The session server."""
    episode: EpisodeConfig = EpisodeConfig()
    """Deadlines and limits of one episode."""
    rollout: RolloutConfig = RolloutConfig()
    """Scheduling, staleness, the buffer."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    trainer: TrainerConfig = TrainerConfig()
    """Ranks and backend."""
    train: TrainConfig = TrainConfig()
    """The algorithm."""
    publish: PublishConfig = PublishConfig()
    """How weights reach engines."""

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.publish.kind == "inprocess" and (self.engine.name != "inprocess" or self.trainer.ranks != 0):
            raise ValueError("publish.kind=inprocess needs one process: engine.name=inprocess trainer.ranks=0")
        train = self.train
        if train.minibatches > self.rollout.groups_per_step:
            raise ValueError(f"train.minibatches={train.minibatches} needs rollout.groups_per_step of at least as many")
        alone = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl")
        if self.rollout.group_size == 1 and train.advantage.estimator in alone:
            raise ValueError(
                f"train.advantage.estimator={train.advantage.estimator} compares siblings: set "
                "rollout.group_size to 2 or more"
            )
        others = train.kl.coefficient or train.policy.entropy or train.distill.coefficient
        if train.advantage.estimator == "nothing" and not others and not train.advantage.turn_credit:
            raise ValueError("train.advantage.estimator=nothing trains nothing: set train.distill or another one")
        lora = self.trainer.compute.lora is not None
        if lora and train.kl.coefficient and train.warm_start.steps and not train.kl.reference:
            raise ValueError("with LoRA the reference is the model before the warm start: set train.kl.reference")
        if self.publish.kind == "broadcast" and (self.engine.name == "inprocess" or self.trainer.ranks == 0):
            raise ValueError(
                "publish.kind=broadcast needs two processes: not engine.name=inprocess, nor trainer.ranks=0"
            )
        return self


def list_recipes() -> list[tuple[str, str]]:
    """(name, description) of the recipes that come with Miles."""
    return [(path.stem, str(read_toml(path).get("description", ""))) for path in sorted(_HERE.glob("*.toml"))]


def recipe_path(name: str) -> Path:
    """File of a recipe given by name or path; ConfigError lists the known ones."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"no recipe file {path}")
        return path
    built_in = _HERE / f"{name}.toml"
    if not built_in.is_file():
        known = ", ".join(recipe for recipe, _ in list_recipes())
        raise ConfigError(f"unknown recipe {name!r}; known: {known}; or give a path that ends in .toml")
    return built_in


def smoked(data: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's data with the sections of its smoke test; ConfigError where it has none."""
    small = data.get("smoke")
    if not small:
        raise ConfigError(f"recipe {data.get('name', '')!r} has no [smoke] sections: run it as it is, or write them")
    return {**data, **small}


def is_offline(data: Mapping[str, Any]) -> bool:
    """Whether a recipe learns from a file; then it is an `OfflineRun`."""
    return "offline" in data


def load_recipe(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe with overrides applied and every key checked."""
    data = read_toml(recipe_path(name))
    return build(RunConfig, apply_overrides(RunConfig, data, overrides))
