"""Every reader with files that it reads, and a naive reader of the same files that knows none of our code."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from letters import Letters

from de_jax.data import (
    beir,
    corpus,
    curriculum,
    expansion_files,
    folders,
    generations,
    negatives,
    reading,
    relevance,
    store_writer,
    text,
)
from de_jax.evaluation import answers, metrics, plots
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval import choose, embedding_files, index_files, reuse
from de_jax.training import generator_run, run

SIZES = T5Config(vocab_size=16, model_dim=4, num_layers=1, num_heads=1, head_dim=4, mlp_dim=4, dtype="float32")
DOCS = [("d1", "a title", "the first text"), ("d2", "", "zwei Wörter"), ("d3", "", "three \U0001f600")]
PAIRS = [("q1", "d1"), ("q2", "d2")]


class Reader(NamedTuple):
    """One reader.

    Attributes:
        read: of the folder; a value that can be compared.
        naive: the same by simpler means, whatever it raises; None where there are none.
        exact: files in which every byte counts, because a checksum guards them or blank lines have a meaning.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    naive: Callable[[Path], Any] | None
    exact: tuple[str, ...] = ()


def plain(value: Any) -> Any:
    """What can be compared: arrays by their values, numbers by their text, so that NaN is NaN and 1 is not True."""
    if isinstance(value, np.ndarray):
        return ["array", value.shape, value.tobytes()]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str) else repr(value)


def naive_bytes(path: Path) -> bytes:
    if not path.is_file():  # opening a pipe would wait
        raise FileNotFoundError(path)
    return path.read_bytes()


def naive_text(path: Path) -> str:
    raw = naive_bytes(path)
    if path.suffix == ".gz":
        if not raw:
            raise EOFError(path)
        raw = gzip.decompress(raw)
    return raw.decode().removeprefix("\ufeff")


def naive_lines(path: Path) -> list[str]:
    return [line.rstrip("\r") for line in naive_text(path).split("\n") if line.strip()]


def naive_all_lines(path: Path) -> list[str]:
    text = naive_text(path)
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def naive_json(path: Path, *names: str, **defaults: Any) -> Any:
    found = defaults | json.loads(naive_text(path))
    return plain({name: found[name] for name in names or found})


def naive_records(path: Path) -> list[Any]:
    return [json.loads(line) for line in naive_lines(path)]


def naive_load(path: Path) -> np.ndarray:
    return np.load(io.BytesIO(naive_bytes(path)), allow_pickle=False)  # type: ignore[no-any-return]


def naive_array(path: Path) -> Any:
    return plain(naive_load(path))


def only(value: dict[str, Any], *names: str) -> Any:
    return plain({name: value[name] for name in names})


def all_readers(folder: Path) -> list[Reader]:
    """Every reader, its files written below `folder` without checksums: content alone must tell, as in folders of version 0.1.0."""
    found: list[Reader] = []
    for make in (_plain_files, _texts, _judgements, _queries, _descriptions, _stores, _mined, _settings):
        found += make(folder)
    for checksums in folder.rglob(folders.CHECKSUMS_FILE):
        checksums.unlink()
    return found


def _written(folder: Path, name: str, files: dict[str, str | bytes | np.ndarray]) -> Path:
    folder = folder / name
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(folder / path, content)
            continue
        raw = content.encode() if isinstance(content, str) else content
        (folder / path).write_bytes(gzip.compress(raw, mtime=0) if path.endswith(".gz") else raw)
    return folder


def _file(folder: Path, name: str, file: str, content: Any, read: Any, naive: Any, exact: bool = False) -> Reader:
    """A reader of one file."""
    of_file = (lambda one: naive(one / file)) if naive else None
    return Reader(
        name, _written(folder, name, {file: content}), (file,), lambda one: read(one / file), of_file, (file,) if exact else ()
    )


