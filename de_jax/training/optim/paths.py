"""Regular expressions over parameter paths: the one vocabulary for freezing, weight decay, learning rates and sharding."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from de_jax.types import InputError, Params


def path_of(key_path: tuple[Any, ...]) -> str:
    """A leaf's path as users write it, `query/encoder/layers_0/mlp/wo/kernel`."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in key_path)


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """`function(path, leaf)` over all leaves, in the same tree."""
    return jax.tree_util.tree_map_with_path(lambda key_path, leaf: function(path_of(key_path), leaf), tree)


def all_paths(params: Params) -> list[str]:
    """The path of every leaf."""
    return list(by_path(params))


def by_path(params: Params) -> dict[str, Any]:
    """The leaves by their paths."""
    return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def tree_of(leaves: Mapping[str, Any]) -> Params:
    """The inverse of `by_path`, for a tree of dicts."""
    tree: Params = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def owner_of(path: str, params: Collection[str]) -> str | None:
    """The parameter that an array of an optimizer's state belongs to, as its path ends with that one's; None for counts."""
    names = path.split("/")
    return next((tail for at in range(len(names)) if (tail := "/".join(names[at:])) in params), None)


def part_like(tree: Params, like: Params) -> Params:
    """The part of a tree that is in another tree of dicts too."""
    return {name: part_like(tree[name], below) if isinstance(below, dict) else tree[name] for name, below in like.items()}


def matches(patterns: Sequence[str], path: str) -> bool:
    """Whether one of the patterns matches the whole path."""
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def check_patterns(purpose: str, patterns: Sequence[str], params: Params) -> None:
    """Refuses a pattern that is no regular expression or matches no parameter; `purpose` is that of the pattern ("freeze")."""
    paths = all_paths(params)
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise InputError(f"{purpose} pattern {pattern!r} is not a regular expression: {error}.") from None
        if not any(compiled.fullmatch(path) for path in paths):
            towers = " and ".join(map(repr, params))
            raise InputError(
                f"{purpose} pattern {pattern!r} matches no parameter; the towers are {towers}, and a path looks like {paths[0]!r}."
            )
