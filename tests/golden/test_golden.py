"""Batches, gradients, an update, embeddings, mined negatives and a card are what they were: small files hold them.

Numbers of texts and texts are equal bit for bit. Floats depend on the processor, so they are close; DE_JAX_GOLDEN_EXACT=1 compares
them bit for bit, on the machine that wrote them. `python -m tests.golden.make` writes the files after an intended change. The
functions that open sources, train and mine may follow the library; the files may not.
"""

import csv
import dataclasses
import itertools
import json
import lzma
import os
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from often import often

import de_jax
from de_jax.data.batches.teacher_scores import GUIDE
from de_jax.data.expansion.curriculum import Curriculum
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.pair_store import table_pairs
from de_jax.data.sources.seqio_batches import seqio_pairs
from de_jax.data.sources.training_set import beir_pairs, text_hashes
from de_jax.data.text import beir
from de_jax.files import folders
from de_jax.losses.in_batch import in_batch_softmax, samtone
from de_jax.mining import teacher
from de_jax.mining.miner import Miner
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import HardNegatives, Initialization, Optimization, Recipe
from de_jax.reports import model_card
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.optim.optimizer import adamw
from de_jax.training.run.run_folder import load_run
from de_jax.training.run.settings import Devices, Logging

HERE = Path(__file__).parent
STEPS = (0, 1, 2, 9)  # of an epoch of 7 to 10 batches
SEEDS = (0, 1, 2)
OPTIONS = {"batch_size": 8, "max_query_length": 16, "max_doc_length": 48, "length_multiple": 8, "mask_positives": False}
WORDS = ("apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder", "old", "green", "sings", "falls", "and")
NUM_QUERIES, NUM_DOCS = 40, 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A BEIR folder of 60 documents and 40 queries with one to three judgements, of `WORDS`; with a dev split."""
    rng = np.random.default_rng(5)
    text = lambda least, most: " ".join(rng.choice(WORDS, rng.integers(least, most)))  # noqa: E731
    folder = tmp_path_factory.mktemp("golden") / "toy"
    docs = [(f"d{i}", text(1, 3) if i % 3 else "", f"{text(3, 20)} {i}") for i in range(NUM_DOCS)]
    docs[7] = ("q7", *docs[7][1:])  # a document with the id of a query
    queries = [(f"q{i}", f"{text(1, 6)} {i}") for i in range(NUM_QUERIES)]
    ids = [doc[0] for doc in docs]
    judged = {
        f"q{i}": {ids[j]: int(rng.integers(0, 3)) for j in rng.choice(NUM_DOCS, 4, replace=False)} for i in range(NUM_QUERIES)
    }
    splits = {"train": dict(list(judged.items())[:30]), "dev": dict(list(judged.items())[30:])}
    beir.write(folder, docs, queries, splits)
    return folder


def options(**changes):
    return PairsOptions(**{"tokenizer": str(HERE / "spiece.model")} | OPTIONS | changes)


def texts_of(corpus):
    """Queries and documents by id, as a table has them."""
    found = (beir.find_file(corpus, name) for name in ("queries", "corpus"))
    return dict(beir.iter_queries(next(found))), dict(beir.iter_docs(next(found)))


def table_of(corpus, folder, **columns):
    """A csv file of the training pairs; `columns` are functions of a row's number."""
    queries, docs = texts_of(corpus)
    judged = beir.read_qrels(beir.find_qrels(corpus, "train"))
    pairs = [(queries[query], docs[doc]) for query, of_query in judged.items() for doc, grade in of_query.items() if grade]
    path = folder / "pairs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", *columns])
        writer.writerows([*pair, *(make(row, list(docs.values())) for make in columns.values())] for row, pair in enumerate(pairs))
    return path


def scored_table(corpus, folder):
    """The same with two hard negatives and three scores a row, some of them absent."""
    other = lambda row, docs, by: docs[(by * row + by) % len(docs)] if row % 5 else ""  # noqa: E731
    scores = lambda row: [row / 8, *([row / 16] if row % 5 else []), -row / 32]  # noqa: E731
    of_columns = {
        "negative_1": lambda row, docs: other(row, docs, 7),
        "negative_2": lambda row, docs: docs[(3 * row + 1) % len(docs)],
        "scores": lambda row, docs: json.dumps(scores(row)),
    }
    return table_of(corpus, folder, **of_columns)


