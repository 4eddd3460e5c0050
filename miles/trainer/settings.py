"""Settings of the algorithm and of the ranks, apart from their classes: the driver imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from miles.config import Config
from miles.types import WeightVersion

__all__ = [
    "AdvantageConfig",
    "BackendConfig",
    "CorrectionConfig",
    "DpoConfig",
    "KlConfig",
    "LoraConfig",
    "LossUnit",
    "OptimConfig",
    "OverlongConfig",
    "PolicyLossConfig",
    "ScoreSpec",
    "StepSpec",
]

LossUnit = Literal["episode", "token", "group", "constant"]


class OverlongConfig(Config):
    """What becomes of long answers (DAPO, arXiv 2503.14476, section 3.4)."""

    limit: int | None = Field(None, gt=0)
    """Sampled tokens of an episode at which the whole penalty is due; none: no penalty."""
    margin: int = Field(4096, gt=0)
    """Tokens before the limit over which the penalty grows from 0."""
    penalty: float = Field(1.0, ge=0.0)
    """Reward taken away at the limit."""
    mask: bool = False
    """Whether episodes whose last turn a token limit cut off are left out of the loss."""


class AdvantageConfig(Config):
    """From rewards to advantages."""

    estimator: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, maxrl, reward, nothing, gae (PPO with a critic), or
    module:attr of your own."""
    turn_credit: str | None = None
    """module:attr of `f(episode) -> {turn id: amount}`, added to the advantage of that turn's tokens."""
    overlong: OverlongConfig = OverlongConfig()
    """Long answers."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """gae: discount per token."""
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """gae: weight of longer returns (arXiv 1506.02438)."""
    whiten: bool = False
    """Whether token advantages are brought to mean 0 and standard deviation 1 over the batch (gae)."""


class PolicyLossConfig(Config):
    """Clipped policy gradient (PPO, arXiv 1707.06347, eq. 7) and its kin."""

    kind: str = "ppo"
    """ppo, gspo, cispo, reinforce, or module:attr of your own."""
    clip_low: float = Field(0.2, ge=0.0, lt=1.0)
    """Ratio may fall to 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0.0)
    """Ratio may rise to 1 + clip_high (DAPO's clip-higher, arXiv 2503.14476)."""
    dual_clip: float = Field(3.0, gt=1.0)
    """Bound of the loss at negative advantage, in advantages (arXiv 1912.09729)."""
    entropy: float = 0.0
    """Bonus on the entropy of every owned position."""


class CorrectionConfig(Config):
    """What is done about tokens that other weights, or another implementation, sampled.

    The weight of a token is w = old / behaviour: `behaviour` are the engine's logprobs, `old` is the policy that the
    ratio of the loss is anchored on. Masks and rejections touch numerators only.
    """

    anchor: Literal["behaviour", "recomputed"] = "behaviour"
    """behaviour: the ratio is against the engine's own logprobs, and limits apply to it. recomputed: against the
    trainer's logprobs before the step (decoupled PPO, arXiv 2505.24298, eq. 5), weighted by w."""
    level: Literal["token", "sequence"] = "token"
    """sequence: one weight for a row, the geometric mean of its tokens'."""
    mode: Literal["mask", "truncate", "off"] = "mask"
    """mask: outside of [low, high] a token is left out. truncate: the weight (with anchor=behaviour the ratio of the
    loss) is cut at high."""
    low: float = Field(0.125, ge=0.0)
    """Lowest weight that is used."""
    high: float = Field(8.0, gt=0.0)
    """Highest weight that is used."""
    reject: Literal["off", "k1", "k2", "k3"] = "off"
    """Estimator of the distance between the two policies (Schulman, approximating KL) that rejects."""
    reject_level: Literal["token", "sequence"] = "sequence"
    """Whether single tokens are rejected, or rows by the mean of their tokens."""
    reject_above: float = Field(0.1, gt=0.0)
    """Distance, absolute for k1, above which."""

    @model_validator(mode="after")
    def _consistent(self) -> "CorrectionConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}: every token would be left out")
        return self


class KlConfig(Config):
    """Distance to a frozen reference policy."""

    coefficient: float = Field(0.0, ge=0.0)
    """Weight; 0: no reference is loaded."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: taken off every token's advantage, with the engine's logprobs."""
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Of KL(policy, reference) in the loss; unbiased: k3 times the ratio to the old policy (DeepSeek-V3.2)."""
    reference: Path | None = None
    """Model directory of the reference; by default the first weights."""


class DpoConfig(Config):
    """Direct preference optimization, arXiv 2305.18290, eq. 7."""

    beta: float = Field(0.1, gt=0.0)
    """How far the policy may go from the reference: larger is nearer."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of preferences taken to be wrong (conservative DPO)."""


