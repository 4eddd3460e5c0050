"""The README's promise, checked from several seeds: held-out success at most 0.4 before, at least 0.9 after.

python benchmarks/quickstart.py [--seeds 0 1 2]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from miles.runs import list_runs

LOW, HIGH, SECONDS = 0.4, 0.9, 300


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    kept = True
    for seed in options.parse_args().seeds:
        with tempfile.TemporaryDirectory() as root:
            began = time.monotonic()
            command = [sys.executable, "-m", "miles", "launch", "quickstart", f"run.root={root}", f"run.seed={seed}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.monotonic() - began
            (run,) = list_runs(Path(root))
            rewards = [line["reward"] for line in run.metrics("eval")]
            diffs = [line["logprob_diff/max"] for line in run.metrics("step") if "logprob_diff/max" in line]
        good = rewards[0] <= LOW and rewards[-1] >= HIGH and seconds <= SECONDS and max(diffs) <= 1e-4
        kept = kept and good
        curve = " -> ".join(f"{reward:.3f}" for reward in rewards)
        verdict = "kept" if good else "BROKEN"
        print(f"seed {seed}: held-out {curve}, {seconds:.0f} s, logprob diff {max(diffs):.1e}, {verdict}", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