def write_negatives(corpus, negatives_dir):
    """A generation of three documents and two queries a pair, or fewer."""
    judged = beir.read_qrels(beir.find_qrels(corpus, "train"))
    pairs = [(query, doc) for query, of_query in judged.items() for doc, grade in of_query.items() if grade]
    docs = [f"d{i}" for i in range(NUM_DOCS) if i != 7]
    lines = [
        Mined(
            query,
            doc,
            [docs[(5 * row + 11 * n) % len(docs)] for n in range(row % 4)],
            [f"q{(row + n) % 30}" for n in range(row % 3)],
        )
        for row, (query, doc) in enumerate(pairs)
    ]
    generations.write_lines(negatives_dir, 1, lines, {**text_hashes(corpus), "checkpoint_step": 0})
    return negatives_dir


def write_expansion(folder):
    path = folder / "expansion.jsonl"
    lines = [
        {"_id": f"d{i}", "queries": [f"{WORDS[(i + j) % 13]} {WORDS[(i * j) % 13]} {i}" for j in range(i % 6)]}
        for i in range(NUM_DOCS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["_id"] != "d7"))
    return path


def write_guide(corpus, folder):
    queries, docs = texts_of(corpus)
    for kind, ids in (("queries", queries), ("docs", docs)):
        writer = EmbeddingWriter(folder / kind, {"num_texts": len(ids), "model": "m"}, {"texts_per_shard": len(ids)})
        writer.append(np.random.default_rng(len(ids)).normal(size=(len(ids), 4)).astype(np.float32))
        writer.finish(list(ids))
    GUIDE.complete(folder, {"guide": "a model", "dim": 4, "texts": text_hashes(corpus)}, folders.names(folder))
    return folder


def write_teacher(corpus, folder, negatives_dir):
    candidates = teacher.of_dataset(corpus, "train", negatives_dir)
    score = lambda pairs: np.array([int(q[1:]) / 8 - int(d[1:]) / 64 for q, d in pairs])  # noqa: E731
    teacher.write(folder, candidates, "a teacher", lambda: score)
    return folder


def mined_batches(corpus, folder, **changes):
    negatives_dir = write_negatives(corpus, folder / "negatives")
    scores = write_teacher(corpus, folder / "teacher", negatives_dir)
    own = options(negatives_dir=str(negatives_dir), num_neg_docs=2, num_neg_queries=1, teacher_scores=str(scores), **changes)
    data = beir_pairs(str(corpus), options=own, share=Share(num_steps=20))
    data.mined.begin(0, [])
    return data


def mixture(corpus, folder, mode, seed):
    table = scored_table(corpus, folder)
    sources = {
        "table": partial(table_pairs, str(table), options=options(seed=seed, num_neg_docs=1)),
        "beir": partial(beir_pairs, str(corpus), options=options(seed=seed)),
    }
    return mixed_pairs(sources, temperature=2.0, mode=mode, share=Share(num_steps=20))


def expanded(corpus, folder, strategy, **changes):
    return options(
        expansion=str(write_expansion(folder)),
        curriculum=Curriculum(strategy, num_steps=10, k=2, num_groups=2),
        max_generated_length=10,
        **changes,
    )


def of_seqio(corpus, own):
    seqio = pytest.importorskip("seqio")
    seqio.TaskRegistry._REGISTRY = {}
    arguments = {"dataset_dir": str(corpus), "tokenizer": str(HERE / "spiece.model")}
    own = dataclasses.replace(own, tokenizer="")
    return seqio_pairs("golden", module="de_jax.tasks.beir", module_args=arguments, options=own, share=Share(num_steps=20))