def _plain_files(folder: Path) -> list[Reader]:
    array = np.arange(6, dtype=np.int32).reshape(3, 2)
    value = {"format": 1, "names": ["a", "b"], "sizes": {"x": 1.5, "y": None}}
    lines = "first\n\nsecond line\nthird\n"
    return [
        _file(
            folder,
            "json",
            "a.json",
            json.dumps(value),
            lambda path: plain(reading.read_json(path)),
            lambda path: plain(json.loads(naive_text(path))),
        ),
        _file(folder, "lines", "a.txt", lines, lambda path: [line for _, line in reading.read_lines(path)], naive_lines),
        _file(
            folder,
            "all lines",
            "a.txt",
            lines,
            lambda path: [line for _, line in reading.read_lines(path, keep_blank=True)],
            naive_all_lines,
        ),
        _file(folder, "lines.gz", "a.txt.gz", lines, lambda path: [line for _, line in reading.read_lines(path)], naive_lines),
        _file(folder, "array", "a.npy", array, lambda path: plain(reading.read_array(path, "<i4", (None, 2))), naive_array),
        _file(
            folder,
            "array in memory",
            "a.npy",
            array,
            lambda path: plain(reading.read_array(path, "<i4", (3, None), in_memory=True)),
            naive_array,
        ),
    ]


def _texts(folder: Path) -> list[Reader]:
    records = "".join(json.dumps({"_id": one, "title": title, "text": body}) + "\n" for one, title, body in DOCS)
    tsv = "".join(f"{one}\t{body}\n" for one, _, body in DOCS)
    marco = "".join(f"{one}\thttp://x/{one}\t{title}\t{body}\n" for one, title, body in DOCS)

    def naive_docs(path: Path) -> list[list[str]]:
        return [[str(one["_id"]), f"{one.get('title') or ''} {one['text']}".strip()] for one in naive_records(path)]

    def naive_tsv(path: Path) -> list[list[str]]:
        rows = [line.split("\t") for line in naive_lines(path)]
        # A page without a title and a body has its address as its text.
        return [[row[0], row[1].strip()] if len(row) == 2 else [row[0], f"{row[2]} {row[3]}".strip() or row[1]] for row in rows]

    def docs(path: Path) -> list[list[str]]:
        return [list(one) for one in beir.iter_docs(path)]

    return [
        _file(folder, "corpus.jsonl", "corpus.jsonl", records, docs, naive_docs),
        _file(folder, "corpus.jsonl.gz", "corpus.jsonl.gz", records, docs, naive_docs),
        _file(folder, "corpus.tsv", "corpus.tsv", tsv, docs, naive_tsv),
        _file(folder, "msmarco.tsv", "msmarco.tsv", marco, docs, naive_tsv),
        _file(folder, "msmarco.tsv.gz", "msmarco.tsv.gz", marco, docs, naive_tsv),
    ]


