"""A run as two compiled functions, their parameters and vocabularies, to embed texts where this library is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from de_jax.data.text.tokenizing import TOKENIZER_JSON_FILE, Tokenizer, bare, fields_of, prompt_of, spelt_out
from de_jax.files import outputs
from de_jax.interop import served_encoder
from de_jax.models.layers import compiling_for
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import Run
from de_jax.types import Array

PLATFORMS = ("cpu", "cuda", "tpu")


def write(folder: Path, run: Run) -> None:
    """Writes what `served_encoder` describes into an existing folder.

    The functions take any number of texts of any length. A GPU or TPU runs them without the fused kernels of this library.
    """
    arrays = dict(zip(paths.all_paths(run.params), map(np.asarray, jax.tree.leaves(run.params)), strict=True))
    settings = {}
    for tower, side in (("query", run.query), ("doc", run.doc)):
        own = {path: array for path, array in arrays.items() if path.split("/")[0] in (tower, "shared")}
        (folder / f"{tower}.bin").write_bytes(_exported(run, tower, own))
        settings[tower] = {
            "function": f"{tower}.bin",
            "parameters": list(own),
            "dim": run.model.query.embedding_dim,
            "max_length": side.max_length,
            **_tokenizer_settings(folder, side.tokenizer),
        }
    np.savez(folder / "parameters.npz", **arrays)  # type: ignore[arg-type]
    outputs.write_json(folder / "serving.json", settings)
    (folder / "encoder.py").write_bytes(Path(served_encoder.__file__).read_bytes())


def _exported(run: Run, tower: str, arrays: dict[str, np.ndarray]) -> bytes:
    def encode(arrays: dict[str, Array], tokens: Array) -> Array:
        return run.model.encode_rows(tower, paths.tree_of(arrays), tokens)[:, 0]

    texts, length = export.symbolic_shape("texts, length")
    shapes = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in arrays.items()}
    tokens = jax.ShapeDtypeStruct((texts, length), np.int32)
    with compiling_for("cpu"):  # wherever it is exported, without kernels of one platform
        return bytes(export.export(jax.jit(encode), platforms=PLATFORMS)(shapes, tokens).serialize())


def _tokenizer_settings(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    vocabulary = bare(tokenizer)
    name = f"tokenizers/{vocabulary.fingerprint[:16]}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    vocabulary.save(folder / name)
    if (file := folder / name / TOKENIZER_JSON_FILE).is_file():
        spelt_out(file)
    return {
        "tokenizer": name,
        "prompt": prompt_of(tokenizer),
        "fields": fields_of(tokenizer),
        "pad_id": tokenizer.pad_id,
        "prefix_ids": list(tokenizer.prefix_ids),
        "suffix_ids": list(tokenizer.suffix_ids),
    }
