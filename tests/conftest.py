"""Shared pieces: one asyncio backend, one tiny model, one rendering for the whole test run."""

from pathlib import Path

import pytest

from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised tiny chat model."""
    directory = tmp_path_factory.mktemp("model")
    taskset = VaultTaskset()
    messages, tools = next(taskset.demonstrations(0))
    make_tiny_model(directory, TinyModelConfig(), seed=0, words=taskset.vocabulary(), tools=tools, example=messages)
    return directory


@pytest.fixture(scope="session")
def rendering(model: Path) -> Rendering:
    return load_rendering(model)