def _judgements(folder: Path) -> list[Reader]:
    def naive_qrels(path: Path) -> Any:
        found: dict[str, dict[str, int]] = {}
        for number, line in enumerate(naive_text(path).split("\n")):
            columns = line.split("\t") if line.count("\t") in (2, 3) else line.split()
            if line.strip() and not (number == 0 and columns == ["query-id", "corpus-id", "score"]):
                found.setdefault(columns[0], {})[columns[-2]] = int(columns[-1])
        return plain(found)

    def naive_run(path: Path) -> Any:
        found: dict[str, dict[str, float]] = {}
        for line in naive_lines(path):
            query_id, _, doc_id, _, score, _ = line.split()
            found.setdefault(query_id, {})[doc_id] = float(np.float32(float(score)))  # as trec_eval keeps it
        return plain(found)

    beir_qrels = "query-id\tcorpus-id\tscore\n" + "".join(f"{query}\t{doc}\t1\n" for query, doc in PAIRS) + "q1\td3\t0\n"
    trec_qrels = "".join(f"{query} 0 {doc} {grade}\n" for grade, (query, doc) in enumerate(PAIRS))
    ranking = "".join(f"{query} Q0 d{rank} {rank} {1 / rank} name\n" for query in ("q1", "q2") for rank in (1, 2, 3))
    teacher = "".join(f"{query}\t{doc}\t{0.5}\n" for query, doc in PAIRS)
    scores = "".join(json.dumps({"query_id": query, "doc_id": doc, "scores": [0.5, 2]}) + "\n" for query, doc in PAIRS)
    answered = '{"_id": "q1", "answers": ["one", "two words"]}\n{"_id": 2, "answers": ["three"]}\n'

    def naive_scores(path: Path) -> Any:
        found = {(str(one["query_id"]), str(one["doc_id"])): one["scores"] for one in naive_records(path)}
        return [plain(np.array(found[pair], np.float32)) for pair in PAIRS]

    def read_scores(path: Path) -> Any:
        return [plain(relevance.ScoreFile(path, PAIRS)(pair, "", ["", ""])) for pair in range(2)]

    def qrels(path: Path) -> Any:
        return plain(beir.read_qrels(path))

    return [
        _file(folder, "qrels.tsv", "qrels.tsv", beir_qrels, qrels, naive_qrels),
        _file(folder, "qrels.txt", "qrels.txt", trec_qrels, qrels, naive_qrels),
        _file(folder, "run.trec", "run.trec", ranking, lambda path: plain(metrics.read_trec_run(path)), naive_run),
        _file(folder, "run.trec.gz", "run.trec.gz", ranking, lambda path: plain(metrics.read_trec_run(path)), naive_run),
        _file(
            folder,
            "teacher",
            "teacher.tsv",
            teacher,
            _read_teacher,
            lambda path: plain([float(line.split("\t")[2]) for line in naive_lines(path)]),
        ),
        _file(folder, "scores", "scores.jsonl", scores, read_scores, naive_scores),
        _file(
            folder,
            "answers",
            "answers.jsonl",
            answered,
            lambda path: plain(answers.read(path)),
            lambda path: plain({str(one["_id"]): one["answers"] for one in naive_records(path)}),
        ),
    ]


class _AllTexts:
    """A store that holds every text, in the order in which it is asked for them."""

    def rows_of(self, ids: list[str]) -> np.ndarray:
        return np.arange(len(ids))


def _read_teacher(path: Path) -> Any:
    texts = negatives.TrainingTexts("", _AllTexts(), _AllTexts(), np.zeros((0, 2), np.int32), {})  # type: ignore[arg-type]
    return plain(list(choose.read_teacher(path, texts).values()))


def _queries(folder: Path) -> list[Reader]:
    plan = {"seed": 0}
    writer = expansion_files.ExpansionWriter(folder / "expansion", plan)
    writer.append([expansion_files.DocQueries("d1", ["what is a", "b"]), expansion_files.DocQueries("d2", [])])
    writer.append([expansion_files.DocQueries("d3", ["c"])])
    writer.finish(num_docs=3)
    released = '{"id": "d1", "predicted_queries": ["a", "b"]}\n{"id": 2, "predicted_queries": []}\n'
    tsv = "d1\ta\nd1\tb c\nd2\td\n"
    ids = ["d1", "d2"]

    def read(paths: list[Path]) -> Any:
        return plain(list(expansion_files.iter_released(paths, ids)))

    def naive_tsv(path: Path) -> Any:
        found: dict[str, list[str]] = {}
        for line in naive_lines(path):
            doc_id, query = line.split("\t", 1)
            found.setdefault(doc_id, []).append(query)
        return plain(list(found.items()))

    def naive_aligned(path: Path) -> Any:
        return plain([[doc_id, [line]] for doc_id, line in zip(ids, naive_all_lines(path), strict=True)])

    def naive_released(path: Path) -> Any:
        return plain([[str(one["id"]), one["predicted_queries"]] for one in naive_records(path)])

    def naive_expansion(one: Path) -> Any:
        records = [record for part in sorted(one.glob("part*")) for record in naive_records(part)]
        return plain([[str(record["_id"]), record["queries"]] for record in records])

    parts = ("part-00000.jsonl.gz", "part-00001.jsonl.gz")
    return [
        Reader(
            "expansion",
            folder / "expansion",
            ("manifest.json", *parts),
            lambda one: plain(list(expansion_files.read_expansion(one))),
            naive_expansion,
            parts,
        ),
        Reader(
            "plan",
            folder / "expansion",
            ("plan.json",),
            lambda one: expansion_files.ExpansionWriter(one, plan).num_parts,
            lambda one: 2,
        ),
        _file(folder, "released.jsonl", "a.jsonl", released, lambda path: read([path]), naive_released),
        _file(folder, "released.tsv", "a.tsv", tsv, lambda path: read([path]), naive_tsv),
        _file(folder, "released.txt", "a.txt", "one\ntwo\n", lambda path: read([path]), naive_aligned),
    ]


