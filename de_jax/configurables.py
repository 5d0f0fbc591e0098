"""The one list of what gin can see, and how a recipe becomes settings. A binding that nothing reads is an error."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import gin

from de_jax import gin_settings, settings
from de_jax.data.expansion.curriculum import Curriculum
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.pair_store import stored_pairs
from de_jax.data.sources.seqio_batches import seqio_pairs
from de_jax.data.sources.table_pairs import table_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.gin_settings import Macro, Reference, Setting, Settings, is_literal, replaced, values_in
from de_jax.interop.fine_tuning import pretrained_sharing, pretrained_tokenizer, pretrained_tower
from de_jax.losses.combination import combined, guided, matryoshka
from de_jax.losses.distillation import kl_distillation, margin_mse, relevance_weighted
from de_jax.losses.in_batch import in_batch_softmax, nce, samtone
from de_jax.losses.mined import ance, dance, sampled_softmax
from de_jax.losses.pair_loss import pair
from de_jax.mining.miner import Miner
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Devices, HardNegatives, Initialization, Logging, Optimization, Recipe
from de_jax.training.hooks.alignment import Alignment
from de_jax.training.hooks.collapse import CollapseAlarm
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.optim.lamb import ance_lamb, lamb
from de_jax.training.optim.optimizer import adafactor, adamw, cosine, linear, rsqrt
from de_jax.training.step.adapters import Lora
from de_jax.training.step.negative_cache import NegativeCache
from de_jax.types import InputError

MODELS = (
    *(DualEncoder, TowerConfig, T5Config, BertConfig, RotaryConfig, Lora),
    *(pretrained_tower, pretrained_sharing, pretrained_tokenizer),
)
LOSSES = (
    *(in_batch_softmax, samtone, pair, nce, ance, dance, sampled_softmax),
    *(margin_mse, kl_distillation, relevance_weighted, combined, matryoshka, guided),
)
OPTIMIZERS = (adafactor, adamw, lamb, ance_lamb, linear, cosine, rsqrt)
DATA = (beir_pairs, seqio_pairs, stored_pairs, table_pairs, mixed_pairs, Curriculum)
MINERS = (Miner, NegativeCache)
MESH = (make_mesh,)
HOOKS = (Alignment, CollapseAlarm)

GROUPS = (PairsOptions, Optimization, Initialization, HardNegatives, Devices, Logging)
"""Settings that several parts share: `PairsOptions.batch_size` is for every source of pairs, `beir_pairs.batch_size` for BEIR's."""

_REPLACEABLE = (*MODELS, *LOSSES, *DATA, *MINERS, *HOOKS)
_own: dict[str, Any] = {}


def register(*more: tuple[str, Any]) -> None:
    """Makes functions and classes known to gin under the names given, so that `train.loss = @name` finds them.

    A repeated name replaces the former function, so that a notebook's cell can be corrected and run again.
    """
    _own.update(more)


def known() -> dict[str, Any]:
    """All that gin can see, by name."""
    parts = (*MODELS, *LOSSES, *OPTIMIZERS, *DATA, *MINERS, *MESH, *HOOKS, *GROUPS)
    return {**{part.__name__: part for part in parts}, "train": Recipe, **_own}


class Built(NamedTuple):
    """A recipe, and the settings that it was built with."""

    recipe: Recipe
    settings: dict[str, Any]  # by name: the value as it was written, or the default
    modules: Sequence[str] = ()  # imported for them, from outside the package

    def as_gin(self) -> str:
        """Every setting that was read, as a gin file."""
        by_part: dict[str, list[str]] = {}
        for name, value in sorted(self.settings.items(), key=lambda item: item[0].lower()):
            by_part.setdefault(name.rpartition(".")[0], []).append(f"{name} = {value!r}")
        imports = "".join(f"import {module}\n" for module in self.modules) + ("\n" if self.modules else "")
        parts = (f"# {part or 'Macros'}\n" + "".join(f"{line}\n" for line in lines) for part, lines in by_part.items())
        return imports + "\n".join(parts)


def read(gin_files: Sequence[str], bindings: Sequence[str] = (), *, allow_imports: bool = False) -> Settings:
    """What `gin_settings.read` gives, once every setting's name and value were checked."""
    return _Builder(gin_settings.read(gin_files, bindings, allow_imports=allow_imports)).bound