class OptimConfig(Config):
    """One optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on 2-D weights that are not embeddings, AdamW on the rest."""
    lr: float = Field(1e-6, gt=0.0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from 0."""
    decay_steps: int = Field(0, ge=0)
    """Steps over which the rate falls linearly to final_lr_ratio; 0: constant."""
    final_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of lr at the end of the decay."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.95
    """AdamW's second moment."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this norm."""
    offload: bool = False
    """Whether moments stay in the CPU's memory between steps (GPUs)."""


class LoraConfig(Config):
    """A low-rank adapter (arXiv 2106.09685) trained instead of the weights: `pip install miles-hub[lora]`."""

    name: str = Field("policy", pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the adapter: its slot in the trainer, its name in the engines."""
    rank: int = Field(16, gt=0)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0.0)
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one."""


class BackendConfig(Config):
    """How the model is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and reductions are float32."""
    micro_tokens: int = Field(8192, gt=0)
    """Tokens of one forward pass, padding included."""
    threads: int = Field(1, gt=0)
    """CPU threads of a rank."""
    shard: int | None = Field(None, gt=0)
    """Ranks that share one copy of the model; the rest of the ranks replicate it (HSDP). None: all of them."""
    layout: Literal["auto", "rows", "packed"] = "auto"
    """rows: padded. packed: shared prefixes are computed once. auto: packed where that is estimated to be cheaper, and
    the model's attention passed the self-test."""
    head_chunk: int = Field(1024, gt=0)
    """Owned tokens whose logits exist at a time."""
    head: Literal["auto", "chunked", "liger"] = "auto"
    """chunked: head_chunk tokens at a time. liger: the fused kernel of liger-kernel, on CUDA and where nothing but
    logprobs is asked. auto: liger where it can be."""
    checkpoint_activations: bool = False
    """Whether layers are computed again in the backward pass, to save memory."""
    cpu_offload: bool = False
    """Whether parameters, gradients and moments live in the CPU's memory."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the weights."""
    replay_routing: bool = True
    """Whether mixture-of-experts layers take the experts that the engine recorded, where it did (R3)."""

    @model_validator(mode="after")
    def _consistent(self) -> "BackendConfig":
        if self.head == "liger" and self.cpu_offload:
            raise ValueError("head=liger runs on CUDA; leave cpu_offload off or take head=chunked")
        return self


class StepSpec(Config):
    """What one optimizer step minimises."""

    loss: str
    """policy, sft, dpo, value, distill."""
    policy: PolicyLossConfig = PolicyLossConfig()
    """Settings of the policy loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy corrections."""
    kl: KlConfig = KlConfig()
    """Distance to the reference."""
    dpo: DpoConfig = DpoConfig()
    """Settings of DPO."""
    distill: float = 0.0
    """Weight of the teachers' candidates in the policy loss."""
    value_clip: float = 0.2
    """How far a critic's values may move in one step."""
    temperature: float = Field(1.0, gt=0.0)
    """The temperature that tokens were sampled at."""
    version: WeightVersion = 0
    """The version that the weights have before the step."""


class ScoreSpec(Config):
    """What is asked of a model about owned tokens."""

    temperature: float = Field(1.0, gt=0.0)
    """The temperature that tokens were sampled at."""
    adapter: bool = True
    """False: the first weights, below the adapter."""
    replay: bool = True
    """Whether recorded routing is replayed."""
    top: int = Field(0, ge=0)
    """How many of the likeliest tokens at each position."""


class TeacherConfig(Config):
    """A frozen model whose opinion of the student's tokens is asked: a local directory, or a running SGLang server."""

    path: Path | None = None
    """Model directory; it is sharded over the trainer's ranks."""
    url: str | None = None
    """Address of an SGLang server, which scores at temperature 1."""
    tasks: str = "*"
    """Task ids that this teacher is asked about, with * and ?. The first teacher that fits is asked."""

    @model_validator(mode="after")
    def _one_of(self) -> "TeacherConfig":
        if (self.path is None) == (self.url is None):
            raise ValueError("give either path (a model directory) or url (an SGLang server)")
        return self


class DistillConfig(Config):
    """On-policy distillation: teachers score what the student sampled (arXiv 2306.13649)."""

    coefficient: float = Field(0.0, ge=0.0)
    """Weight; 0: off. For distillation alone set train.advantage.estimator=nothing."""
    on: Literal["sampled", "candidates"] = "sampled"
    """sampled: reverse KL on the sampled tokens, as part of their advantages. candidates: reverse KL over the likeliest
    tokens of each position and the rest, as a term of the loss."""
    candidates: int = Field(16, gt=0)
    """Likeliest tokens of a position."""
    chosen_by: Literal["student", "teacher"] = "student"
    """Whose likeliest tokens; a server can only give its own."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name."""

    @model_validator(mode="after")
    def _consistent(self) -> "DistillConfig":
        if self.coefficient and not self.teachers:
            raise ValueError("distillation needs a teacher: set train.distill.teachers.NAME.path or .url")
        if self.teachers and not self.coefficient:
            raise ValueError("teachers are named and never asked: set train.distill.coefficient")
        remote = [name for name, teacher in self.teachers.items() if teacher.url]
        if remote and self.on == "candidates" and self.chosen_by == "student":
            raise ValueError(f"teacher {remote[0]} is a server, which gives only its own candidates: chosen_by=teacher")
        return self


class CriticConfig(Config):
    """The critic of PPO (train.advantage.estimator=gae)."""

    path: Path | None = None
    """Model directory it begins with; by default the policy's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimizer."""
    value_clip: float = Field(0.2, gt=0.0)
    """How far a value may move in one step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which only the critic is trained."""