def of_stream(corpus, folder, own):
    """A task of pairs in one file, read through a window of two batches."""
    seqio = pytest.importorskip("seqio")
    seqio.TaskRegistry._REGISTRY = {}
    queries, docs = texts_of(corpus)
    pairs = zip(queries.items(), list(docs.values())[::-1], strict=False)
    lines = [{"query_id": query_id, "query": query, "doc": doc} for (query_id, query), doc in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = {"files": {"train": str(folder / "pairs.jsonl")}, "tokenizer": str(HERE / "spiece.model")}
    own = dataclasses.replace(own, tokenizer="")
    return seqio_pairs("stream", module="de_jax.tasks.local", module_args=arguments, window=16, options=own)


SOURCES = {
    "csv": lambda corpus, folder, seed: table_pairs(str(table_of(corpus, folder)), options=options(seed=seed)),
    "csv-scores": lambda corpus, folder, seed: table_pairs(
        str(scored_table(corpus, folder)),
        dev_fraction=0.2,
        options=options(seed=seed, num_neg_docs=2, query_prompt="old ", mask_positives=True, pack=False, unique_in_batch=False),
    ),
    "beir": lambda corpus, folder, seed: beir_pairs(
        str(corpus), options=options(seed=seed, dev_split="dev", dev_max_queries=7, dev_max_docs=30)
    ),
    "beir-second-host": lambda corpus, folder, seed: beir_pairs(
        str(corpus), options=options(seed=seed, mask_positives=True), share=Share(host_index=1, num_hosts=2, row_multiple=4)
    ),
    "beir-passages": lambda corpus, folder, seed: beir_pairs(
        str(corpus), options=options(seed=seed, max_passages=3, max_doc_length=24)
    ),
    "mined": lambda corpus, folder, seed: mined_batches(corpus, folder, seed=seed, mask_positives=True),
    "guide": lambda corpus, folder, seed: beir_pairs(
        str(corpus), options=options(seed=seed, guide_dir=str(write_guide(corpus, folder / "guide")))
    ),
    "curriculum": lambda corpus, folder, seed: beir_pairs(str(corpus), options=expanded(corpus, folder, "curriculum", seed=seed)),
    "random-queries-mined": lambda corpus, folder, seed: mined_batches(
        corpus, folder, **{f.name: getattr(expanded(corpus, folder, "random", seed=seed), f.name) for f in CURRICULUM_FIELDS}
    ),
    "gold-queries": lambda corpus, folder, seed: beir_pairs(str(corpus), options=expanded(corpus, folder, "gold", seed=seed)),
    "one-source": lambda corpus, folder, seed: mixture(corpus, folder, "one_source", seed),
    "mixed": lambda corpus, folder, seed: mixture(corpus, folder, "mixed", seed),
    "seqio": lambda corpus, folder, seed: of_seqio(corpus, options(seed=seed, dev_split="dev")),
    "seqio-queries": lambda corpus, folder, seed: of_seqio(corpus, expanded(corpus, folder, "random", seed=seed)),
    "seqio-stream": lambda corpus, folder, seed: of_stream(corpus, folder, options(seed=seed)),
}
"""Opens a source in an empty folder, by seed."""
CURRICULUM_FIELDS = [
    field for field in dataclasses.fields(PairsOptions) if field.name in ("seed", "expansion", "curriculum", "max_generated_length")
]


def arrays_of(tree):
    """The arrays of a tree by path; fields without one are absent."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        re.sub(r"[^A-Za-z0-9_/]+", "", jax.tree_util.keystr(path, separator="/", simple=True)): np.asarray(leaf)
        for path, leaf in leaves
    }


def check(name, arrays):
    """Compares arrays by name with those of a file: floats closely, all else exactly."""
    path = HERE / f"{name}.npz.xz"
    if os.environ.get("DE_JAX_GOLDEN_WRITE"):
        with lzma.open(path, "wb") as file:
            np.savez(file, **arrays)
    with lzma.open(path) as file, np.load(file) as stored:
        assert sorted(stored) == sorted(arrays)
        for key, array in arrays.items():
            expected = stored[key]
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype), key
            if array.dtype.kind == "f" and not os.environ.get("DE_JAX_GOLDEN_EXACT"):
                most = np.nanmax(np.abs(expected), initial=1e-30)
                np.testing.assert_allclose(array, expected, rtol=0, atol=2e-6 * most, err_msg=key)
            else:
                np.testing.assert_array_equal(array, expected, err_msg=key)


def check_text(name, text):
    path = HERE / name
    if os.environ.get("DE_JAX_GOLDEN_WRITE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))


# Those of seqio import TensorFlow, which takes ten seconds.
@pytest.mark.parametrize("source", often(SOURCES, "csv", "beir-second-host", "beir-passages", "mined", "curriculum", "mixed"))
@pytest.mark.filterwarnings("ignore")
def test_batches_are_those_of_before(source, corpus, tmp_path):
    arrays = {}
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        data = SOURCES[source](corpus, folder, seed)
        batches = itertools.islice(data.batches(0), max(STEPS) + 1)
        for step, batch in enumerate(batches):
            if step in STEPS:
                arrays |= arrays_of({f"{seed}/{step}": batch})
        resumed = next(data.batches(STEPS[-1]))
        for key, array in arrays_of(resumed).items():
            np.testing.assert_array_equal(array, arrays[f"{seed}/{STEPS[-1]}/{key}"])
    for name, dev in data.dev_sets.items():
        ids = sorted((query, doc, grade) for query, judged in dev.qrels.items() for doc, grade in judged.items())
        arrays |= {f"dev{name}/query_rows": dev.query_rows, f"dev{name}/doc_rows": dev.doc_rows, f"dev{name}/qrels": np.array(ids)}
    check(f"batches-{source}", arrays)


T5 = T5Config(vocab_size=96, model_dim=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=16, dtype="float32", dropout_rate=0.1)
BERT = BertConfig(vocab_size=96, model_dim=16, num_layers=2, num_heads=2, mlp_dim=16, max_positions=64, dtype="float32")
T5_TOWER, BERT_TOWER = TowerConfig(T5, projection_dim=8), TowerConfig(BERT, pooling="first", projection_dim=None, normalize=False)
MODELS = {
    "t5": (DualEncoder(T5_TOWER, T5_TOWER, shared=("embedder", "encoder", "projection")), partial(samtone, temperature=0.05)),
    "bert": (DualEncoder(BERT_TOWER, BERT_TOWER), partial(in_batch_softmax, temperature=1.0)),
}


def recipe_of(name, data, num_steps=3, **changes):
    """`eps` is large, so that parameters without a gradient but for rounding stay."""
    model, loss = MODELS[name]
    parts = {
        "optimization": Optimization(optimizer=partial(adamw, eps=1e-3), learning_rate=0.01, num_steps=num_steps),
        "initialization": Initialization(seed=3),
        "devices": Devices(mesh=partial(make_mesh, data=1)),
    }
    return Recipe(**{"model": model, "data": data, "loss": loss} | parts | changes)


@pytest.mark.parametrize("name", often(MODELS, "t5"))
def test_embeddings_gradients_and_an_update_are_those_of_before(name, corpus, tmp_path):
    data = partial(table_pairs, str(scored_table(corpus, tmp_path)), options=options(pack=name == "t5"))
    recipe = recipe_of(name, data)
    batch = next(data(share=Share()).batches(0))
    state = recipe.init()
    rng = jax.random.key(1)

    def loss_of(params, batch):
        embeddings = recipe.trained.embed(params, batch, rng)
        loss, metrics = recipe.loss(embeddings)
        return loss, (embeddings, metrics)

    (loss, (embeddings, metrics)), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(state.params, batch)
    found = {"loss": loss, "metrics": metrics, "embeddings": embeddings, "gradient": gradient}
    updated, of_step = jax.jit(recipe.train_step(state.params))(state, batch)
    found |= {"updated": updated.params, "step_metrics": of_step}
    check(f"step-{name}", arrays_of(found))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run of three updates that mines with its first parameters, and again after two updates."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(folder / "cache"))
        own = options(seed=0, negatives_dir="{run_dir}/negatives", num_neg_docs=2, num_neg_queries=1)
        recipe = recipe_of(
            "t5",
            partial(beir_pairs, str(corpus), options=own),
            loss=partial(in_batch_softmax, temperature=0.1, directions="both"),
            negatives=HardNegatives(miner=Miner(num_neg_docs=4, num_neg_queries=2, last_rank=12, seed=0), mine_every_steps=2),
            logging=Logging(save_every_steps=3),
        )
        de_jax.train(recipe, folder / "run")
    return folder / "run"


def test_mined_negatives_are_those_of_before(trained):
    arrays = {}
    for number in generations.numbers(trained / "negatives"):
        generation = generations.open_generation(trained / "negatives", number)
        mined = generations.read(generation)
        arrays |= {f"{number}/{name}": np.asarray(array) for name, array in mined._asdict().items()}
        for name, value in generation.manifest["statistics"].items():
            arrays[f"{number}/statistics/{name}"] = np.float32(value)
    check("negatives", arrays)


def test_a_trained_run_is_the_one_of_before(trained):
    run = load_run(trained)
    check("trained", arrays_of(run.params))
    lines = (trained / "switches.jsonl").read_text()
    check_text("switches.jsonl", lines)


def test_the_card_of_an_exported_run_is_the_one_of_before(trained, corpus, tmp_path):
    model_card.export(load_run(trained), tmp_path / "out", "sentence_transformers", license="apache-2.0")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?s)<details>.*</details>|Exported with .*", "...", text)  # the recipe's own form, and versions
    text = re.sub(r"(?<=\| trained with \|).*(?= \|)", " VERSIONS", text)
    check_text("card.txt", text.replace(str(trained), "RUN").replace(str(corpus), "DATA").replace(str(HERE), "HERE"))
