"""Checks values of settings against their annotations: choices, types, finite numbers and ranges.

A setting is a field of a config class, or a keyword of a function that gin configures. Its annotation contains every check:
`Literal` for choices, `Annotated[int, Range(1)]` for a range. Arrays and tracers are passed over, so nothing is checked in a step.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from de_jax.types import InputError

F = TypeVar("F", bound=Callable[..., Any])
_LONGEST = 100
"""Characters of a value in a message."""


class Range(NamedTuple):
    """The numbers that a setting may be, both ends included; it stands in an annotation: `Annotated[int, Range(1)]`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # `low` itself is left out
    below: bool = False  # `high` itself is left out


PATH = "a path"
LocalPath = Annotated[str, PATH]
"""A path: "~/" is expanded, an address gs:// or s3:// is fetched, another address is refused. No other string is touched."""
LARGEST = 2**31 - 1
PositiveInt = Annotated[int, Range(1, LARGEST)]
NonNegativeInt = Annotated[int, Range(0, LARGEST)]
PositiveFloat = Annotated[float, Range(0.0, above=True)]
NonNegativeFloat = Annotated[float, Range(0.0)]
Share = Annotated[float, Range(0.0, 1.0)]
ShareBelowOne = Annotated[float, Range(0.0, 1.0, below=True)]
Seed = Annotated[int, Range(0, 2**32 - 1)]


def check_fields(record: Any) -> None:
    """Checks every field of a config; for `__post_init__`.

    Raises:
        InputError: names the field, its value and the allowed ones.
    """
    check(type(record), {name: getattr(record, name) for name in hints(record.__class__)})


def check(configurable: Any, values: Mapping[str, Any], name: str | None = None) -> None:
    """Checks values against the annotations of a class or function.

    Args:
        configurable: the class or function.
        values: by the name of its parameter; names that it does not have are passed over.
        name: of the configurable in messages; by default its own.

    Raises:
        InputError: names the setting, its value and the allowed ones.
    """
    known: dict[str, Any] = hints(configurable)
    for parameter, value in values.items():
        if parameter in known:
            check_value(f"{name or configurable.__name__}.{parameter}", value, known[parameter])


def check_value(name: str, value: Any, hint: Any) -> None:
    """Checks one value against an annotation; `name` is the setting's as the user wrote it."""
    if isinstance(value, np.ndarray | np.generic) and not value.ndim:
        value = value.item()
    if not _is_array(value) and (wanted := _wanted(value, hint)):
        raise InputError(f"{name} is {shown(value)}; it must be {wanted}.")


