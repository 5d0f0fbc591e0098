"""The one list of what gin can see, and how a recipe becomes settings. A binding that nothing reads is an error."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.resources
import inspect
import logging
import os
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from de_jax import gin_files as gin_files_
from de_jax import settings
from de_jax.data.curriculum import Curriculum
from de_jax.data.pair_store import stored_pairs
from de_jax.data.seqio_batches import seqio_pairs
from de_jax.data.training_set import beir_pairs
from de_jax.interop.fine_tuning import pretrained_tokenizer, pretrained_tower
from de_jax.losses.in_batch import in_batch_softmax, nce, samtone
from de_jax.losses.mined import ance, dance, sampled_softmax
from de_jax.losses.pair import pair
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval.miner import Miner
from de_jax.training.alignment import Alignment
from de_jax.training.collapse import CollapseAlarm
from de_jax.training.lamb import ance_lamb, lamb
from de_jax.training.negative_cache import NegativeCache
from de_jax.training.optimizer import adafactor, adamw, cosine, linear, rsqrt
from de_jax.training.sharding import make_mesh
from de_jax.types import InputError

MODELS = (DualEncoder, TowerConfig, T5Config, BertConfig, pretrained_tower, pretrained_tokenizer)
LOSSES = (in_batch_softmax, samtone, pair, nce, ance, dance, sampled_softmax)
OPTIMIZERS = (adafactor, adamw, lamb, ance_lamb, linear, cosine, rsqrt)
DATA = (beir_pairs, seqio_pairs, stored_pairs, Curriculum)
MINERS = (Miner, NegativeCache)
MESH = (make_mesh,)
HOOKS = (Alignment, CollapseAlarm)

RECIPES_DIR = str(importlib.resources.files("de_jax.gin_configs"))


def register(*more: tuple[str, Any]) -> None:
    """Makes everything above known to gin under its own name, and `more` under the names given.

    What is given again under a name replaces what had it, so that a notebook's cell can be mended and run again.
    """
    own = {configurable.__name__: configurable for configurable in (*MODELS, *LOSSES, *OPTIMIZERS, *DATA, *MINERS, *MESH, *HOOKS)}
    for name, configurable in {**own, **_registered, **dict(more)}.items():
        if _registered.get(name) is configurable:
            continue
        with gin.unlock_config(), gin.config.interactive_mode():
            gin.external_configurable(configurable, name=name, module="de_jax")
        _registered[name] = configurable
    # First, not last as gin's own function would have it: gin takes "models/x.gin" for a file of a Python package `models`.
    if RECIPES_DIR not in gin.config._LOCATION_PREFIXES:
        gin.config._LOCATION_PREFIXES.insert(0, RECIPES_DIR)
        gin.config._FILE_READERS.insert(0, (gin_files_.opened, os.path.isfile))


_GIN_ERRORS = (
    *(ValueError, SyntaxError, TypeError, OSError, AttributeError, ImportError, tokenize.TokenError),
    *(RecursionError, MemoryError),  # of values deep inside each other
)
_registered: dict[str, Any] = {}
_typed: set[str] = set()
"""Names of the settings that did not come from a file."""


def parse(gin_files: Sequence[str], bindings: Sequence[str], *, allow_imports: bool = False) -> None:
    """Reads recipes and then `name=value` settings, which win.

    Args:
        gin_files: paths, or names under the package's own `gin_configs`, such as "recipes/sde.gin".
        bindings: for example `train.num_steps=100`; a value that is not a gin literal is taken as a string.
        allow_imports: whether the files may import modules outside this package.

    Raises:
        InputError: a missing file, a syntax error, an import, a name that nothing has, or a value that its setting cannot have.
    """
    register()
    gin.clear_config()
    _typed.clear()
    _typed.update(binding.partition("=")[0].strip() for binding in bindings)
    files = [_find(name) for name in gin_files]
    places: dict[str, str] = {}
    for file in files:
        places |= gin_files_.check(file, _find_included, allow_imports=allow_imports)
    for file in files:
        with _told(file):
            gin.parse_config_file(file)
    with _told():
        gin.parse_config([_as_binding(binding) for binding in bindings])
    _check_values({name: place for name, place in places.items() if name not in _typed})
    with _told():
        gin.finalize()


@contextlib.contextmanager
def _told(file: str = "") -> Iterator[None]:
    """Makes a sentence with the name of the file of what gin raises."""
    try:
        logging.disable(logging.ERROR)  # gin logs every place that it looks for an included file in
        yield
    except _GIN_ERRORS as error:
        told = sentence(error)
        where = f" of {file}" if file not in told else ""
        raise InputError(f"the gin settings{where} cannot be used: {told}") from None
    finally:
        logging.disable(logging.NOTSET)


def sentence(error: Exception) -> str:
    """An error of gin, or of what it called, in one line; functions and classes have their names."""
    lines = [line for line in str(error).splitlines() if not line.lstrip().startswith("In call to configurable")]
    return re.sub(r"<(?:function|class) '?(?:[\w<>]+\.)*(\w+)[^>]*>", r"@\1", " ".join(" ".join(lines).split()))


def _check_values(places: Mapping[str, str]) -> None:
    """Checks the value of every binding by its annotation; a reference is checked when it is called.

    Args:
        places: file and line of the bindings that are in a file.
    """
    for (scope, name), values in gin.config._CONFIG.items():
        configurable = _registered.get(name.removeprefix("de_jax."))
        hints = settings.hints(configurable) if configurable else {}
        for parameter, value in values.items():
            label = _label(scope, name, parameter)
            try:
                value = _without_macros(value)
                if parameter in hints and not any(_references(value)):
                    settings.check_value(label, value, hints[parameter])
            except InputError as error:
                raise InputError(f"{places[label]}: {error}" if label in places else str(error)) from None


def _without_macros(value: Any, above: tuple[str, ...] = ()) -> Any:
    """A binding's value with each %NAME replaced by what NAME stands for."""
    if isinstance(value, gin.config.ConfigurableReference):
        if value.selector != "gin.macro":
            return value
        name = "/".join(value.scopes)
        bound = gin.config._CONFIG.get(value.config_key, {})
        if "value" not in bound or name in above:
            raise InputError(f"%{name} stands for {'itself' if name in above else 'nothing'}; write {name} = and its value.")
        return _without_macros(bound["value"], (*above, name))
    if isinstance(value, Mapping):
        return {key: _without_macros(entry, above) for key, entry in value.items()}
    return type(value)(_without_macros(entry, above) for entry in value) if isinstance(value, list | tuple) else value


