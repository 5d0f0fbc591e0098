"""Embeds the documents of a corpus with a trained run; repeat the command to continue after a stop.

de-jax encode_corpus --run_dir=runs/sde --dataset_dir=data/beir/scifact --out_dir=embeddings/scifact

Writes embeddings.npy (float32 [documents, D]), ids.json and, when complete, manifest.json. A run with several passages per document
(MaxP) writes a row for each passage, under the document's id. --expansion writes a row for each view of a document, or with
--expand_as=typical or document a row for each document:

de-jax encode_corpus --run_dir=runs/curriculum --dataset_dir=data/beir/medquad --out_dir=embeddings/medquad \\
    --expansion=queries/medquad --expand_as=typical
de-jax search --run_dir=runs/curriculum --dataset_dir=data/beir/medquad --embeddings_dir=embeddings/medquad

--engine=ray spreads the work over the machines of a Ray cluster, and --shard over jobs of any other kind.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.stores.corpus import cached_token_store
from de_jax.data.text import beir, input_policy
from de_jax.files import outputs
from de_jax.files.outputs import progress_bar
from de_jax.retrieval import encode, expanded_search
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.maxp import passages_of
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command; prints the folder, its size and where it came from as a JSON object."""
    args = _parse_args(argv)
    corpus = Path(args.corpus) if args.corpus else beir.find_file(args.dataset_dir, "corpus")
    if not corpus.is_file():
        raise InputError(f"{corpus} does not exist; give a corpus in .jsonl or .tsv, plain or .gz.")
    expansion, part = arguments.expansion(args), arguments.shard(args)
    if (part or args.engine) and expansion and expansion.is_typical:
        raise InputError("--shard does not support --expand_as=typical or document; encode in one job, or --expand_as=views.")
    if arguments.by_engine(args, "de_jax.tools.encode_corpus", argv):
        return
    run = arguments.model(args)
    docs = cached_token_store(corpus, run.doc.tokenizer, outputs.cache_dir() / "token_stores", skip_empty=args.skip_empty)
    doc = run.doc._replace(max_length=args.max_doc_length or run.doc.max_length)
    run = run._replace(doc=doc)
    options = {name: getattr(args, name) for name in ("tokens_per_batch", "length_multiple", "texts_per_shard")}
    texts = expanded_search.texts(run, docs, expansion) if expansion else passages_of(run, docs) or docs
    with progress_bar(total=texts.num_texts, desc="encode", unit=" texts", delay=0.5) as bar:
        options["progress"] = bar.update
        if expansion and expansion.is_typical:
            expanded_search.typical_to_dir(run, docs, texts, args.out_dir, normalize=expansion.normalizes(run), **options)
        else:
            encode.docs_to_dir(run, texts, args.out_dir, part=part, **options)
    if part:
        print(json.dumps({"shard": str(part)}))
        return
    _, embeddings, _ = open_embeddings(args.out_dir)
    report = {"out_dir": args.out_dir, "step": run.step, "num_docs": docs.num_texts, "dim": embeddings.shape[1]}
    report |= {"dtype": run.model.dtype, "max_doc_length": run.doc.max_length}
    rows = {"num_vectors": len(embeddings)} if texts is not docs else {}
    print(json.dumps({**report, **rows}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "with the document tower")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--dataset_dir", help="a BEIR folder or a table")
    texts.add_argument("--corpus", help="a corpus file, .jsonl or .tsv, plain or .gz")
    parser.add_argument("--out_dir", required=True, help="folder of the embeddings; new, empty or started by this command")
    parser.add_argument("--max_doc_length", type=int, help="tokens; default the run's")
    parser.add_argument("--tokens_per_batch", type=int, help="size of a micro-batch; default by device")
    parser.add_argument("--length_multiple", type=int, help="pad texts to multiples of this; default by length")
    parser.add_argument(
        "--texts_per_shard",
        type=int,
        default=encode.TEXTS_PER_SHARD,
        help="texts kept at a time; a stopped command continues after them",
    )
    input_policy.add_flags(parser)
    arguments.add_shard(parser)
    arguments.add_expansion(parser)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
