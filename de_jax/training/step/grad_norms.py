"""Norms of the gradient by groups of parameters, such as the layers at the bottom and those at the top."""

import re
from collections.abc import Callable, Mapping

import optax

from de_jax.training.optim import paths
from de_jax.types import InputError, Metrics, Params

THIRDS = "thirds"
"""In the place of patterns: those of `thirds`."""
_PARTS = ("embedder", "bottom", "middle", "top", "projection")
_LAYER = re.compile(r"((\w+)/encoder/layers_)(\d+)/.*")


def group_norms(params: Params, groups: Mapping[str, str] | str | None, whole: Params | None = None) -> Callable[[Params], Metrics]:
    """A function from gradients to the L2 norm of each group's; pure, to be called inside a step.

    Args:
        params: the tree that the gradients are of; arrays or their shapes.
        groups: a pattern over parameter paths by the group's name; groups may overlap and need not hold everything. `THIRDS` for
            those of `thirds`, None for no group.
        whole: the model's, where `params` are a part of them.

    Raises:
        InputError: a pattern matches nothing, or the groups of `THIRDS` are all empty.
    """
    patterns = thirds(params, whole) if isinstance(groups, str) else dict(groups or {})
    paths.check_patterns("gradient norm", list(patterns.values()), params)

    def norms(gradients: Params) -> Metrics:
        leaves = paths.by_path(gradients)
        return {
            name: optax.tree.norm([leaf for path, leaf in leaves.items() if paths.matches([pattern], path)])
            for name, pattern in patterns.items()
        }

    return norms


def thirds(params: Params, whole: Params | None = None) -> dict[str, str]:
    """The patterns of a dual encoder's embedder, the bottom, middle and top third of its layers, and its projection.

    As in ANCE (Xiong et al. 2021), figure 8. Each tower has its own thirds, and both count in one group. Of fewer than three
    layers some thirds hold none; a group without parameters is left out.

    Args:
        params: the parameters to group.
        whole: the model's, whose layers are counted; by default `params`.

    Raises:
        InputError: no group has parameters.
    """
    num_layers: dict[str, int] = {}
    for _, tower, layer in _layers(params if whole is None else whole):
        num_layers[tower] = max(num_layers.get(tower, 0), 1 + int(layer))
    prefixes: dict[str, dict[str, None]] = {name: {} for name in _PARTS}
    for prefix, tower, layer in _layers(params):
        third = 3 * (2 * int(layer) + 1) // (2 * num_layers[tower])
        prefixes[_PARTS[1 + third]][prefix + layer] = None
    for part in ("embedder", "projection"):
        prefixes[part] = dict.fromkeys(f"{tower}/{part}" for tower, parts in params.items() if parts.get(part))
    patterns = {name: f"({'|'.join(of_group)})/.*" for name, of_group in prefixes.items() if of_group}
    if not patterns:
        raise InputError(
            f"gradient norm groups are {THIRDS!r}, which are of a dual encoder's embedder, layers and projection, but none of them "
            "is trained here; give a pattern for each name, as {'top': '.*/x/.*'}."
        )
    return patterns


def _layers(params: Params) -> list[tuple[str, ...]]:
    """The layer of every parameter that is in one: its path up to the number, its tower, and the number."""
    return [match.groups() for path in paths.all_paths(params) if (match := _LAYER.fullmatch(path))]
