"""Typed settings: a pydantic model beside the class it configures, TOML files, dotted overrides.

Rules that every model here obeys: unknown keys are errors with the nearest names; a field has a
one-line description; a field that may be None has None as its default, because TOML has no null
and an absent key must mean the same after a file is written and read again.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from miles.errors import ConfigError

__all__ = ["Config", "apply_overrides", "build", "dump_toml", "read_toml"]


class Config(BaseModel):
    """Base of all settings: immutable, closed, described by the string below each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


C = TypeVar("C", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; ConfigError with the position when it is malformed."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def dump_toml(config: Config) -> str:
    """The whole resolved config as TOML. Keys that are None are left out."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def build(cls: type[C], data: Mapping[str, Any]) -> C:
    """Validate `data` into `cls`. Every problem is named by its dotted key, in one ConfigError."""
    unknown = [f"unknown key {key!r}{_suggest(key, cls)}" for key in _unknown_keys(cls, data)]
    if unknown:
        raise ConfigError("; ".join(unknown))
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(p) for p in e['loc']) or cls.__name__}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from error


def apply_overrides(cls: type[Config], data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `section.key=value` set, parsed by the field's declared type.

    A text field keeps the characters as typed; `none` is accepted where the field may be None.
    """
    result = _copy(data)
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} must look like section.key=value")
        annotation = _annotation(cls, key)
        *sections, last = key.split(".")
        table = result
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {section!r} is not a section")
        table[last] = _parse(key, raw, annotation)
    return result


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in data.items()}


def _annotation(cls: type[Config], key: str) -> Any:
    model: Any = cls
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if model is dict or typing.get_origin(model) is dict:
            return Any
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            raise ConfigError(f"unknown key {key!r}{_suggest(key, cls)}")
        model = model.model_fields[part].annotation
        if depth < len(parts) - 1:
            model = next((arm for arm in _arms(model) if arm is not type(None)), model)
    return model


def _parse(key: str, raw: str, annotation: Any) -> Any:
    arms = _arms(annotation)
    if type(None) in arms and raw.lower() == "none":
        return None
    literals = [arm for arm in arms if typing.get_origin(arm) is typing.Literal]
    if str in arms or Path in arms or (literals and all(isinstance(v, str) for v in typing.get_args(literals[0]))):
        return raw
    if float in arms and int not in arms:
        try:
            return float(raw)
        except ValueError as error:
            raise ConfigError(f"{key}={raw}: expected a number") from error
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError as error:
        if annotation is Any:
            return raw
        none = ", or `none` to leave it out" if type(None) in arms else ""
        raise ConfigError(f"{key}={raw}: cannot be read as {annotation}; write it as in TOML{none}") from error


def _arms(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _unknown_keys(cls: type[BaseModel], data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        field = cls.model_fields.get(key)
        if field is None:
            yield prefix + key
            continue
        models = [a for a in _arms(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if models and isinstance(value, Mapping):
            yield from _unknown_keys(models[0], value, f"{prefix}{key}.")


def _all_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield prefix + name
        for arm in _arms(field.annotation):
            if isinstance(arm, type) and issubclass(arm, BaseModel):
                yield from _all_keys(arm, f"{prefix}{name}.")


def _suggest(key: str, cls: type[BaseModel]) -> str:
    keys = list(_all_keys(cls))
    near = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    near += [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2] and k not in near]
    return f"; nearest: {', '.join(near[:4])}" if near else f"; there are: {', '.join(cls.model_fields) or 'none'}"
