"""Names and denominators of a step's metrics: sums over all ranks' owned tokens become means."""

from collections.abc import Mapping, Sequence

__all__ = ["joined", "step_metrics"]

_PER_TOKEN = {
    "clipped": "policy/clipped",
    "masked": "policy/masked",
    "rejected": "policy/rejected",
    "kl": "policy/kl_to_behaviour",
    "kl_reference": "policy/kl_to_reference",
    "entropy": "policy/entropy",
    "distill": "policy/distill",
    "value_error": "critic/error",
}
_KNOWN = {"loss", "tokens", "same", "diff", "used", "weight", "weight_squared", "pairs", "preferred", "margin"}
_KNOWN |= {"returns", "returns_squared", "flipped", "replayed"}


def step_metrics(sums: Mapping[str, float], diff_max: float) -> dict[str, float]:
    """Metrics of one step from global sums. Sums of a loss of one's own become `policy/NAME`, per token."""
    tokens = max(1.0, sums["tokens"])
    metrics = {"loss": sums["loss"], "tokens/trained": sums["tokens"]}
    metrics |= {name: sums[key] / tokens for key, name in _PER_TOKEN.items() if key in sums}
    if sums.get("weight_squared"):  # share of the tokens that an equal weighting would need: Kish, 1965
        metrics["policy/effective_samples"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
    if "masked" in sums:
        metrics["logprob_diff/tokens"] = sums["same"]
        if sums["same"]:
            metrics |= {"logprob_diff/mean": sums["diff"] / sums["same"], "logprob_diff/max": diff_max}
    if "pairs" in sums:
        pairs = max(1.0, sums["pairs"])
        metrics |= {"dpo/accuracy": sums["preferred"] / pairs, "dpo/margin": sums["margin"] / pairs}
    if "returns_squared" in sums:
        variance = sums["returns_squared"] / tokens - (sums["returns"] / tokens) ** 2
        metrics["critic/explained"] = 1 - sums["value_error"] / tokens / variance if variance > 1e-9 else 0.0
    own = {name: value / tokens for name, value in sums.items() if name not in _KNOWN and name not in _PER_TOKEN}
    metrics |= {f"policy/{name}": value for name, value in own.items()}
    if sums.get("replayed"):
        metrics["routing/flipped"] = sums["flipped"] / sums["replayed"]
    return metrics


def joined(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch's optimizer steps: tokens and skipped steps are added up, differences to the engine are the
    first step's, everything else is the mean over the steps that have it."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        added = name in ("tokens/trained", "micro_batches") or name.startswith("skipped_")
        found[name] = sum(values) if added else sum(values) / len(values)
    return found | {name: value for name, value in steps[0].items() if name.startswith("logprob_diff/")}
