"""Kinds of negatives against loops: one gradient a pair, and ranks by sorting."""

import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from matplotlib.image import imread
from tiny_run import WORDS

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.training_set import qrel_pairs
from de_jax.data.stores import corpus
from de_jax.data.text.passages import PassageStore
from de_jax.data.text.tokenizing import Side, load_tokenizer
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.losses.mined import ance
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import Run
from de_jax.training.step import grad_norms
from de_jax.types import Batch, Embeddings, InputError
from reproduction import negative_analysis, negative_report
from reproduction.negative_analysis import AtCheckpoint, Measured, Sample

GROUPS = {"all": ".*", "kernels": ".*/kernel", "doc": "doc/.*"}
LOSS = functools.partial(ance, temperature=0.1)


QRELS = {"qa": {"d0": 1, "d1": 1}, "qb": {"d2": 1, "d3": 0}, "qc": {"d4": 2}}


class Bag:
    """Embeds a text as a layer over the mean of its tokens' vectors."""

    def init(self, rng):
        table, query, doc = (rng.standard_normal((rows, 4)).astype(np.float32) for rows in (31, 4, 4))
        return {"query": {"kernel": query}, "doc": {"kernel": doc}, "shared": {"embedding": table}}

    def embed(self, params, batch, rng=None):
        def embedded(tower, tokens):
            return jnp.tanh(params["shared"]["embedding"][tokens].mean(axis=-2) @ params[tower]["kernel"])

        texts = embedded("query", batch.query), embedded("doc", batch.doc), batch.query_id, batch.doc_id
        return Embeddings(*texts, neg_docs=embedded("doc", batch.neg_docs), neg_doc_ids=batch.neg_doc_ids)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    train_sentencepiece([f"{a} {b}" for a in WORDS for b in WORDS], folder / "spiece.model", vocab_size=30)
    tokenizer = load_tokenizer(folder / "spiece.model")
    texts = {
        "q": [(query_id, "red fox") for query_id in QRELS],
        "d": [(f"d{row}", "deep blue sea " * (1 + row % 3)) for row in range(30)],
    }
    return tuple(corpus.build_token_store(texts[kind], tokenizer, folder / kind, progress=False) for kind in "qd")


def training_texts(stores, passages=None, **hashes):
    return TrainingPairs("toy", *stores, qrel_pairs(QRELS, *stores), hashes, passages)


def generation(folder, number=1, short=(), **facts):
    """Three negatives a pair, one for the pairs of the queries in `short`; d1 has none."""
    mined = [
        Mined(query, doc, [f"d{row}" for row in range(10, 11 if query in short else 13)] if doc != "d1" else [], [])
        for query, docs in QRELS.items()
        for doc, grade in docs.items()
        if grade
    ]
    return generations.write_lines(folder, number, mined, facts)


def norm_of(gradient, pattern):
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    chosen = [np.asarray(leaf, np.float64) for path, leaf in leaves if re.fullmatch(pattern, paths.path_of(path))]
    return np.sqrt(sum(np.sum(leaf**2) for leaf in chosen))


def test_gradient_norms_are_those_of_one_gradient_a_pair_and_of_the_whole_batchs():
    rng = np.random.default_rng(0)
    tokens = lambda *shape: rng.integers(1, 31, shape).astype(np.int32)  # noqa: E731
    ids = np.arange(4, dtype=np.int32)
    pairs = Batch(tokens(4, 5), tokens(4, 6), ids, ids, tokens(4, 2, 6), ids[:, None] + [[10, 20]])
    pairs.neg_doc_ids[1, 1] = -1
    model = Bag()
    params = jax.tree.map(jnp.asarray, model.init(rng))
    gradients_of = negative_analysis.make_gradients_of(model, LOSS, grad_norms.group_norms(params, GROUPS))
    losses, of_pairs, of_mean = gradients_of(params, pairs)
    gradient = jax.jit(jax.grad(lambda params, batch: LOSS(model.embed(params, batch))[0]))
    embeddings = jax.device_get(jax.jit(model.embed)(params, pairs))
    for row in range(4):
        alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], pairs)
        for group, pattern in GROUPS.items():
            np.testing.assert_allclose(of_pairs[group][row], norm_of(gradient(params, alone), pattern), rtol=1e-4)
        own = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], embeddings)
        np.testing.assert_allclose(losses[row], naive.ance(own, temperature=0.1), rtol=1e-5)
    for group, pattern in GROUPS.items():
        np.testing.assert_allclose(of_mean[group], norm_of(gradient(params, pairs), pattern), rtol=1e-4)
    assert of_mean["all"] < np.mean(of_pairs["all"])


