"""Converts plain values into typed settings; errors have the dotted key of the wrong value."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NewType, TypeVar

import msgspec

from verl_profiling.errors import ConfigError, choices_hint

T = TypeVar("T")
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=threading.TIMEOUT_MAX)]
Size = NewType("Size", int)
"""A number of bytes, which may be written with a unit: ``"2GB"``, ``"512 MiB"``."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_BOUND = re.compile(r"Expected `\w+` (>=|>|<=|<) (\S+)")
_BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def build(cls: type[T], values: Any, key: str) -> T:
    """Return a dataclass made from a mapping or a ``DictConfig``.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; the dotted name of the key begins with
            ``key``.
    """
    kinds = field_types(typing.cast("Any", cls))
    if isinstance(values, cls):
        values = {name: getattr(values, name) for name in kinds}
    values = _plain(values, key)
    if not isinstance(values, Mapping):
        raise ConfigError(
            key, f"must be a mapping, is {type(values).__name__}; its keys: {', '.join(kinds)}"
        )
    prefix, arguments = f"{key}." if key else "", {}
    for name, value in values.items():
        if name not in kinds:
            hint = choices_hint(name, kinds) if kinds else "it has none"
            raise ConfigError(f"{prefix}{name}", f"unknown key; {hint}")
        arguments[name] = value_of(kinds[name], value, f"{prefix}{name}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error.key}", error.problem) from None


def value_of(kind: Any, value: Any, key: str) -> Any:
    """Return ``value`` converted to the type of a field.

    Raises:
        ConfigError: The value has another type, or is out of bounds.
    """
    value = _plain(value, key)
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = typing.get_args(kind) if is_union else (kind,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return build(option, value, key)
        if option is Size:
            if isinstance(value, str):
                value = _size(value, key)
            return value_of(NotNegative, value, key)
        if typing.get_origin(option) is dict and isinstance(value, Mapping):
            item = typing.get_args(option)[1]
            return {
                str(name): value_of(item, entry, f"{key}.{name}") for name, entry in value.items()
            }
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(key, _problem(str(error), value, options)) from None


def _plain(value: Any, key: str) -> Any:
    """Return plain values for containers of OmegaConf, for ranges,
    and for numbers and arrays of NumPy.
    """
    module = type(value).__module__.partition(".")[0]
    if module == "omegaconf":
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(key, str(error).partition("\n")[0]) from error
    if isinstance(value, list | tuple | range):
        return [_plain(item, key) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item, key) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if module == "numpy" else value


def _problem(error: str, value: Any, options: tuple[Any, ...]) -> str:
    """Return an error of msgspec in words for users, with a remedy if there is one."""
    if bound := _BOUND.match(error):
        return f"must be {_BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}, is {value}"
    lists = [option for option in options if typing.get_origin(option) in (tuple, list)]
    if isinstance(value, str) and str not in options and lists:
        first, _, last = value.partition("-")
        if first.isdecimal() and last.isdecimal():
            second = int(first) + 1
            more = f" {second}, ...," if int(last) > second else ""
            value = f"{first},{more} {last}"
        return f"{error}; write a list: [{value}]"
    if isinstance(value, int | float) and str in options:
        return f'{error}; write it with quotation marks: "{value}"'
    for option in options:
        for literal in (option, *typing.get_args(option)):
            if typing.get_origin(literal) is Literal:
                return f"{error}; choose from: {', '.join(map(str, typing.get_args(literal)))}"
    return error


def _size(text: str, key: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            key, f"{text!r} is not a size; write a number of bytes, or e.g. 2GB or 512MiB"
        )
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))