def _descriptions(folder: Path) -> list[Reader]:
    tower = TowerConfig(SIZES, projection_dim=4)
    lengths = {"format": 1, "max_query_length": 8, "max_doc_length": 16}
    model = DualEncoder(query=tower, doc=tower)
    described = {**lengths, "model": model.to_json(), "max_passages": 1, "tokenizers": {"query": "a", "doc": "b"}}
    generator = {**lengths, "model": Generator(SIZES).to_json(), "tokenizer": "a"}
    names = ("max_query_length", "max_doc_length", "max_passages", "tokenizers", "model")

    def read_run(one: Path) -> Any:
        description, found = run._read_description(one)
        return only({**description, "model": found.to_json()}, *names)

    def read_generator(one: Path) -> Any:
        description, found = generator_run._read_description(one)
        return only({**description, "model": found.to_json()}, *names[:2], "tokenizer", "model")

    def naive_model(found: Any, default: Any) -> Any:
        """With what may be absent from it."""
        return {key: naive_model(found[key], one) if isinstance(one, dict) else found.get(key, one) for key, one in default.items()}

    default_tower = {**TowerConfig(T5Config()).__dict__, "encoder": {"architecture": "T5Config", **T5Config().__dict__}}
    defaults = {
        "run.json": {**model.to_json(), "query": default_tower, "doc": default_tower},
        "generator.json": Generator(T5Config()).to_json(),
    }

    def naive(one: Path, file: str, *keys: str) -> Any:
        found = {"max_passages": 1, **json.loads(naive_text(one / file))}
        return plain({key: naive_model(found[key], defaults[file]) if key == "model" else found[key] for key in keys})

    return [
        Reader(
            "run.json",
            _written(folder, "run", {"run.json": json.dumps(described, indent=2)}),
            ("run.json",),
            read_run,
            lambda one: naive(one, "run.json", *names),
        ),
        Reader(
            "generator.json",
            _written(folder, "generator", {"generator.json": json.dumps(generator)}),
            ("generator.json",),
            read_generator,
            lambda one: naive(one, "generator.json", *names[:2], "tokenizer", "model"),
        ),
        _file(
            folder,
            "prompt.json",
            "prompt.json",
            '{"prompt": "query: "}',
            lambda path: text._prompt_of(path.parent),
            lambda path: json.loads(naive_text(path))["prompt"],
        ),
    ]


def _stores(folder: Path) -> list[Reader]:
    texts = [("d1", "apple"), ("d2", "pear"), ("d3", "fig")]
    tokens = corpus.build_token_store(texts, Letters(), folder / "store", progress=False)
    writer = embedding_files.EmbeddingWriter(folder / "embeddings", {"num_texts": 3, "model": "m", "max_length": 8}, {"rows": 2})
    writer.append(np.arange(6, dtype=np.float32).reshape(3, 2))
    writer.finish(["d1", "d2", "d3"])
    reuse.keep(folder / "embeddings", np.arange(3, dtype=np.uint64))
    half = embedding_files.EmbeddingWriter(folder / "half", {"num_texts": 3, "model": "m"}, {"rows": 2})
    half.append(np.ones((2, 2), np.float32))
    index_files.write(
        folder / "index", lambda path: path.write_bytes(b"index"), ["d1"], {"factory": "Flat", "num_docs": 1, "dim": 2}
    )  # type: ignore[arg-type, return-value]
    ranked = curriculum.RankedQueries(
        np.array([1, 0, 2], np.int32), np.array([1, 0.5, 2], np.float32), np.array([0, 2, 3], np.int64)
    )
    arrays = {"order.npy": ranked.order, "scores.npy": ranked.scores, "offsets.npy": ranked.offsets}
    _written(folder, "ranked", {**arrays, "manifest.json": json.dumps({"format": curriculum.FORMAT, "num_pairs": 2})})

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
            lambda one: only(index_files.read_manifest(one, check_index=True), *names),
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


