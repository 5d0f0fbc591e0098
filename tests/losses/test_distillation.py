"""Losses by a teacher or a guide and over cut embeddings, beside those of sentence-transformers; what they refuse."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from sentence_transformers import losses as st_losses
from sentence_transformers import util

from de_jax.losses import combination as combined_
from de_jax.losses import scores as scores_
from de_jax.losses.combination import combined, guided, matryoshka, parts
from de_jax.losses.distillation import angle, cosent, kl_distillation, margin_mse, relevance_weighted
from de_jax.losses.in_batch import in_batch_softmax, samtone
from de_jax.losses.mined import ance, sampled_softmax
from de_jax.losses.pair_loss import global_orthogonal
from de_jax.types import InputError, Sample

LOSSES = {"margin_mse": margin_mse, "kl_distillation": kl_distillation}


@pytest.fixture
def whole(make_embeddings):
    """Embeddings in which nothing is missing, masked or alike, as other libraries have them."""
    e = make_embeddings(0, dim=8, unique=True, num_padding=0, num_neg_queries=0)
    return e._replace(neg_doc_ids=None, scores=jnp.asarray(np.random.default_rng(1).normal(size=e.scores.shape), jnp.float32))


def columns(e):
    """The batch as sentence-transformers takes it: a tensor for the queries, the documents, the first negatives, ..."""
    arrays = [e.query, e.doc, *np.moveaxis(np.asarray(e.neg_docs), 1, 0)]
    return [torch.tensor(np.asarray(array), requires_grad=True) for array in arrays]


def assert_equal(loss, e, theirs, tensors):
    """Value and gradients."""
    theirs.backward()
    vectors = {name: getattr(e, name) for name in ("query", "doc", "neg_docs")}
    value, gradient = jax.jit(jax.value_and_grad(lambda v: loss(e._replace(**v))[0]))(vectors)
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    query, doc, *negatives = (tensor.grad.numpy() for tensor in tensors)
    for name, expected in (("query", query), ("doc", doc), ("neg_docs", np.stack(negatives, axis=1))):
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def model(dim=8):
    return types.SimpleNamespace(get_embedding_dimension=lambda: dim, similarity_fn_name="cosine")


def test_margin_mse_is_that_of_sentence_transformers(whole):
    tensors = columns(whole)
    theirs = st_losses.MarginMSELoss(model()).compute_loss_from_embeddings(tensors, torch.tensor(np.asarray(whole.scores)))
    assert_equal(margin_mse, whole, theirs, tensors)


def test_kl_distillation_is_that_of_sentence_transformers_without_its_factor(whole):
    tensors = columns(whole)
    loss = st_losses.DistillKLDivLoss(model(), temperature=2.0)
    theirs = loss.compute_loss_from_embeddings(tensors, torch.tensor(np.asarray(whole.scores))) / 4.0
    assert_equal(functools.partial(kl_distillation, temperature=2.0, teacher_temperature=2.0), whole, theirs, tensors)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (functools.partial(in_batch_softmax, directions="query_to_doc"), {}),
        (
            functools.partial(in_batch_softmax, reduce_directions="mean"),
            {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
        ),
        (functools.partial(samtone, directions="query_to_doc"), {"directions": ("query_to_doc", "query_to_query")}),
    ],
)
def test_in_batch_losses_are_multiple_negatives_ranking(ours, theirs, whole):
    """As docs/coming_from/sentence_transformers.md says."""
    tensors = columns(whole)
    loss = st_losses.MultipleNegativesRankingLoss(model(), scale=20.0, similarity_fct=util.dot_score, **theirs)
    value = loss.compute_loss_from_embeddings(tensors, None)
    assert_equal(functools.partial(ours, temperature=0.05, mask_duplicates=False), whole, value, tensors)


@pytest.mark.parametrize(("of", "mode"), [("all", "all"), ("in_batch", "in_batch"), ("mined", "hard")])
def test_hardness_is_that_of_multiple_negatives_ranking(of, mode, whole):
    theirs = st_losses.MultipleNegativesRankingLoss(
        model(), scale=20.0, similarity_fct=util.dot_score, hardness_mode=f"{mode}_negatives", hardness_strength=9.0
    )
    options = {"directions": "query_to_doc", "hardness": 9.0, "hardness_of": of, "mask_duplicates": False, "temperature": 0.05}
    for block_size in (None, 5):
        tensors = columns(whole)
        value = theirs.compute_loss_from_embeddings(tensors, None)
        assert_equal(functools.partial(in_batch_softmax, block_size=block_size, **options), whole, value, tensors)


def test_graded_losses_are_those_of_sentence_transformers(whole):
    """Theirs takes pairs; the negatives of a row are more of them."""
    grades = jnp.round(whole.scores)  # equal grades are not compared
    for ours, theirs in ((cosent, st_losses.CoSENTLoss), (angle, st_losses.AnglELoss)):
        tensors = columns(whole)
        pairs = [torch.cat([tensors[0]] * 4), torch.cat(tensors[1:])]
        value = theirs(model(), scale=20.0).compute_loss_from_embeddings(pairs, torch.tensor(np.asarray(grades).T.ravel()))
        assert_tangent_equal(ours, whole._replace(scores=grades), value, tensors)


def test_global_orthogonal_is_that_of_sentence_transformers(whole):
    tensors = columns(whole)[:2]
    loss = st_losses.GlobalOrthogonalRegularizationLoss(model(), second_moment_weight=0.5, aggregation="sum")
    theirs = sum(loss.compute_loss_from_embeddings(tensors).values())
    ours = functools.partial(global_orthogonal, second_moment_weight=0.5, reduce_sides="sum")
    assert_tangent_equal(ours, whole, theirs, tensors)


def assert_tangent_equal(loss, e, theirs, tensors):
    """Value, and gradients along the sphere: theirs scale every vector to length 1, which these have."""
    theirs.backward()
    names = ("query", "doc", "neg_docs")[: 2 + (len(tensors) > 2)]
    vectors = {name: getattr(e, name) for name in names}
    value, gradient = jax.jit(jax.value_and_grad(lambda v: loss(e._replace(**v))[0]))(vectors)
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    query, doc, *negatives = (tensor.grad.numpy() for tensor in tensors)
    for name, expected in zip(names, (query, doc, np.stack(negatives, axis=1) if negatives else None), strict=False):
        own = np.asarray(gradient[name])
        own -= (own * vectors[name]).sum(axis=-1, keepdims=True) * vectors[name]
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=2e-6, err_msg=name)


def test_multiple_negatives_ranking_as_documented_takes_cosines(whole):
    """So ours is equal for embeddings of length 1, as these are, and not for others."""
    twice = [2 * tensor for tensor in columns(whole)]
    by_cosine = st_losses.MultipleNegativesRankingLoss(model(), scale=20.0)
    by_product = st_losses.MultipleNegativesRankingLoss(model(), scale=20.0, similarity_fct=util.dot_score)
    values = [loss.compute_loss_from_embeddings(of, None) for loss in (by_cosine, by_product) for of in (columns(whole), twice)]
    torch.testing.assert_close(values[:2], [values[2]] * 2)
    assert abs(values[3] - values[2]) > 0.01


class Encoder(torch.nn.Module):
    """A model whose "features" are embeddings already."""

    def __init__(self, name="sentence_embedding"):
        super().__init__()
        self.name = name

    def forward(self, features):
        return {"sentence_embedding": features[self.name]}

    def get_embedding_dimension(self):
        return 8


def test_matryoshka_is_that_of_sentence_transformers(whole):
    tensors, encoder = columns(whole), Encoder()
    ranking = st_losses.MultipleNegativesRankingLoss(encoder, scale=10.0, similarity_fct=util.cos_sim)
    theirs = st_losses.MatryoshkaLoss(encoder, ranking, matryoshka_dims=[8, 4, 3], matryoshka_weights=[1.0, 0.5, 0.25])
    inner = functools.partial(in_batch_softmax, temperature=0.1, directions="query_to_doc", mask_duplicates=False)
    ours = functools.partial(matryoshka, loss=inner, dims=(3, 8, 4), weights=(0.25, 1.0, 0.5))
    value, metrics = jax.jit(ours)(whole)
    features = [{"sentence_embedding": tensor} for tensor in tensors]
    np.testing.assert_allclose(value, theirs(features, None).item(), rtol=1e-5)
    assert {"loss_dim_8", "loss_dim_4", "loss_dim_3", "accuracy"} <= metrics.keys()
    np.testing.assert_allclose(metrics["loss_dim_8"], inner(whole)[0], rtol=1e-6)


def normalized(vectors):
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def gist(e):
    """One softmax of the query over documents, queries and mined documents, and over its document's scores with other documents."""
    sets, scale = scores_.items(e), jnp.float32(10.0)
    sides = [("query", ("doc", "query", "neg_docs")), ("doc", ("doc",))]
    negatives = scores_.merge(scores_.contrasts(sets, sides, scale, mask_duplicates=False, block_size=None))
    return scores_.softmax_loss(scale * scores_.positive_scores(sets), negatives.log_sum_exp).mean(), {}