def build(
    gin_files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    allow_imports: bool = False,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> Built:
    """The recipe that gin files and `name=value` settings describe; see `gin_settings.read`.

    `also` is known to these files beside `known()`, by name; "train" in it replaces `Recipe`.

    Raises:
        InputError: what cannot be read, an unknown name, a missing setting, a value that its setting cannot have or that does not
            fit the others, or a setting that nothing reads.
    """
    builder = _Builder(gin_settings.read(gin_files, bindings, allow_imports=allow_imports), also)
    recipe = builder.call("train", "")
    builder.check_all_read()
    return Built(recipe, builder.operative, builder.bound.modules)


def read_recipe(gin_files: Sequence[str], bindings: Sequence[str] = (), *, allow_imports: bool = False) -> Recipe:
    """The recipe of `build` alone."""
    return build(gin_files, bindings, allow_imports=allow_imports).recipe


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments that `parser` knows, and the recipe's settings, written --gin.NAME=VALUE, as "NAME=VALUE"."""
    parser.epilog = "--gin.NAME=VALUE sets any setting of the recipe, for example --gin.train.num_steps=100."
    parser.add_argument("--allow_imports", action="store_true", help="let gin files import modules outside de_jax, which is code")
    args, rest = parser.parse_known_args(argv)
    for argument in rest:
        if not argument.startswith("--gin."):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value")
    return args, [argument.removeprefix("--gin.") for argument in rest]


class _Builder:
    """Makes objects from bindings, and remembers the settings that it read; names and values are checked at once."""

    def __init__(self, bound: Settings, also: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.bound, self._known = bound, {**known(), **also}
        self._read: set[Setting] = set()
        self._in_effect: set[Setting] = set()
        self._hidden_by: dict[Setting, Setting] = {}
        self._called: set[str] = set()
        self._open: list[str] = []
        self.operative: dict[str, Any] = {}
        for setting, (value, place, is_typed) in bound.items():
            try:
                self._check(setting, value)
            except InputError as error:
                raise (error if is_typed else InputError(f"{place}: {error}")) from None

    def call(self, name: str, scope: str) -> Any:
        """The result of a configurable with its settings in a scope."""
        configurable, arguments = self._known[name], self._arguments(name, scope)
        missing = [
            parameter.name
            for parameter in inspect.signature(configurable).parameters.values()
            if parameter.default is parameter.empty and parameter.kind in _NAMED and parameter.name not in arguments
        ]
        if missing and name == "train":
            raise InputError(f"the recipe does not set train.{missing[0]}; add it to the gin file.")
        if missing:
            raise InputError(
                f"the recipe cannot be used: @{name}() has no value for {missing[0]}; set {name}.{missing[0]}, or write @{name} "
                "without parentheses to pass a function."
            )
        return configurable(**arguments)

    def check_all_read(self) -> None:
        """Refuses unread settings, such as misplaced or leftover ones.

        A file may hold the settings of a part that a later file or setting replaces or takes out: a model, a loss, a source of
        data, a miner, an alarm. A setting typed on the command line must be read, and have an effect.
        """
        replaced = {part.__name__ for part in _REPLACEABLE} - self._called
        referred = {part.name for bound in self.bound.values() for part in values_in(bound.value) if isinstance(part, Macro)}
        unread = [
            str(setting)
            for setting, bound in self.bound.items()
            if setting not in self._read
            and (bound.is_typed or setting.name not in replaced | (set() if setting.parameter else referred))
        ]
        if unread:
            raise InputError(f"nothing in this recipe reads {', '.join(sorted(unread))}; remove the setting or correct its name.")
        for typed, nearer in self._hidden_by.items():
            if self.bound[typed].is_typed and typed not in self._in_effect:
                raise InputError(f"{typed} has no effect, because {self.bound[nearer].place} sets {nearer}; set that instead.")

    def _arguments(self, name: str, scope: str) -> dict[str, Any]:
        label = str(Setting(scope, name))
        if label in self._open:
            raise InputError(f"@{label} refers to itself, through {' and '.join(self._open)}; remove one of the references.")
        self._open.append(label)
        self._called.add(name)
        configurable, collected = self._known[name], self._collected(name, scope)
        self._in_effect.update(collected.values())
        found = {key: self.bound[setting] for key, setting in collected.items()}
        allowed = hints_of(configurable) or {}
        defaults = {key: default for key, default in defaults_of(configurable).items() if is_literal(default)}
        written = defaults | {key: bound.value for key, bound in found.items()}
        self.operative |= {str(Setting(scope, name, key)): value for key, value in written.items()}
        values = {key: self._value(bound.value, scope) for key, bound in found.items()}
        for key, value in values.items():
            if key in allowed:  # once more, as a reference can be of the wrong kind
                settings.check_value(str(Setting(scope, name, key)), value, allowed[key])
        arguments = nested(configurable, values)
        self._open.pop()
        return arguments

    def _collected(self, name: str, scope: str) -> dict[str, Setting]:
        """The settings that hold for a configurable in a scope, by parameter.

        Its own win over those of its groups, and otherwise those of a nearer scope.
        """
        found: dict[str, Setting] = {}
        for group in groups_of(self._known[name]).values():
            found |= self._collected(group.__name__, scope)
        parts = scope.split("/") if scope else []
        for outer in ("/".join(parts[:number]) for number in range(len(parts) + 1)):
            own = [setting for setting in self.bound if setting.parameter and (setting.scope, setting.name) == (outer, name)]
            self._read.update(own)
            self._hidden_by |= {found[setting.parameter]: setting for setting in own if setting.parameter in found}
            found |= {setting.parameter: setting for setting in own}
        return found

    def _value(self, value: Any, scope: str) -> Any:
        """A value with its references and macros resolved."""

        def resolve(part: Any) -> Any:
            if isinstance(part, Macro):
                return self._value(self._macro(part), scope)
            if not isinstance(part, Reference):
                return part
            inner = part.scope or scope
            if part.is_called:
                return self.call(part.name, inner)
            return functools.partial(self._known[part.name], **self._arguments(part.name, inner))

        return replaced(value, resolve)

    def _macro(self, macro: Macro) -> Any:
        setting = Setting("", macro.name)
        self._read.add(setting)
        self.operative[macro.name] = self.bound[setting].value
        return self.bound[setting].value

    def _check(self, setting: Setting, value: Any) -> None:
        """Raises InputError for an unknown setting or an invalid value. The value of a reference is checked when it is called."""
        for part in values_in(value):
            if isinstance(part, Reference):
                self._find(part.name, f"{setting} is {part!r}, but")
        value = self._without_macros(value, ())
        if not setting.parameter:
            return
        allowed = hints_of(self._find(setting.name, f"{setting} cannot be set:"))
        if allowed is not None and setting.parameter not in allowed:
            of_data = [group.__name__ for group in (PairsOptions,) if setting.parameter in (hints_of(group) or {})]
            near = f"; set {of_data[0]}.{setting.parameter}" if of_data else settings.meant(setting.parameter, allowed)
            raise InputError(f"{setting.name} has no setting '{setting.parameter}'{near}.")
        if allowed and not any(isinstance(part, Reference | Macro) for part in values_in(value)):
            settings.check_value(str(setting), value, allowed[setting.parameter])

    def _find(self, name: str, why: str) -> Any:
        if name not in self._known and (found := _decorated(name)) is not None:
            self._known[name] = found
        if name not in self._known:
            raise InputError(f"{why} recipes have no setting called '{name}'{settings.meant(name, self._known)}.")
        return self._known[name]

    def _without_macros(self, value: Any, above: tuple[str, ...]) -> Any:
        """A value with each %NAME replaced by what NAME stands for."""

        def replace(part: Any) -> Any:
            if not isinstance(part, Macro):
                return part
            bound = self.bound.get(Setting("", part.name))
            if bound is None or part.name in above:
                what = "nothing" if bound is None else "itself"
                raise InputError(f"%{part.name} stands for {what}; write {part.name} = and its value.")
            return self._without_macros(bound.value, (*above, part.name))

        return replaced(value, replace)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def groups_of(configurable: Any) -> dict[str, Any]:
    """The groups of settings that a configurable takes, by parameter."""
    return {name: hint for name, hint in settings.hints(configurable).items() if hint in GROUPS}


def hints_of(configurable: Any) -> dict[str, Any] | None:
    """The annotations of what gin can set, by name, those of its groups included; None where anything may be set."""
    parameters = inspect.signature(configurable).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    annotated = settings.hints(configurable)
    found = {parameter.name: annotated.get(parameter.name, Any) for parameter in parameters}
    for group in groups_of(configurable).values():
        found |= hints_of(group) or {}
    return found


def defaults_of(configurable: Any) -> dict[str, Any]:
    """What holds where nothing is set, by name, groups resolved."""
    found: dict[str, Any] = {}
    for group in groups_of(configurable).values():
        found |= defaults_of(group)
    parameters = inspect.signature(configurable).parameters.values()
    own = {one.name: one.default for one in parameters if one.default is not one.empty and one.name not in groups_of(configurable)}
    return found | own


def nested(configurable: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the settings of each group put into it."""
    for parameter, group in groups_of(configurable).items():
        own = {name: values.pop(name) for name in hints_of(group) or () if name in values}
        if parameter not in values:
            values[parameter] = group(**own)
        elif own and isinstance(values[parameter], group):
            values[parameter] = dataclasses.replace(values[parameter], **own)
    return values


def _decorated(name: str) -> Any:
    """A function or class registered with `@gin.configurable` in a module that a gin file imports; None for an unknown name."""
    try:
        return gin.get_configurable(name).__wrapped__
    except (ValueError, AttributeError):
        return None
