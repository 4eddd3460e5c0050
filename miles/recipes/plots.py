"""The learning curve of a run as a PNG."""

from miles.runs import RunFolder

__all__ = ["plot_rewards"]


def plot_rewards(folder: RunFolder) -> None:
    """Training reward per step and held-out reward, into reward.png; nothing when there are no steps."""
    steps, evaluations = folder.metrics("step"), folder.metrics("eval")
    if not steps:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([s["step"] for s in steps], [s["reward/mean"] for s in steps], label="training episodes")
    axes.plot([e["step"] for e in evaluations], [e["reward"] for e in evaluations], "o-", label="held-out tasks")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02), title=folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(folder.path / "reward.png", dpi=120)