def test_ranks_count_without_positives_and_margins_are_to_the_pairs_own(monkeypatch, stores):
    rng = np.random.default_rng(1)
    queries, docs = (rng.standard_normal((num, 4)).astype(np.float32) for num in (3, 30))
    docs[12] = docs[11]
    table = np.array([[11, 12, 5], [20, 21, -1], [8, 9, 10]], np.int32)
    sample = Sample(
        training_texts(stores),
        np.array([[0, 0], [1, 2], [2, 4]]),
        [np.array([0, 1]), np.array([2]), np.array([4])],
        {"a": table},
        {},
        3,
    )
    monkeypatch.setattr(negative_analysis, "MAX_SCORES", 60)  # two queries at a time
    ranks, margins = negative_analysis.places_of(queries, docs, sample)["a"]
    for pair in range(3):
        scores = docs.astype(np.float64) @ queries[pair]
        others = [row for row in range(30) if row not in sample.positives[pair]]
        for place, row in enumerate(table[pair].tolist()):
            if row < 0:
                assert ranks[pair, place] == 0
                assert np.isnan(margins[pair, place])
                continue
            assert ranks[pair, place] == 1 + sum(scores[other] > scores[row] for other in others)
            np.testing.assert_allclose(margins[pair, place], scores[sample.pairs[pair, 1]] - scores[row], atol=1e-5)
    assert ranks[0, 0] == ranks[0, 1]


def test_a_document_of_several_passages_ranks_as_its_best_one(stores):
    passages = PassageStore(stores[1], 8, max_passages=2)
    assert 30 < passages.num_texts < 60
    rng = np.random.default_rng(2)
    queries, vectors = (rng.standard_normal((num, 4)).astype(np.float32) for num in (2, passages.num_texts))
    sample = Sample(
        training_texts(stores, passages),
        np.array([[0, 0], [1, 2]]),
        [np.array([0]), np.array([2])],
        {"a": np.array([[7], [8]], np.int32)},
        {},
        2,
    )
    ranks, margins = negative_analysis.places_of(queries, vectors, sample)["a"]
    for pair, ((_, doc), (negative,)) in enumerate(zip(sample.pairs.tolist(), sample.kinds["a"].tolist(), strict=True)):
        scores = [max(vectors[passages.doc_rows == row] @ queries[pair]) for row in range(30)]
        assert ranks[pair, 0] == 1 + sum(score > scores[negative] for row, score in enumerate(scores) if row != doc)
        np.testing.assert_allclose(margins[pair, 0], scores[doc] - scores[negative], atol=1e-5)


@pytest.mark.parametrize("max_passages", [1, 2])
def test_a_batch_holds_the_texts_of_the_pairs_and_of_the_drawn_negatives(tmp_path, stores, max_passages):
    run = Run(tmp_path, 0, None, {}, Side(None, 8), Side(None, 8))
    passages = PassageStore(stores[1], 8, max_passages=2) if max_passages == 2 else None
    sample = negative_analysis.sample(training_texts(stores, passages), {"mined": generation(tmp_path)}, num_negatives=2)
    batch = negative_analysis.batch_of(sample, "mined", run)
    texts = passages or stores[1]
    for row, (query, doc) in enumerate(sample.pairs.tolist()):
        np.testing.assert_array_equal(batch.query[row], stores[0].pad(np.array([query]), 8, batch.query.shape[1])[0])
        for tokens, own in ((batch.doc[row], doc), *zip(batch.neg_docs[row], sample.drawn["mined"][row], strict=True)):
            rows = passages.of_docs(np.array(own)) if passages else np.array([own])
            np.testing.assert_array_equal(np.atleast_2d(tokens), texts.pad(rows, 8, tokens.shape[-1]))
    np.testing.assert_array_equal(batch.neg_doc_ids, sample.drawn["mined"])


def test_overlap_is_a_mean_over_pairs_and_passes_over_fillers():
    ranks = np.array([[1, 5, 11], [10, 0, 0]])
    margins = np.where(ranks > 0, np.float32(0.5) - ranks / 10, np.nan).astype(np.float32)
    numbers = negative_analysis.place_numbers(ranks, margins, depth=10)
    assert numbers["overlap"] == pytest.approx((2 / 3 + 1) / 2, rel=1e-4)
    assert numbers["mean_rank"] == pytest.approx(27 / 4, rel=1e-4)
    assert numbers["share_above_positive"] == 0.5
    assert numbers["margin"]["mean"] == pytest.approx(0.5 - 27 / 40, rel=1e-3)


def test_a_sample_has_pairs_with_enough_negatives_of_every_kind_and_no_known_positive(tmp_path, stores):
    kinds = {"long": generation(tmp_path / "long"), "short": generation(tmp_path / "short", short=("qb",))}
    one = negative_analysis.sample(training_texts(stores), kinds, num_negatives=1, seed=3)
    assert one.pairs.tolist() == [[0, 0], [1, 2], [2, 4]]  # d1's has no negative, and d3 is not relevant
    two = negative_analysis.sample(training_texts(stores), kinds, num_negatives=2, seed=3)
    assert two.pairs.tolist() == [[0, 0], [2, 4]]
    assert two.num_pairs == 2
    three = negative_analysis.sample(training_texts(stores), {"long": kinds["long"]}, num_negatives=3)
    assert three.pairs.tolist() == [[1, 2], [2, 4]]  # only two documents belong to other queries than qa
    assert one.kinds.keys() == {"in_batch", "random", "long", "short"}
    assert set(one.kinds["in_batch"][0].tolist()) == {2, 4, -1}
    assert np.isin(one.kinds["random"], [0, 1])[0].sum() == 0
    assert all(len(set(row.tolist())) == 20 for row in one.kinds["random"])
    for kind, drawn in two.drawn.items():
        assert drawn.shape == (2, 2)
        assert all(set(own.tolist()) <= set(table.tolist()) for own, table in zip(drawn, two.kinds[kind], strict=True))
    again = negative_analysis.sample(training_texts(stores), kinds, num_negatives=2, seed=3)
    assert {kind: rows.tolist() for kind, rows in again.drawn.items()} == {kind: rows.tolist() for kind, rows in two.drawn.items()}


