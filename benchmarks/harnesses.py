"""What a program costs around the model: seconds of an episode that solves a terminal task in five turns, with an
engine that answers at once, alone and several at a time, against our own loop in the same run.

    python -m benchmarks.harnesses pi claude-code mini-swe-agent codex
"""

import argparse
import asyncio
import statistics
import time

from miles.recipes.harnesscheck import benching

__all__ = ["main"]


async def seconds(name: str, episodes: int, together: int) -> tuple[float, float]:
    """(Median of one episode alone, wall time per episode with `together` in flight)."""
    async with benching(name, {}) as bench:
        alone = []
        for _ in range(episodes):
            began = time.monotonic()
            await bench.play(bench.solving())
            alone.append(time.monotonic() - began)
        began = time.monotonic()
        await asyncio.gather(*(bench.play(bench.solving()) for _ in range(together)))
        return statistics.median(alone), (time.monotonic() - began) / together


async def measure(names: list[str], episodes: int, together: int) -> None:
    ours = await seconds("react", episodes, together)
    print(f"{'':16} alone, s   over react   {together} together, s each   over react")
    for name in ["react", *names]:
        alone, crowded = ours if name == "react" else await seconds(name, episodes, together)
        print(f"{name:16} {alone:8.2f} {alone / ours[0]:11.1f}x {crowded:16.2f} {crowded / ours[1]:14.1f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["pi", "claude-code", "mini-swe-agent", "codex"])
    parser.add_argument("--episodes", type=int, default=3, help="alone")
    parser.add_argument("--together", type=int, default=4, help="in flight")
    options = parser.parse_args()
    asyncio.run(measure(options.names, options.episodes, options.together))


if __name__ == "__main__":
    main()