@pytest.mark.parametrize(("strategy", "margin", "contrast_positives"), [("absolute", 0.1, True), ("relative", 0.3, False)])
def test_guided_is_gist_of_sentence_transformers(whole, strategy, margin, contrast_positives):
    e = whole._replace(neg_docs=whole.neg_docs[:, :1])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel()))
    student, guide = Encoder(), Encoder("guide")
    for encoder in (student, guide):
        encoder.tokenizer, encoder.max_seq_length = tokenizer, 8
    settings = {"margin_strategy": strategy, "margin": margin, "contrast_positives": contrast_positives}
    loss = st_losses.GISTEmbedLoss(student, guide, temperature=0.1, **settings)
    tensors = columns(e)
    says = (torch.tensor(np.asarray(vectors)) for vectors in (e.guide.query, e.guide.doc, e.guide.neg_docs[:, 0]))
    features = [{"sentence_embedding": tensor, "guide": own} for tensor, own in zip(tensors, says, strict=True)]
    inner = gist if contrast_positives else functools.partial(samtone, temperature=0.1, directions="query_to_doc")

    def ours(e):
        unit = {name: normalized(getattr(e, name)) for name in ("query", "doc", "neg_docs")}  # as cosines are differentiated
        return guided(e._replace(**unit), loss=inner, margin=margin, relative=strategy == "relative")

    e = e._replace(guide=e.guide._replace(neg_docs=e.guide.neg_docs[:, :1]))
    assert_equal(ours, e, loss(features, None), tensors)