def is_valid(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value."""
    return not _wanted(value, hint)


def check_call(name: str, function: Callable[..., Any], *arguments: str, like: str, options: Sequence[str] = ()) -> None:
    """Whether a setting's function can be called with these arguments by place and these options by name, and lacks nothing then.

    Args:
        name: of the setting, as the user wrote it.
        function: the setting's value; arguments bound by `functools.partial` count as given.
        arguments: the function's arguments, in words for a message.
        like: a function that fits.
        options: names of keyword arguments.

    Raises:
        InputError: names the setting, the function, and a function that fits; or a bound argument that the function does not have.
    """
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(options))
    except (TypeError, ValueError):  # ValueError: `functools.partial` bound what does not fit
        _check_bound(function)
        given = ", ".join([*arguments, *options]) or "nothing"
        raise InputError(
            f"{name} is {shown(function)}, which cannot be called with {given} alone; take one such as {like}."
        ) from None


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that a misspelt one is near to, as a message ends; "" for none."""
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def checked(function: F, name: str | None = None) -> F:
    """A decorator that checks the keyword arguments of every call; `name` replaces the function's own in messages.

    Where an annotation is a `LocalPath`, in fields of a config too, the function gets the path of an address's copy.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        check(function, settings, name)
        known = hints(function)
        local = [_local(value, known.get(parameter)) for value, parameter in zip(args, signature.parameters, strict=False)]
        return function(*local, *args[len(local) :], **{key: _local(value, known.get(key)) for key, value in settings.items()})

    call.__signature__ = signature  # type: ignore[attr-defined]  # gin looks for defaults there
    return typing.cast(F, call)


def numeric(hint: Any) -> Callable[[str], Any]:
    """For `type=` of a command's argument: the number that a text is, checked by an annotation such as `PositiveInt`."""
    kind = (*typing.get_args(hint), hint)[0]

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        if wanted := _wanted(value, hint):
            raise argparse.ArgumentTypeError(f"is {text}; it must be {wanted}")
        return value

    return parse


@functools.cache
def hints(configurable: Any) -> dict[str, Any]:
    """The annotations of the settings that a class or function takes, by name."""
    has_fields = hasattr(configurable, "__dataclass_fields__") or hasattr(configurable, "_fields")
    target = configurable.__init__ if inspect.isclass(configurable) and not has_fields else configurable
    try:
        found = typing.get_type_hints(target, include_extras=True)
    except NameError:  # a user's own function, whose annotations are for a type checker alone
        return {}
    return {name: hint for name, hint in found.items() if name != "return" and typing.get_origin(hint) is not typing.ClassVar}


def name_of(function: Any) -> str:
    """The name of a function or class, also of one with bound arguments."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def bound(function: Callable[..., Any], parameter: str) -> Any:
    """The value that a function's parameter has where a call does not give it: what `functools.partial` bound, or its default.

    Raises:
        KeyError: it has no such parameter, or no value for it.
    """
    if isinstance(function, functools.partial):  # arguments bound by place are missing from its signature
        by_place = dict(zip(inspect.signature(function.func).parameters, function.args, strict=False))
        if parameter in by_place:
            return by_place[parameter]
    found = inspect.signature(function).parameters[parameter]
    if found.default is found.empty:
        raise KeyError(parameter)
    return found.default


def shown(value: Any) -> str:
    """A value as a message shows it: a function by its name, anything long cut."""
    if isinstance(value, functools.partial) or (callable(value) and hasattr(value, "__name__")):
        return name_of(value)
    text = re.sub(r"<(?:function|class) '?([\w.]+)'?[^>]*>", lambda match: f"{match[1].rpartition('.')[2]}", repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


LOCAL = "a path, or an address gs:// or s3://, because other addresses are not read"
"""The kind of a path."""


def _local(value: Any, hint: Any) -> Any:
    """A value with local copies in the place of addresses where its annotation is a `LocalPath`, in fields of a config too."""
    if isinstance(value, str) and _is_path(hint):
        if "://" not in value and not value.startswith("~"):
            return value
        from de_jax.files import addresses  # most paths are here

        return addresses.localized(value)
    if isinstance(value, list | tuple) and _is_path(hint) and all(isinstance(entry, str) for entry in value):
        return type(value)(_local(entry, hint) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = hints(type(value))
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: new for name, old in fields.items() if (new := _local(old, known.get(name))) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _is_path(hint: Any) -> bool:
    """Whether an annotation is a `LocalPath`, or a union with one."""
    return PATH in typing.get_args(hint) or any(map(_is_path, typing.get_args(hint)))


def _check_bound(function: Any) -> None:
    """Refuses an argument that `functools.partial` bound by a name that the function does not have."""
    if isinstance(function, functools.partial):
        signature = inspect.signature(function.func)
        for name in function.keywords:
            try:
                signature.bind_partial(**{name: None})
            except TypeError:
                raise InputError(f"{name_of(function)} has no setting '{name}'{meant(name, signature.parameters)}.") from None


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, numbers.Number | type)


def _wanted(value: Any, hint: Any) -> str | None:
    """The required value, or None if the value is valid."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and PATH in arguments:
        return "a string" if not _is_text(value) else LOCAL if _is_foreign(value) else None
    if origin is Annotated:
        ranges = [extra for extra in arguments[1:] if isinstance(extra, Range)]
        return _wanted(value, arguments[0]) or next(filter(None, (_outside(value, range_) for range_ in ranges)), None)
    if origin in (typing.Union, types.UnionType):
        return _wanted_of_several(value, arguments)
    if origin is Literal:
        return _wanted_choice(value, arguments)
    if origin in (tuple, list, collections.abc.Sequence):
        return _wanted_sequence(value, arguments, origin is tuple and Ellipsis not in arguments)
    if origin in (dict, collections.abc.Mapping):
        return _wanted_mapping(value, arguments)
    if origin is collections.abc.Callable or hint is Callable:
        return None if callable(value) else "a function"
    return _wanted_type(value, hint)


def _outside(value: float | int, allowed: Range) -> str | None:
    if value < allowed.low or (allowed.above and value == allowed.low):
        return f"{'more than' if allowed.above else 'at least'} {allowed.low:.12g}"
    if value > allowed.high or (allowed.below and value == allowed.high):
        return f"{'less than' if allowed.below else 'at most'} {allowed.high:.12g}"
    return None


def _wanted_of_several(value: Any, options: Sequence[Any]) -> str | None:
    found = [_wanted(value, option) for option in options]
    if None in found:
        return None
    wanted = [text for text, option in zip(found, options, strict=True) if option is not types.NoneType]
    # A string that is an address is refused as such, whatever else could stand there.
    wanted = [LOCAL] if LOCAL in wanted else wanted
    return " or ".join(map(str, wanted)) + (", or None" if types.NoneType in options else "")


def _wanted_choice(value: Any, choices: Sequence[Any]) -> str | None:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return None
    near = difflib.get_close_matches(value, [choice for choice in choices if isinstance(choice, str)], 1) if _is_text(value) else []
    hint = f" (did you mean {near[0]!r}?)" if near and len(choices) > 1 else ""
    *first, last = map(repr, choices)
    return (f"{', '.join(first)} or {last}" if first else last) + hint


def _wanted_sequence(value: Any, entries: Sequence[Any], is_fixed: bool) -> str | None:
    if _is_text(value):
        return f'a tuple, such as ("{value}",)'
    if not isinstance(value, collections.abc.Sequence):
        return "a tuple"
    if is_fixed and len(value) != len(entries):
        return f"a tuple of {len(entries)}"
    for number, entry in enumerate(value):
        if entries and (wanted := _wanted(entry, entries[number] if is_fixed else entries[0])):
            return f"a tuple with {wanted} in the place of {shown(entry)}"
    return None


def _wanted_mapping(value: Any, arguments: Sequence[Any]) -> str | None:
    if not isinstance(value, collections.abc.Mapping):
        return "a dictionary"
    for key, entry in value.items() if arguments else ():
        if wanted := _wanted(key, arguments[0]):
            return f"a dictionary with {wanted} in the place of the key {shown(key)}"
        if wanted := _wanted(entry, arguments[1]):
            return f"a dictionary with {wanted} in the place of {shown(entry)}"
    return None


def _wanted_type(value: Any, hint: Any) -> str | None:
    if hint is None or hint is types.NoneType:
        return None if value is None else "None"
    if hint is bool:
        return None if isinstance(value, bool) else "True or False"
    if hint is int:
        return None if _is_number(value, numbers.Integral) else _whole(value)
    if hint is float:
        if not _is_number(value, numbers.Real):
            return "a number"
        return None if _is_finite(value) else "a finite number"
    if hint is str:
        return None if _is_text(value) else "a string"
    if hint in (Any, object) or not inspect.isclass(hint):
        return None  # anything, or a type variable
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        is_fine = not isinstance(value, str | numbers.Number | tuple | list | dict | None)
    else:
        is_fine = isinstance(value, hint)
    return None if is_fine else f"{hint.__name__}(...)" if hasattr(hint, "__dataclass_fields__") else f"of the type {hint.__name__}"


def _is_foreign(path: str) -> bool:
    """Whether a path is an address that is not read."""
    if "://" not in path:
        return False
    from de_jax.files import addresses  # most paths are here

    return addresses.foreign(path) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _whole(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST
    return f"a whole number, written {int(value)}" if is_whole else "a whole number"
