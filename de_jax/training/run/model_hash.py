"""The hash that identifies a model in the manifests of its outputs."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from de_jax.types import Params


def model_hash(described: str, params: Params) -> str:
    """Hex SHA-256 of a model's shape, as `described`, and of its parameters: equal exactly when it computes the same."""
    digest = hashlib.sha256(described.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
