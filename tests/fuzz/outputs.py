"""Readers of the folders that the library itself writes: stores, embeddings, indexes, mined negatives, evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.reader import (
    Reader,
    naive_bytes,
    naive_json,
    naive_load,
    naive_text,
    one_file,
    only,
    plain,
    strict_json,
    written,
)
from fuzz.text_files import PAIRS
from fuzz.vocabularies import sentencepiece_model
from letters import Letters

from de_jax.data.expansion import curriculum
from de_jax.data.negatives import generations, mined_negatives
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources import pair_store
from de_jax.data.stores import corpus, store_writer
from de_jax.evaluation import metrics
from de_jax.evaluation import report as report_
from de_jax.files import folders
from de_jax.retrieval import embedding_files, faiss_index
from de_jax.retrieval.vector_index import Arrays, VectorIndex

GUARDED = "guarded"
"""The part of a path below which folders keep their checksums."""


def readers(folder: Path) -> list[Reader]:
    return [*_stores(folder), _vector_index(folder), *_mined(folder), *_pairs(folder), *_evaluations(folder)]


def _stores(folder: Path) -> list[Reader]:
    texts = [("d1", "apple"), ("d2", "pear"), ("d3", "fig")]
    tokens = corpus.build_token_store(texts, Letters(), folder / "store", progress=False)
    writer = embedding_files.EmbeddingWriter(folder / "embeddings", {"num_texts": 3, "model": "m", "max_length": 8}, {"rows": 2})
    writer.append(np.arange(6, dtype=np.float32).reshape(3, 2))
    writer.finish(["d1", "d2", "d3"])
    embedding_files.keep_hashes(folder / "embeddings", np.arange(3, dtype=np.uint64))
    half = embedding_files.EmbeddingWriter(folder / "half", {"num_texts": 3, "model": "m"}, {"rows": 2})
    half.append(np.ones((2, 2), np.float32))
    faiss_index._save(folder / "index", lambda path: path.write_bytes(b"index"), ["d1"], "Flat", 2)  # type: ignore[arg-type, return-value]
    ranked = curriculum.RankedQueries(
        np.array([1, 0, 2], np.int32), np.array([1, 0.5, 2], np.float32), np.array([0, 2, 3], np.int64)
    )
    arrays = {"order.npy": ranked.order, "scores.npy": ranked.scores, "offsets.npy": ranked.offsets}
    written(folder, "ranked", {**arrays, "manifest.json": json.dumps({"format": curriculum.RANKED_QUERIES.format, "num_pairs": 2})})

    def read_store(one: Path) -> Any:
        found = corpus.open_token_store(one)
        facts = [found.vocab_size, found.prefix_ids, found.suffix_ids, found.tokenizer_fingerprint, found.content_hash]
        return plain([found.tokens, found.offsets, list(found.ids), *facts, found.rows_of(["d2"])])

    def naive_store(one: Path) -> Any:
        found = json.loads(naive_text(one / "manifest.json"))
        facts = [found[name] for name in ("vocab_size", "prefix_ids", "suffix_ids", "tokenizer_fingerprint", "content_hash")]
        ids = [text_id.decode() for text_id in naive_load(one / "ids.npy").tolist()]
        row = np.array([ids.index("d2")]) if "d2" in ids else np.array([-1])
        return plain([naive_load(one / "tokens.npy"), naive_load(one / "offsets.npy"), ids, *facts, row])

    def read_embeddings(one: Path) -> Any:
        ids, embeddings, manifest = embedding_files.open_embeddings(one)
        return plain([ids, np.asarray(embeddings), manifest.get("model"), manifest.get("max_length")])

    def naive_embeddings(one: Path) -> Any:
        manifest, ids = (json.loads(naive_text(one / name)) for name in ("manifest.json", "ids.json"))
        return plain([ids, naive_load(one / "embeddings.npy"), manifest.get("model"), manifest.get("max_length")])

    def read_half(one: Path) -> Any:
        return embedding_files.EmbeddingWriter(one, {"num_texts": 3, "model": "m"}, {"rows": 2}).num_done

    names = ("factory", "num_docs", "dim")
    assert tokens.num_texts == 3
    return [
        Reader("token store", folder / "store", ("manifest.json", *store_writer.ARRAYS), read_store, naive_store),
        Reader(
            "embeddings", folder / "embeddings", ("manifest.json", "ids.json", "embeddings.npy"), read_embeddings, naive_embeddings
        ),
        Reader(
            "half of the embeddings",
            folder / "half",
            ("progress.json",),
            read_half,
            lambda one: json.loads(naive_text(one / "progress.json"))["num_done"],
        ),
        Reader(
            "index",
            folder / "index",
            ("manifest.json", "ids.json"),
            lambda one: only(faiss_index.SAVED_INDEX.open(one, is_thorough=True), *names),
            lambda one: naive_json(one / "manifest.json", *names),
            ("ids.json",),
        ),
        Reader(
            "ranked queries",
            folder / "ranked",
            ("manifest.json", *arrays),
            lambda one: plain([np.asarray(array) for array in curriculum._open(one)]),
            lambda one: plain([naive_load(one / f"{name}.npy") for name in ("order", "scores", "offsets")]),
        ),
    ]


def _vector_index(folder: Path) -> Reader:
    docs, doc_rows = np.array([[1, 2, -3], [0.5, -1, 4], [2, 2, 2]], np.float32), np.array([0, 0, 1])
    VectorIndex.build(docs, ["d1", "d2"], precision="int8", doc_rows=doc_rows).save(folder / "vectors")
    files = [f"{name}.npy" for name in Arrays._fields]

    def read(one: Path) -> Any:
        found = VectorIndex.load(one)
        return plain(
            [found.ids, found.precision, found.dim, *(None if part is None else np.asarray(part) for part in found._arrays)]
        )

    def naive(one: Path) -> Any:
        manifest, ids = (json.loads(naive_text(one / name)) for name in ("manifest.json", "ids.json"))
        arrays = [naive_load(one / file) if file.removesuffix(".npy") in manifest["arrays"] else None for file in files]
        return plain([ids, manifest["precision"], manifest["dim"], *arrays])

    return Reader("vector index", folder / "vectors", ("manifest.json", "ids.json", *files), read, naive)


def _mined(folder: Path) -> list[Reader]:
    lines = [Mined(query, doc, ["d3"], []) for query, doc in PAIRS]
    generations.write_lines(folder / "negatives", 1, lines, {"docs": "a", "checkpoint_step": 3, "statistics": {"rank": 2.5}})
    switches = '{"step": 0, "generation": 1}\n{"step": 9, "generation": 2}\n'

    def read(one: Path) -> Any:
        generation = generations.open_generation(one, 1)
        return plain(
            [
                list(generations.read(generation).lines()),
                generation.manifest.get("checkpoint_step"),
                generation.manifest.get("statistics"),
            ]
        )

    def naive(one: Path) -> Any:
        manifest = json.loads(naive_text(one / "000001/manifest.json"))
        arrays = {name: naive_load(one / f"000001/{name}.npy") for name in names}
        ids = {kind: [text_id.decode() for text_id in arrays[f"{kind}_ids"].tolist()] for kind in ("query", "doc")}
        spelt = {
            name: [[ids[kind][row] for row in rows if row >= 0] for rows in arrays[name].tolist()]
            for name, kind in (("neg_docs", "doc"), ("neg_queries", "query"))
        }
        records = [
            [ids["query"][query], ids["doc"][doc], spelt["neg_docs"][row], spelt["neg_queries"][row]]
            for row, (query, doc) in enumerate(arrays["pairs"].tolist())
        ]
        return plain([records, manifest.get("checkpoint_step"), manifest.get("statistics")])

    def naive_switches(path: Path) -> Any:
        """A last line that was cut off never came into force."""
        found = []
        *whole, last = naive_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n") if path.exists() else [b""]
        for number, raw in enumerate((*whole, last)):
            try:
                record = strict_json(raw.decode()) if raw.strip() else {}
                switch = [record[name] for name in ("step", "generation")] if raw.strip() else []
                if len(record) > len(switch) or not all(re.fullmatch(r"\d+", repr(one)) for one in switch):
                    raise ValueError("no number")
            except (ValueError, TypeError, KeyError, RecursionError):
                if number < len(whole):
                    raise
                break
            found += [switch] if switch else []
        return plain(found)

    names = ("pairs", "neg_docs", "neg_queries", "query_ids", "doc_ids")
    parts = tuple(f"000001/{name}.npy" for name in names)
    return [
        Reader("generation", folder / "negatives", ("000001/manifest.json", *parts), read, naive, parts),
        one_file(
            folder,
            "switches",
            "switches.jsonl",
            switches,
            lambda path: plain(mined_negatives.read_switches(path)),
            naive_switches,
        ),
    ]


def _pairs(folder: Path) -> list[Reader]:
    """Of the stores and vocabularies inside there are readers already."""
    for side, texts in (("queries", ["apple", "pear"]), ("docs", ["fig", "plum"])):
        rows = [(f"{side[0]}{number}", text) for number, text in enumerate(texts)]
        corpus.build_token_store(rows, Letters(), folder / "pairs" / side, progress=False)
    for tower in ("query", "doc"):
        written(folder / "pairs", f"{tower}_tokenizer", {"spiece.model": sentencepiece_model()})
    arrays = {"pairs": np.array([[0, 1], [1, 0], [1, 1]]), "neg_docs": np.array([[0, -1], [1, 0], [-1, -1]])}
    parts = [pair_store.Part("a", 0.5, 2), pair_store.Part("b", 2, 1)]
    pair_store.save(folder / "pairs", parts=parts, arrays=arrays, dev_qrels={"q0": {"d1": 1}}, made_from="a and b")

    def read(one: Path) -> Any:
        found = pair_store.open_pair_store(one)
        parts = [part._asdict() for part in found.parts]
        return plain([parts, found.pairs, found.neg_docs, found.neg_queries, found.dev_qrels, found.made_from])

    def naive(one: Path) -> Any:
        manifest = json.loads(naive_text(one / "manifest.json"))
        there = [naive_load(one / f"{name}.npy") if f"{name}.npy" in manifest["file_sizes"] else None for name in names]
        parts = [{name: part[name] for name in pair_store.Part._fields} for part in manifest["parts"]]
        return plain([parts, *there, {"q0": {"d1": 1}} if manifest["has_dev"] else None, manifest["made_from"]])

    names = ("pairs", "neg_docs", "neg_queries")
    return [Reader("pairs", folder / "pairs", ("manifest.json", "pairs.npy", "neg_docs.npy"), read, naive)]


def _evaluations(folder: Path) -> list[Reader]:
    """What `evaluate_*` keep: `compare runs` and the tables read it, and so does the next call. Checksums guard every byte."""
    systems = {"dense": {"ndcg@10": 0.5, "recall@10": 1}, "bm25": {"ndcg@10": 0.25, "recall@10": 0}}
    report = {"dataset": "small", "split": "test", "num_docs": 3, "num_queries": 2, "settings": {"depth": 10}, **systems}
    ranking = {"q1": {"d1": 2.0, "d2": 1.0}, "q2": {"d3": 0.5}}

    def write(kept: Path) -> Path:
        with folders.atomic_dir(kept, report_.KIND) as temporary:
            metrics.write_trec_run(temporary / "dense.trec", ranking)
            (temporary / "result.json").write_text(json.dumps(report))
        return kept

    def read(one: Path) -> Any:
        return plain([report_.kept_report(one, ["recall@10", "ndcg@10"]), report_.kept_ranking(one)])

    def naive(one: Path) -> Any:
        found = json.loads(naive_text(one / "result.json"))
        found |= {name: {key: found[name][key] for key in ("recall@10", "ndcg@10")} for name in report_.SYSTEMS if name in found}
        return plain([found, ranking])

    kept, names = write(folder / GUARDED / "small-0a"), ("result.json", "dense.trec", folders.CHECKSUMS_FILE)
    return [
        Reader("evaluation", write(folder / "evaluations" / "small-0a"), ("result.json",), read, naive),
        Reader("guarded evaluation", kept, names, read, lambda one: plain([report, ranking]), names),
    ]
