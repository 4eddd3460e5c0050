"""The programs that come with Miles, one `harness.toml` each; as attributes, so that the registry finds them."""

from typing import Any

from miles.harnesses.program import BUILT_IN, program_class

__all__ = ["names"]


def names() -> list[str]:
    """Of all programs here."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def __getattr__(name: str) -> Any:
    path = BUILT_IN / f"{name.replace('_', '-')}.toml"
    if not path.is_file():
        raise AttributeError(name)
    return program_class(path)
