"""Embeddings with ids and texts as a parquet file, which other engines read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax.files import outputs
from de_jax.retrieval.index import check_finite
from de_jax.types import InputError

ROWS_AT_ONCE = 16384
"""Rows of a row group."""


def check_writable(path: Path) -> Any:
    """pyarrow.

    Raises:
        InputError: pyarrow is not installed, or the file is there.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError("parquet needs pyarrow; pip install 'de_jax[tables]'.") from None
    if path.exists():
        raise InputError(f"{path} is there already; choose another name, or remove it.")
    return pyarrow


def write_parquet(
    path: Path,
    embeddings: Float[Any, "n D"],
    ids: Sequence[str],
    texts: Mapping[str, str],
    *,
    float16: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> None:
    """Writes the columns `id`, `text` and `embedding`, a list of D numbers; the file appears complete, by a rename.

    Args:
        path: absent.
        embeddings: finite; may be memory-mapped.
        ids: the documents' ids, parallel to the rows.
        texts: by document id.
        float16: writes half precision.
        progress: called with the number of rows just written.

    Raises:
        InputError: pyarrow is missing, the file is there, or a value is not finite.
    """
    arrow = check_writable(path)
    check_finite(embeddings, ids)
    dtype, dim = (np.float16 if float16 else np.float32), embeddings.shape[1]
    kind = arrow.list_(arrow.from_numpy_dtype(dtype), dim)
    schema = arrow.schema([("id", arrow.string()), ("text", arrow.string()), ("embedding", kind)])
    with outputs.atomic_file(path) as temporary, arrow.parquet.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(ids), ROWS_AT_ONCE):
            own, block = ids[start : start + ROWS_AT_ONCE], np.asarray(embeddings[start : start + ROWS_AT_ONCE], dtype)
            vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(block.ravel()), dim)
            writer.write_batch(arrow.record_batch([arrow.array(own), arrow.array([texts[one] for one in own]), vectors], schema))
            progress(len(own))