def _mined(folder: Path) -> list[Reader]:
    lines = [generations.Mined(query, doc, ["d3"], []) for query, doc in PAIRS]
    generations.write_generation(folder / "negatives", 1, lines, {"docs": "a", "checkpoint_step": 3, "statistics": {"rank": 2.5}})
    switches = '{"step": 0, "generation": 1}\n{"step": 9, "generation": 2}\n'

    def read(one: Path) -> Any:
        generation = generations.open_generation(one, 1)
        return plain(
            [
                list(generations.read_mined(generation)),
                generation.manifest.get("checkpoint_step"),
                generation.manifest.get("statistics"),
            ]
        )

    def naive(one: Path) -> Any:
        manifest = json.loads(naive_text(one / "000001/manifest.json"))
        records = [[one[name] for name in generations.Mined._fields] for one in naive_records(one / "000001/part-00000.jsonl")]
        return plain([records, manifest.get("checkpoint_step"), manifest.get("statistics")])

    part = "000001/part-00000.jsonl"
    return [
        Reader("generation", folder / "negatives", ("000001/manifest.json", part), read, naive, (part,)),
        _file(
            folder,
            "switches",
            "switches.jsonl",
            switches,
            lambda path: plain(negatives.read_switches(path)),
            lambda path: plain([[one["step"], one["generation"]] for one in (naive_records(path) if path.exists() else ())]),
        ),
    ]


def _settings(folder: Path) -> list[Reader]:
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    vocabulary.add_special_tokens(["<pad>", "</s>"])
    vocabulary.normalizer = tokenizers.normalizers.Lowercase()
    vocabulary.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", "$A $B", [("</s>", 1)])
    log = "".join(json.dumps({"step": step, "loss": 1 / step, "dev/ndcg@10": 0.5}) + "\n" for step in (1, 2, 3))
    gin = "# a comment\ntrain.num_steps = 3\nbeir_pairs.split = 'dev'\n"

    def naive_series(path: Path) -> Any:
        lines = naive_lines(path)
        records = [json.loads(line) for line in lines[:-1]]
        try:
            records.append(json.loads(lines[-1]))
            records[-1]["step"] += 0
        except Exception:
            records = records[: len(lines) - 1]
            if naive_text(path).endswith("\n"):
                raise
        found: dict[str, Any] = {}
        for record in records:
            step = float(record.pop("step"))
            for name, value in record.items():
                if isinstance(value, int | float):
                    found.setdefault(name, [[], []])
                    found[name][0].append(step)
                    found[name][1].append(float(value))
        return plain(found)

    def naive_settings(path: Path) -> Any:
        text = "\n".join(naive_lines(path)) if path.exists() else ""
        lines = [line for line in re.sub(r"\\?\n\s+", " ", text).split("\n") if " =" in line and not line.startswith("#")]
        pairs = [line.split(" =", 1) for line in lines]
        return {name.strip(): value.strip().removesuffix("\\").strip() for name, value in pairs}

    return [
        _file(
            folder,
            "tokenizer.json",
            "tokenizer.json",
            vocabulary.to_str(),
            lambda path: plain([text.load_tokenizer(path).vocab_size]),
            None,
            exact=True,
        ),
        _file(folder, "metrics", "metrics.jsonl", log, lambda path: plain(plots._read_series(path)), naive_series),
        _file(folder, "config.gin", "config.gin", gin, lambda path: run.read_settings(path.parent), naive_settings),
    ]
