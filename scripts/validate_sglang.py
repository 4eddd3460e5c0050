"""Whole runs and engines on SGLang and GPUs, part by part; what each part found is printed and kept in a folder.

    python -m scripts.validate_sglang PART… --model MODEL [--python PYTHON] [--path FOLDER] [--out FOLDER]

    recipe     the recipe smollm2-h200: the reward must climb; prefix hit, step times, logprob difference
    sync       from its checkpoint on: steps with max_staleness=0 against 1, in turn
    publish    from its checkpoint on: whole snapshots against deltas
    lora       the recipe with an adapter
    routing    a small mixture of experts made here, with routing recorded, replayed and probed
    apart      the recipe with trainer and server on a GPU each, weights over NCCL (two GPUs, as all that follow)
    together   from its checkpoint on: both on one GPU, to compare with its last steps
    kill       from its checkpoint on: two servers, one of them killed in mid-run
    transports whole, delta, gloo, NCCL side by side, to a server of one GPU; checksums
    transports_tp2  the same without NCCL, to a server of two GPUs
    affinity   conversations on two servers, each where its cache is against in turns
    lost       a receiver that is killed in the middle of a broadcast
    modes      how far engine and trainer agree: default, deterministic, on-policy kernels; alone and in a batch

MODEL is a GGUF file or a directory of SmolLM2-135M-Instruct. PYTHON has SGLang, with FOLDER on its path if given.
Everything after `--` is a setting of every run (engine.sglang.attention=triton …).
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miles.rollout.engines.sglang.process import has_gpu
from miles.runs import RunFolder

Metrics = list[dict[str, Any]]
NCCL = ["publish.kind=broadcast", "publish.backend=nccl"]
APART = ["engine.sglang.gpus=[1]", "engine.sglang.memory=0.6", *NCCL]
TOGETHER = ["engine.sglang.gpus=[]", "engine.sglang.memory=0.3", "publish.kind=safetensors"]
TWO_SERVERS = ["engine.sglang.servers=2", "engine.sglang.gpus=[0,1]", *TOGETHER[1:]]
STEP_NAMES: tuple[str, ...] = (
    "step_s",
    "wait_s",
    "train_s",
    "publish_s",
    "pause_s",
    "transfer_s",
    "trainer_idle",
    "staleness/mean",
)
STEP_NAMES += ("tokens_per_s", "engine/prefix_hit", "logprob_diff/mean", "reward/mean")


class Validation:
    """Runs recipes in processes of their own and reads what they left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.failed = False
        model = "path" if options.model.is_dir() else "gguf"
        self.common = [f"model.{model}={options.model}", f"run.root={self.out / 'runs'}", *options.settings]
        if options.python:
            self.common.append(f"engine.sglang.python={options.python}")
        if options.path:
            self.common.append(f"engine.sglang.environment.PYTHONPATH={options.path}")

    def run(self, name: str, *words: str, limit_s: float = 460) -> RunFolder:
        """One `miles launch` to its end; its output goes to a file, its last lines are shown."""
        before = set((self.out / "runs").glob("*"))
        log = self.out / f"{name}.log"
        began = time.monotonic()
        with log.open("w") as sink:
            command = [sys.executable, "-m", "miles.cli.main", "launch", "--plain", *words]
            done = subprocess.run(command, stdout=sink, stderr=sink, timeout=limit_s, check=False)
        lines = log.read_text().splitlines()
        print(f"-- {name}: status {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(lines[-4 if done.returncode == 0 else -40 :]), flush=True)
        self.failed |= done.returncode != 0
        made = sorted(set((self.out / "runs").glob("*")) - before)
        return RunFolder.open(made[-1] if made else Path(words[1]))

    def recipe(self) -> None:
        """The reward climbs."""
        folder = self.run("recipe", "smollm2-h200", *self.common)
        steps, evals = folder.metrics("step"), folder.metrics("eval")
        for line in evals:
            print(f"held-out success {line['reward']:.3f} at version {line['version']}")
        show(steps, ("step_s", "wait_s", "train_s", "publish_s", "pause_s", "engine/prefix_hit", "trainer_idle"))
        show(steps, ("logprob_diff/mean", "logprob_diff/max", "sampled_tokens", "tokens_per_s", "staleness/mean"))
        self.failed |= evals[-1]["reward"] < evals[0]["reward"] + 0.2
        (self.out / "last-run").write_text(str(folder.path))

    def _resumed(self, name: str, more: int, *settings: str) -> Metrics:
        path = Path((self.out / "last-run").read_text())
        folder = RunFolder.open(path)
        before = folder.metrics("step")[-1]["step"]
        words = ["--resume", str(path), f"train.steps={before + more}", "eval.tasks=8", *settings]
        self.run(name, *words)
        return [line for line in folder.metrics("step") if line["step"] > before]

    def sync(self) -> None:
        """The same steps, strictly on-policy and with one version of staleness."""
        found = {h: self._resumed(f"staleness-{h}", 8, f"rollout.max_staleness={h}") for h in (0, 1)}
        for staleness, steps in found.items():
            print(f"max_staleness={staleness}")
            show(steps[2:], ("step_s", "wait_s", "train_s", "trainer_idle", "staleness/mean"))
        times = [statistics.median(line["step_s"] for line in steps[2:]) for steps in found.values()]
        print(f"a synchronous step takes {times[0] / times[1]:.2f} times as long", flush=True)

    def publish(self) -> None:
        """Whole snapshots, and what changed."""
        for kind in ("safetensors", "delta"):
            steps = self._resumed(f"publish-{kind}", 6, f"publish.kind={kind}", "rollout.max_staleness=1")
            print(kind)
            show(steps[1:], ("publish_s", "transfer_s", "pause_s", "publish_bytes", "publish_changed"))

    def lora(self) -> None:
        """An adapter is trained and served."""
        words = ["trainer.compute.lora.rank=16", "train.optim.lr=2e-4", "train.warm_start.optim.lr=1e-3"]
        folder = self.run("lora", "smollm2-h200", *self.common, *words, "train.steps=20", "eval.every=0")
        for line in folder.metrics("eval"):
            print(f"held-out success {line['reward']:.3f} at version {line['version']}")
        names = ("reward/mean", "logprob_diff/mean", "publish_s", "pause_s", "publish_bytes", "engine/prefix_hit")
        show(folder.metrics("step"), names)

    def routing(self) -> None:
        """Routing is recorded by the engine and replayed by the trainer."""
        from scripts.small_moe import make_small_moe

        model = make_small_moe(self.out / "moe")
        common = [word for word in self.common if not word.startswith("model.")]
        words = [f"model.path={model}", "engine.sglang.record_routing=true", "engine.sglang.context=1024"]
        words += ["train.routing_probe=64", "train.steps=10", "train.warm_start.steps=300", "eval.every=0"]
        words += ["train.warm_start.optim.lr=1e-3", "train.optim.lr=1e-4", "sampling.max_tokens=32"]
        folder = self.run("routing", "smollm2-h200", *common, *words)
        steps = folder.metrics("step")
        names = sorted({name for line in steps for name in line if name.startswith("routing/")})
        show(steps, (*names, "logprob_diff/mean", "logprob_diff/max", "reward/mean"))
        self.failed |= not names

    def apart(self) -> None:
        """The reward climbs with trainer and server on a GPU each."""
        folder = self.run("apart", "smollm2-h200", *self.common, *APART)
        steps, evals = folder.metrics("step"), folder.metrics("eval")
        for line in evals:
            print(f"held-out success {line['reward']:.3f} at version {line['version']}")
        show(steps, STEP_NAMES)
        print("the last ten steps")
        show(steps[-10:], STEP_NAMES)
        self.failed |= evals[-1]["reward"] < evals[0]["reward"] + 0.2
        (self.out / "last-run").write_text(str(folder.path))

    def together(self) -> None:
        """The next steps on one GPU."""
        steps = self._resumed("together", 12, *TOGETHER)
        print("the last ten steps")
        show(steps[2:], STEP_NAMES)

    def kill(self) -> None:
        """One of two servers dies: nothing is lost but time."""
        from scripts.two_gpus import kill_a_server

        path = Path((self.out / "last-run").read_text())
        before = RunFolder.open(path).metrics("step")[-1]["step"]

        def killing() -> None:
            while RunFolder.open(path).metrics("step")[-1]["step"] < before + 4:
                time.sleep(0.5)
            print(f"killed process {kill_a_server('1')} after step {before + 4}", flush=True)

        threading.Thread(target=killing, daemon=True).start()
        steps = self._resumed("kill", 36, *TWO_SERVERS)
        counts = ("engine/servers_lost", "engine/servers_back", "engine/requests_moved", "engine/servers")
        for line in steps:
            outcomes = [name for name in line if name.startswith("outcome/")]
            print(
                line["step"], json.dumps({name: line[name] for name in (*counts, "step_s", *outcomes) if name in line})
            )
        totals = {name: sum(line.get(name, 0) for line in steps) for name in counts[:3]}
        print(totals, flush=True)
        self.failed |= totals["engine/servers_lost"] != 1 or totals["engine/servers_back"] != 1

    def transports(self) -> None:
        """Ways to publish, side by side."""
        from scripts.two_gpus import compare_transports

        self.failed |= not asyncio.run(compare_transports(self.options, self.out, tp=1))

    def transports_tp2(self) -> None:
        """The same to a server of two GPUs."""
        from scripts.two_gpus import compare_transports

        self.failed |= not asyncio.run(compare_transports(self.options, self.out, tp=2))

    def affinity(self) -> None:
        """Two servers, with and without memory of where a session is."""
        from scripts.two_gpus import compare_affinity

        self.failed |= not asyncio.run(compare_affinity(self.options, self.out))

    def lost(self) -> None:
        """A broadcast's receiver dies."""
        from scripts.two_gpus import lose_a_receiver

        self.failed |= not lose_a_receiver("nccl" if has_gpu() else "gloo")

    def modes(self) -> None:
        """Engine against trainer, and the engine against itself."""
        from scripts.engine_modes import compare_modes

        self.failed |= not asyncio.run(compare_modes(self.options, self.out))


def show(steps: Metrics, names: Iterable[str]) -> None:
    """Median, smallest and largest of some metrics over steps."""
    for name in names:
        values = [float(line[name]) for line in steps if line.get(name) is not None]
        if values:
            print(
                f"  {name:28} median {statistics.median(values):.6g}  {min(values):.6g} to {max(values):.6g}",
                flush=True,
            )


def main() -> None:
    parts: tuple[str, ...] = ("recipe", "sync", "publish", "lora", "routing", "modes")
    parts += ("apart", "together", "kill", "transports", "transports_tp2", "affinity", "lost")
    own, _, settings = (list(part) for part in _split(sys.argv[1:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--out", type=Path, default=Path("validation"))
    options = parser.parse_args(own)
    options.settings = settings
    validation = Validation(options)
    for part in options.parts:
        print(f"== {part}", flush=True)
        try:
            getattr(validation, part)()
        except (subprocess.TimeoutExpired, OSError, LookupError) as error:
            validation.failed = True
            print(f"{part} FAILED: {type(error).__name__} {error}", flush=True)
    print(json.dumps({"failed": validation.failed}), flush=True)
    sys.exit(validation.failed)


def _split(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], ["--"], words[at + 1 :]


if __name__ == "__main__":
    main()