def _references(value: Any) -> Iterator[Any]:
    """The references to configurables in a binding's value."""
    if isinstance(value, gin.config.ConfigurableReference):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _references(entry)


def setting(configurable: Any, parameter: str) -> Any:
    """The value that a recipe gives a configurable's parameter, or its default.

    Raises:
        KeyError: it has no such parameter.
    """
    default = inspect.signature(configurable).parameters[parameter].default
    bound = gin.get_bindings(configurable.__name__, resolve_references=False).get(parameter, default)
    return copy.deepcopy(bound)  # which is how gin calls what a reference names


def check_all_used(will_call: Any = None) -> None:
    """Refuses bindings that nothing has read, which is what a misplaced or leftover setting looks like.

    Call it once everything that a recipe configures has been called. A file may hold the settings of a part that a later file or
    setting replaces or takes out: a model, a loss, a miner, an alarm. A setting typed on the command line must be read.

    Args:
        will_call: a configurable that was not called yet; what its settings refer to counts as called with it.

    Raises:
        InputError: names the bindings.
    """
    # gin offers its tables as text only; the private ones are what that text is made of.
    bindings, used = gin.config._CONFIG, gin.config._OPERATIVE_CONFIG | _reads(will_call)
    parts = (*MODELS, *LOSSES, *MINERS, *HOOKS)
    replaceable = {f"de_jax.{configurable.__name__}" for configurable in parts} - {key[1] for key in used}
    unused = []
    for (scope, name), values in bindings.items():
        if name in replaceable:
            values = {parameter: value for parameter, value in values.items() if _label(scope, name, parameter) in _typed}
        read: set[str] = set().union(*(used[key] for key in used if key[1] == name and _applies(scope, key[0])))
        unused += [_label(scope, name, parameter) for parameter in values.keys() - read]
    if unused:
        raise InputError(f"nothing in this recipe reads {', '.join(sorted(unused))}; remove the setting or mend its name.")


def _reads(configurable: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings that a call of a configurable reads, and those that they refer to: by active scope and name, as gin has them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    waiting = [("", f"de_jax.{configurable.__name__}")] if configurable is not None else []
    while waiting:
        active, name = waiting.pop()
        if (active, name) in found:
            continue
        # gin looks a macro up by its whole scope, so both agree there too.
        read = {scope: values for (scope, other), values in gin.config._CONFIG.items() if other == name and _applies(scope, active)}
        found[active, name] = {parameter: None for values in read.values() for parameter in values}
        for value in (value for values in read.values() for value in values.values()):
            waiting += [("/".join(reference.scopes) or active, reference.configurable.selector) for reference in _references(value)]
    return found


def operative() -> str:
    """Every setting that was read, as a gin file."""
    return gin.operative_config_str(max_line_length=120)


def _label(scope: str, name: str, parameter: str) -> str:
    """A binding's name as a recipe writes it."""
    return scope if name == "gin.macro" else f"{scope}/{name}.{parameter}".lstrip("/").replace("de_jax.", "")


def _applies(scope: str, active: str) -> bool:
    """Whether a binding made in `scope` is seen by a call in the scope `active`."""
    return not scope or active == scope or active.startswith(scope + "/")


def _find(name: str) -> str:
    packaged = Path(RECIPES_DIR)
    for path in (Path(name), packaged / name):
        if path.is_file():
            return str(path)
    there = ", ".join(sorted(str(path.relative_to(packaged)) for path in packaged.glob("recipes/*.gin")))
    raise InputError(f"the gin file {name} does not exist; the recipes are {there}.")


def _find_included(name: str) -> str:
    """Where gin finds an included file."""
    found = (Path(prefix) / name for prefix in gin.config._LOCATION_PREFIXES)
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise InputError(f"the included file {name} does not exist, neither here nor in {RECIPES_DIR}.")
    return str(path)


def _as_binding(binding: str) -> str:
    """`a.b=c` as a gin line; a value that is no literal, reference or macro becomes a string."""
    name, separator, value = binding.partition("=")
    if not separator:
        raise InputError(f"the setting {binding!r} has no value; write --gin.name=value.")
    value = value.strip()
    if not value.startswith(("@", "%")):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            value = repr(value)
    return f"{name.strip()} = {value}"