def test_a_document_with_the_id_of_its_query_is_no_negative_unless_it_is_kept(tmp_path, stores):
    named = [("d2", "red fox"), ("d5", "red fox"), ("qc", "red fox")]
    tokenizer = load_tokenizer(stores[0].store_dir.parent / "spiece.model")
    queries = corpus.build_token_store(named, tokenizer, tmp_path / "q", progress=False)
    pairs = np.array([[0, 0], [1, 2], [2, 4]], np.int32)
    dropped, kept = (
        negative_analysis.sample(TrainingPairs("toy", queries, stores[1], pairs, {}, drop_identical_ids=drop), {}, seed=3)
        for drop in (True, False)
    )
    assert [rows.tolist() for rows in dropped.positives] == [[0, 2], [2, 5], [4]]
    assert [rows.tolist() for rows in kept.positives] == [[0], [2], [4]]
    assert set(dropped.kinds["in_batch"][0].tolist()) == {4, -1}
    assert set(kept.kinds["in_batch"][0].tolist()) == {2, 4, -1}
    two = negative_analysis.sample(dropped.texts, {}, num_negatives=2, seed=3)
    assert two.pairs.tolist() == [[1, 2], [2, 4]]  # d2 is no negative of the query d2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_negatives": 4}, "no training pair has 4 negatives of every kind"),
        ({"num_negatives": 0}, "64 pairs of 0 negatives cannot be"),
        ({"num_negatives": 21}, "give at least 1 and 1 to 20"),
        ({"num_pairs": 0}, "0 pairs of 1 negatives"),
        ({"name": "random"}, "are named 'random', a name reserved for"),
        ({"hashes": {"docs": "of others"}}, "was mined from other docs than the training data has"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(tmp_path, stores, options, sentence):
    kinds = {options.pop("name", "mined"): generation(tmp_path)}
    with pytest.raises(InputError, match=sentence):
        negative_analysis.sample(training_texts(stores, **options.pop("hashes", {})), kinds, **options)


def test_the_temperature_is_that_of_the_training_unless_another_is_given(tmp_path):
    def of(given=None, *, normalize=True, learned=None):
        model = SimpleNamespace(initial_temperature=learned, query=SimpleNamespace(normalize=normalize))
        return negative_analysis.temperature_of(Run(tmp_path, 0, model, {}, None, None), given)

    assert (of(), of(normalize=False), of(0.3)) == (0.01, 1.0, 0.3)
    (tmp_path / "recipe.json").write_text('{"loss": {"function": "de_jax.losses.in_batch.samtone", "temperature": 0.05}}')
    assert (of(), of(0.3)) == (0.05, 0.3)
    assert of(learned=0.07) is None
    (tmp_path / "recipe.json").write_text('{"loss": {"function": "own.loss"}}')
    assert of() == 0.01
    for given, learned in ((0.3, 0.07), (-1.0, None)):
        with pytest.raises(InputError, match=f"the temperature {given} cannot be"):
            of(given, learned=learned)


def checkpoint(step, *kinds):
    def measured(scale):
        norms = {"all": 3.0 * scale, "top": 1.0 * scale}
        margins = np.linspace(-0.1, scale, 30).astype(np.float32)
        ranks = np.arange(1, 31)[None]
        numbers = {"loss": scale, "grad_norm": {"per_pair": norms, "median": norms, "of_mean": norms}}
        return Measured(numbers | negative_analysis.place_numbers(ranks, margins[None], depth=10), margins)

    return AtCheckpoint(step, {kind: measured(10.0**-place) for place, kind in enumerate(kinds)})


@pytest.mark.parametrize("steps", [(5,), (5, 10)])
def test_a_report_holds_its_pictures_and_a_table_a_checkpoint(tmp_path, steps):
    found = [checkpoint(step, "random", "a<b") for step in steps]
    report = negative_report.write(tmp_path, "Negatives", {"run": "runs/x"}, found, depth=10)
    assert json.loads((tmp_path / "analysis.json").read_text()) == report
    assert [one["step"] for one in report["checkpoints"]] == list(steps)
    page = (tmp_path / "report.html").read_text()
    pictures = {file.name for file in tmp_path.glob("*.png")}
    assert pictures == {"gradient_norms.png", "loss.png", "overlap.png", "margins.png"}
    assert page.count('src="data:image/png;base64,') == page.count("src=") == len(pictures)
    assert all(f"<h2>Step {step}</h2>" in page for step in steps)
    assert "a&lt;b" in page
    assert all(imread(tmp_path / file)[..., :3].std() > 0.01 for file in pictures)
