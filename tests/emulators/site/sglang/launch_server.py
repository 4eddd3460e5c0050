"""Stands where SGLang's own launcher stands: the emulator as a real process, with SGLang's arguments."""

import argparse
import asyncio
import os
from pathlib import Path

from tests.emulators.sglang import Emulator


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    if os.environ.get("EMULATOR_FAILS"):
        raise SystemExit("out of memory, says the emulator")
    async with Emulator(options.model_path, delay_s=float(os.environ.get("EMULATOR_DELAY", 0))).served(options.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