def test_matryoshka_over_whole_embeddings_alone_is_the_loss(make_embeddings):
    e = make_embeddings(1)
    np.testing.assert_array_equal(matryoshka(e, loss=samtone, dims=(3,))[0], samtone(e)[0])


def test_by_default_three_halves_are_cut(make_embeddings):
    _, metrics = jax.eval_shape(functools.partial(matryoshka, loss=samtone), make_embeddings(1, dim=12))
    assert {name for name in metrics if name.startswith("loss_dim")} == {"loss_dim_12", "loss_dim_6", "loss_dim_3", "loss_dim_1"}


@pytest.mark.soak
def test_matryoshka_in_blocks_is_the_dense_form(make_embeddings):
    e = make_embeddings(2, dim=6)
    dense, blocks = (
        matryoshka(e, loss=functools.partial(samtone, temperature=0.1, block_size=size), dims=(6, 4))[0] for size in (None, 3)
    )
    np.testing.assert_allclose(blocks, dense, rtol=1e-5)


def test_the_first_dimensions_are_left_as_they_are_without_normalize(make_embeddings):
    e = make_embeddings(3, num_neg_docs=0, num_neg_queries=0, num_padding=0)
    cut = e._replace(query=e.query[:, :2], doc=e.doc[:, :2])
    np.testing.assert_allclose(matryoshka(e, loss=samtone, dims=(2,), normalize=False)[0], samtone(cut)[0], rtol=1e-6)


def test_combined_is_the_weighted_sum_with_the_metrics_of_each(make_embeddings):
    e = make_embeddings(4)
    softmax = functools.partial(in_batch_softmax, temperature=0.1)
    value, metrics = combined(e, losses=(softmax, margin_mse, margin_mse), weights=(1.0, 0.5, 2.0))
    (first, of_first), (second, of_second) = softmax(e), margin_mse(e)
    np.testing.assert_allclose(value, first + 2.5 * second, rtol=1e-6)
    assert metrics["in_batch_softmax/loss"] == first
    assert metrics["margin_mse/loss"] == metrics["margin_mse_2/loss"] == second
    assert metrics["accuracy"] == of_first["accuracy"]
    assert metrics["margin_mse/teacher_agreement"] == of_second["teacher_agreement"]


