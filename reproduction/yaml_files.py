"""How YAML is read: plain data that people write by hand, such as the papers' tables. As strict as JSON is read (`reading`)."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from de_jax.files.reading import read_bytes
from de_jax.settings import Check, Mismatch
from de_jax.types import InputError

MAX_YAML_BYTES, MAX_DEPTH = 4 << 20, 64
_PlainLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast, where PyYAML was built with it


def read_yaml(path: str | Path, check: Check | None = None, *, mend: str = "correct the file") -> Any:
    """The value in a UTF-8 file of YAML 1.1, made of objects, lists, texts, numbers, dates, true, false and null.

    Besides malformed YAML, these are refused: a key that occurs twice in an object, an alias (`*name`), a tag that makes a Python
    object, and values more than `MAX_DEPTH` deep.

    Args:
        path: the file.
        check: a check of the value, such as `settings.Record`; by default every value passes.
        mend: the fix for a value that does not pass, for the error message.

    Raises:
        InputError: the file cannot be read, holds refused YAML, or does not pass the check; names the file, and the line or keys.
    """
    content = read_bytes(path, max_bytes=MAX_YAML_BYTES)
    try:
        text = content.decode("utf-8-sig")
        _check_events(text)
        value = yaml.load(text, Loader=_Strict)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{path}{line}: not valid YAML ({error.problem}).") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:  # a tag on another value: !!bool x
        raise InputError(f"{path}: not valid YAML ({(str(error).splitlines() or [type(error).__name__])[0]}).") from None
    try:
        return value if check is None else check(value)
    except Mismatch as error:
        raise InputError(f"{path}: {error}; {mend}.") from None


class _Strict(_PlainLoader):
    """PyYAML's loader of plain values, which alone would keep the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(number for number, key in enumerate(keys) if key in keys[:number])
            problem, mark = f"the key {keys[twice]!r} is there twice", node.value[twice][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return found


def _check_events(text: str) -> None:
    """Refuses aliases, which PyYAML would follow without end, and deep values before they are made."""
    depth = 0
    for event in yaml.parse(text, Loader=_PlainLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias; write its value out", event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_DEPTH} levels deep", event.start_mark)
