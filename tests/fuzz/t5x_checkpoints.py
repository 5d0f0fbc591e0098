"""Readers of T5X checkpoints: msgpack with arrays inside or in zarr beside it, and Orbax's database.

The gzip chunks of zarr carry a checksum each. Arrays inside msgpack and values in Orbax's database carry none that the naive reader
could compare, so a flipped bit there is the file's value.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgpack
import numpy as np
from fuzz.models import random_params, shown
from fuzz.reader import Reader, naive_bytes, naive_text, plain, strict_json, written

from de_jax.interop import t5x
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig

SHARE = 0.7


def readers(folder: Path) -> list[Reader]:
    encoder = T5Config(vocab_size=8, model_dim=4, num_layers=1, num_heads=2, head_dim=2, mlp_dim=4, num_buckets=4, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=3)
    params = random_params(DualEncoder(tower, tower).shapes())
    shared = params["shared"]
    target = {"token_embedder": shared["embedder"], "encoder": shared["encoder"], "projection_layer": shared["projection"]}
    decoder = {"decoder": {"logits_dense": {"kernel": np.ones((4, 8), np.float32)}}}
    found = [_reader(folder, "inline", {**target, **decoder}, least_size=10**6), _reader(folder, "zarr", target, least_size=14)]
    return [*found, _orbax(folder, target)]


def _reader(folder: Path, name: str, target: Any, *, least_size: int) -> Reader:
    """A checkpoint whose matrices of so many values lie beside the file."""
    files: dict[str, Any] = {}

    def leaf(path: Any, array: np.ndarray) -> Any:
        if array.ndim < 2 or array.size < least_size:
            return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
        kept, rows = "target." + ".".join(key.key for key in path), len(array) // 2
        about = {"shape": array.shape, "chunks": (rows, *array.shape[1:]), "dtype": "<f4", "zarr_format": 2, "order": "C"}
        about |= {"compressor": {"id": "gzip", "level": 1}, "fill_value": None, "filters": None}
        files[f"{kept}/.zarray"] = json.dumps(about)
        for place in range(2):
            files[f"{kept}/{place}.0"] = gzip.compress(array[place * rows :][:rows].tobytes(), mtime=0)
        return {"driver": "zarr", "kvstore": {"driver": "gfile", "path": kept}, "metadata": {}}

    content = {"version": 3, "optimizer": {"state": {"step": 7}, "target": jax.tree_util.tree_map_with_path(leaf, target)}}
    files["checkpoint"] = msgpack.packb(content)
    kept = written(folder, f"t5x_{name}", files)
    return Reader(f"T5X, {name}", kept, tuple(files), lambda one: shown(t5x.read(one)), _naive, share=SHARE)


def _naive(folder: Path) -> Any:
    content = msgpack.unpackb(naive_bytes(folder / "checkpoint"))
    arrays = _naive_tree(folder, content["optimizer"]["target"])
    table, kernel = arrays["token_embedder/embedding"], arrays["encoder/layers_0/attention/query/kernel"]
    bias = arrays.get("encoder/relpos_bias/rel_embedding", arrays.get("encoder/layers_0/relpos_bias/rel_embedding"))
    encoder = T5Config(
        vocab_size=table.shape[0],
        model_dim=table.shape[1],
        num_layers=len({name.split("/")[1] for name in arrays if name.startswith("encoder/layers_")}),
        num_heads=bias.shape[0],
        head_dim=kernel.shape[1] // bias.shape[0],
        mlp_dim=arrays["encoder/layers_0/mlp/wo/kernel"].shape[0],
        num_buckets=bias.shape[1],
        activation="gated_gelu" if "encoder/layers_0/mlp/wi_0/kernel" in arrays else "relu",
        bias_per_layer="encoder/relpos_bias/rel_embedding" not in arrays,
        dtype="float32",
    )
    projection = arrays.get("projection_layer/kernel")
    tower = TowerConfig(
        encoder,
        projection_dim=None if projection is None else projection.shape[1],
        projection_bias=projection is not None and "projection_layer/bias" in arrays,
    )
    names = {"token_embedder": "embedder", "encoder": "encoder", "projection_layer": "projection"}
    parts = {name: name.split("/", 1) for name in arrays if not name.startswith("decoder/")}
    params = {f"shared/{names[part]}/{rest}": arrays[name].astype(np.float32) for name, (part, rest) in parts.items()}
    return plain([DualEncoder(tower, tower).to_json(), dict(sorted(params.items())), None, None, 512, 512])


def _naive_tree(folder: Path, node: Any, name: str = "") -> dict[str, np.ndarray]:
    if isinstance(node, msgpack.ExtType):
        shape, dtype, content = msgpack.unpackb(node.data)
        return {name: np.frombuffer(content, np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)}
    if "kvstore" in node:
        return {name: _naive_zarr(folder / Path(node["kvstore"]["path"]).name)}
    found: dict[str, np.ndarray] = {}
    for key, child in node.items():
        found |= _naive_tree(folder, child, f"{name}/{key}".lstrip("/"))
    return found


def _naive_zarr(folder: Path) -> np.ndarray:
    about = strict_json(naive_text(folder / ".zarray"))
    shape, chunks = about["shape"], about["chunks"]
    rows = []
    for place in range(-(-shape[0] // chunks[0])):
        raw = naive_bytes(folder / f"{place}{about.get('dimension_separator', '.')}0")
        rows.append(np.frombuffer(gzip.decompress(raw), about["dtype"]).reshape(chunks, order=about["order"]))
    return np.concatenate(rows)[: shape[0], : shape[1]]


def _orbax(folder: Path, target: Any) -> Reader:
    import orbax.checkpoint as ocp

    (folder / "t5x_orbax").mkdir()
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(folder / "t5x_orbax" / "state", {"target": target})
    files = (str(path.relative_to(folder / "t5x_orbax")) for path in sorted((folder / "t5x_orbax").rglob("*")) if path.is_file())
    return Reader("T5X, Orbax", folder / "t5x_orbax", tuple(files), lambda one: shown(t5x.read(one)), None, share=SHARE)