def test_a_teacher_that_agrees_costs_nothing_and_what_it_does_not_know_has_no_gradient(whole):
    own = jnp.concatenate([jnp.sum(whole.query * whole.doc, 1)[:, None], jnp.einsum("BD,BND->BN", whole.query, whole.neg_docs)], 1)
    e = whole._replace(scores=own.at[0, 2].set(jnp.nan).at[1, 0].set(jnp.nan))
    for loss in LOSSES.values():
        value, metrics = loss(e)
        np.testing.assert_allclose(value, 0.0, atol=1e-6)
        np.testing.assert_allclose(metrics["teacher_agreement"], 1.0)
        np.testing.assert_allclose(metrics["teacher_known"], 1 - 2 / own.size, rtol=1e-6)
        only = e._replace(scores=own.at[2, 1:].set(jnp.nan))
        assert not (own[:, 0] > own[:, 1:].max(axis=1)).any()
        assert loss(only)[1]["accuracy"] == 0.0  # rows without a scored negative have nothing to be ahead of
    gradient = jax.grad(lambda neg_docs: margin_mse(e._replace(neg_docs=neg_docs, scores=2 * e.scores))[0])(e.neg_docs)
    np.testing.assert_array_equal(gradient[0, 1], 0.0)
    np.testing.assert_array_equal(gradient[1], 0.0)
    assert np.abs(gradient[0, 0]).max() > 0


def test_rows_of_equal_weight_give_the_softmax_and_rows_without_a_score_count_for_nothing(make_embeddings):
    e = make_embeddings(5, num_padding=0)
    for scores, weight in ((0.25, "score"), (-1.0, "sigmoid")):
        value, _ = relevance_weighted(e._replace(scores=jnp.full((8, 1), scores)), weight=weight, temperature=0.1)
        np.testing.assert_allclose(value, in_batch_softmax(e, temperature=0.1)[0], rtol=1e-6)
    value, metrics = relevance_weighted(e._replace(scores=jnp.full((8, 1), jnp.nan)), temperature=0.1)
    assert (float(value), float(metrics["weight_mean"])) == (0.0, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_batches_that_teach_nothing_are_refused(name, make_embeddings):
    e, loss = make_embeddings(6), LOSSES[name]
    for changed, sentence in (
        ({"scores": None}, f"{name} needs a teacher's scores, but batches come without; make some with de-jax score pairs"),
        ({"neg_docs": None}, f"{name} compares a document with negatives mined for its query, but batches come without"),
        ({"scores": e.scores[:, :1]}, f"{name} needs the teacher's scores of all 3 negatives of a row, but it has scored 0"),
    ):
        with pytest.raises(InputError, match=sentence):
            jax.eval_shape(loss, e._replace(**changed))
    with pytest.raises(InputError, match="relevance_weighted needs a teacher's scores"):
        relevance_weighted(e._replace(scores=None))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dims": (4, 2)}, r"matryoshka\.dims has 4, but embeddings have 3 dimensions; give 1 to 3\."),
        ({"dims": (2, 2)}, r"matryoshka\.dims is \(2, 2\); give each number of dimensions once\."),
        ({"dims": ()}, r"matryoshka\.dims is empty; give at least one\."),
        ({"dims": (0,)}, r"matryoshka\.dims\[0\] is 0; it must be at least 1\."),
        ({"dims": (3, 2), "weights": (1.0,)}, r"matryoshka\.weights has 1 numbers for 2 dims; give one for each\."),
        (
            {"dims": (2,), "loss": sampled_softmax},
            r"draws stand for whole embeddings, which matryoshka cuts; take matryoshka\.loss",
        ),
    ],
)
def test_dimensions_that_cannot_be_are_refused(settings, sentence, make_embeddings):
    e = make_embeddings(7)._replace(sample=Sample(jnp.zeros(8), jnp.zeros((8, 3)), jnp.zeros(8)))
    with pytest.raises(InputError, match=sentence):
        matryoshka(e, **{"loss": ance, **settings})


def test_combined_needs_losses_and_a_weight_for_each(make_embeddings):
    with pytest.raises(InputError, match=r"combined\.losses is empty"):
        combined(make_embeddings(8), losses=())
    with pytest.raises(InputError, match=r"combined\.weights has 2 numbers for 1 losses"):
        combined(make_embeddings(8), losses=(ance,), weights=(1.0, 1.0))


def test_parts_of_a_loss_are_found_at_any_depth():
    cut = functools.partial(matryoshka, loss=functools.partial(combined, losses=(ance, margin_mse)), dims=(2,))
    assert [combined_.name_of(part) for part in parts(cut)] == ["matryoshka", "combined", "ance", "margin_mse"]
