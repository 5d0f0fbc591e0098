"""Writes the embeddings of a corpus, with ids and texts, for other search engines; prints one JSON object.

de-jax export_index --run_dir=runs/sde --dataset_dir=data/beir/scifact --to=parquet --out=scifact.parquet
de-jax export_index --run_dir=runs/sde --dataset_dir=data/beir/scifact --to=milvus --uri=corpus.db
de-jax search --run_dir=runs/sde --dataset_dir=data/beir/scifact --index=milvus:corpus.db

parquet has the columns id, text and embedding. For Milvus, give a server's address, or a file ending in .db, which Milvus Lite
opens in this process. `search` and `evaluate_beir` use either with --index=milvus:URI. $MILVUS_TOKEN holds a server's token. Repeat
a stopped upload to continue it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax import arguments, command
from de_jax.data.text import beir, input_policy
from de_jax.files import outputs
from de_jax.files.outputs import progress_bar
from de_jax.retrieval import milvus_index
from de_jax.retrieval.index import check_finite
from de_jax.retrieval.searcher import embedded_corpus
from de_jax.types import InputError

ROWS_AT_ONCE = 16384
"""Rows of a row group of a parquet file."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    params = {name: _number(name, value) for name, value in arguments.named("--index_param", args.index_param).items()}
    if args.to == "milvus":
        milvus_index.require()
        if not args.uri:
            raise InputError("--uri is missing; give the address of a Milvus server, or a file ending in .db.")
    else:
        if not args.out:
            raise InputError("--out is missing; name the parquet file.")
        _pyarrow_for(args.out)
    corpus = beir.find_file(args.dataset_dir, "corpus")
    docs, _ = beir.read_texts(corpus, with_title=True, skip_empty=args.skip_empty)
    texts = dict(zip(*docs, strict=True))
    run = arguments.model(args)
    folder, ids, embeddings = embedded_corpus(run, corpus, embeddings_dir=args.embeddings_dir, skip_empty=args.skip_empty)
    beir.require_known(ids, texts, f"{folder}: documents that are not in {corpus}")
    report: dict[str, Any] = {"step": run.step, "num_rows": len(ids), "dim": embeddings.shape[1]}
    with progress_bar(total=len(ids), desc=args.to, unit=" rows", delay=0.5) as bar:
        if args.to == "milvus":
            options = {"float16": args.float16, "index_type": args.index_type, "index_params": params, "progress": bar.update}
            report |= {"uri": args.uri, **milvus_index.upload(args.uri, folder, embeddings, ids, texts, **options)}
        else:
            _write_parquet(args.out, embeddings, ids, texts, float16=args.float16, progress=bar.update)
            report |= {"out": str(args.out)}
    print(json.dumps(report))


def _pyarrow_for(path: Path) -> Any:
    """pyarrow. Raises InputError: pyarrow is not installed, or the file is there."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError("parquet needs pyarrow; pip install 'de_jax[tables]'.") from None
    if path.exists():
        raise InputError(f"{path} is there already; choose another name, or remove it.")
    return pyarrow


def _write_parquet(
    path: Path,
    embeddings: Float[Any, "n D"],
    ids: Sequence[str],
    texts: Mapping[str, str],
    *,
    float16: bool,
    progress: Callable[[int], object],
) -> None:
    """Writes the columns `id`, `text` and `embedding`, a list of D numbers; the file appears complete, by a rename."""
    arrow = _pyarrow_for(path)
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


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise InputError(f"--index_param {name} is {value!r}; give a number.")
    return int(value)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "that embeds")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table with the corpus")
    parser.add_argument("--to", required=True, choices=("parquet", "milvus"), help="file format or engine to write")
    parser.add_argument("--out", type=Path, help="a new file, for parquet")
    parser.add_argument("--uri", type=str, help="Milvus: an address such as http://localhost:19530, or a file ending in .db")
    parser.add_argument("--embeddings_dir", help="embeddings from encode_corpus; default the run's own")
    parser.add_argument("--float16", action="store_true", help="write half precision; Milvus Lite does not support it")
    parser.add_argument("--index_type", default="FLAT", help="Milvus's index, such as FLAT (default, exact), HNSW or IVF_FLAT")
    parser.add_argument(
        "--index_param", nargs="*", default=[], metavar="NAME=VALUE", help="parameters of Milvus's index, such as M=16"
    )
    input_policy.add_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
