import tomllib
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from miles.config import Config, apply_overrides, build, dump_toml
from miles.errors import ConfigError
from miles.recipes.config import RunConfig, load_recipe


class Inner(Config):
    """Inner."""

    lr: float = Field(1.0, gt=0.0)
    """Rate."""
    name: str = ""
    """Name."""
    size: int | None = None
    """Size."""


class Outer(Config):
    """Outer."""

    inner: Inner = Inner()
    """Inner."""
    urls: list[str] | None = None
    """Addresses."""
    mode: Literal["a", "b"] = "a"
    """Mode."""
    flag: bool = False
    """Flag."""


def overridden(*overrides):
    return build(Outer, apply_overrides(Outer, {}, overrides))


@pytest.mark.parametrize("text", ["null", "true", "1e5", "[a]", "a: b", "", "Zürich", "a=b"])
def test_text_arrives_unchanged(text):
    assert overridden(f"inner.name={text}").inner.name == text


def test_values_arrive_with_their_declared_type():
    config = overridden("inner.lr=1e5", "inner.size=12", "flag=true", "mode=b", 'urls=["x", "y"]')
    assert config == Outer(inner=Inner(lr=100000.0, size=12), flag=True, mode="b", urls=["x", "y"])


def test_none_stays_none_through_a_file():
    config = overridden("urls=none", "inner.size=none")
    assert config.urls is None
    assert build(Outer, tomllib.loads(dump_toml(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.lrr=1", "unknown key 'inner.lrr'; nearest: inner.lr"),
        ("lr=1", "unknown key 'lr'; nearest: .*inner.lr"),
        ("inner.lr=0", "inner.lr: Input should be greater than 0"),
        ("inner.lr=fast", "inner.lr=fast: expected a number"),
        ("inner.size=big", "inner.size=big: cannot be read as"),
        ("mode=c", "mode: Input should be 'a' or 'b'"),
        ("flag", "must look like section.key=value"),
        ("mode.x=1", "unknown key 'mode.x'"),
    ],
)
def test_a_bad_override_is_refused_with_its_key(override, message):
    with pytest.raises(ConfigError, match=message):
        overridden(override)


def test_unknown_keys_of_a_file_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'inner.nam'; nearest: inner.name"):
        build(Outer, {"inner": {"nam": "x"}})


def test_the_quickstart_survives_being_written_and_read():
    config = load_recipe("quickstart", ["train.steps=7"])
    assert config.train.steps == 7
    assert build(RunConfig, tomllib.loads(dump_toml(config))) == config


def fields(model, prefix=""):
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for arm in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(arm, type) and issubclass(arm, BaseModel):
                yield from fields(arm, f"{prefix}{name}.")


def test_every_setting_is_described_and_none_means_none():
    for name, field in fields(RunConfig):
        assert field.description, name
        if type(None) in getattr(field.annotation, "__args__", ()):
            assert field.default is None, f"{name}: TOML has no null"
