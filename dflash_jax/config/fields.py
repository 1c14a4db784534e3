"""Builds configs from fields of the types that they declare."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

_T = TypeVar("_T")
_MOST = 2**31 - 1  # positions and ids are int32


def build(cls: type[_T], fields: Mapping[str, Any]) -> _T:
    """The config with these fields, which come from a file, where a width may stand as text or as 48.0.

    Raises:
        ValueError: For a field that is not of its declared type, not finite, or above int32.
    """
    hints = _hints(cls)
    for name, value in fields.items():
        if name not in hints:
            raise ValueError(f"{name}={value!r} is no field of {cls.__name__}")
        if not _fits(value, hints[name]):
            raise ValueError(f"{name}={value!r} must be of type {_spell(hints[name])}")
    return cls(**fields)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if kind is Literal:
        return isinstance(value, str) and value in args
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(v, args[0]) for v in value)
    if hint is int:
        return type(value) is int and abs(value) <= _MOST
    if hint is float:
        return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
    return type(value) is hint if hint in (bool, str) else isinstance(value, hint)


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
