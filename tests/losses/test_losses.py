"""What holds for every loss: it equals the loops of `naive`, and nothing about a batch's layout or content upsets it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

from de_jax.losses import combination, distillation, in_batch, mined, pair_loss
from de_jax.training.mesh import sharding
from de_jax.types import PADDING_ID

VECTORS = ("query", "doc", "neg_docs", "neg_queries")


class Case(NamedTuple):
    name: str
    loss: object
    reference: object
    hyper_parameters: dict


def cut_samtone(e, **options):
    """`matryoshka`, with the settings of the loss that it wraps."""
    return combination.matryoshka(e, loss=functools.partial(in_batch.samtone, **options), dims=(2, 3), weights=(0.5, 1.0))


def naive_cut_samtone(e, **options):
    return naive.matryoshka(e, loss=naive.samtone, dims=(2, 3), weights=(0.5, 1.0), **options)


def guided(loss, **settings):
    """A loss with the mask of a guide."""
    return lambda e, **options: combination.guided(e, loss=functools.partial(loss, **options), **settings)


def naive_guided(loss, **settings):
    return functools.partial(naive.guided, loss=loss, **settings)


def without_masks(loss):
    """A loss to which ids say nothing of a negative but whether it is there."""
    return lambda e, mask_duplicates=True, **options: loss(e, **options)


def without_temperature(loss):
    return lambda e, mask_duplicates=True, temperature=None, **options: loss(e, **options)


def naive_hardness(of):
    return lambda e, hardness, hardness_of="all", **options: naive.hardness_weighted(e, hardness=hardness, of=of, **options)


RELATIVE = {"margin": 0.2, "relative": True}
CASES = [
    Case("softmax", in_batch.in_batch_softmax, naive.in_batch_softmax, {}),
    Case("softmax_q2d", in_batch.in_batch_softmax, naive.in_batch_softmax, {"directions": "query_to_doc"}),
    Case("softmax_d2q", in_batch.in_batch_softmax, naive.in_batch_softmax, {"directions": "doc_to_query"}),
    Case("softmax_mean", in_batch.in_batch_softmax, naive.in_batch_softmax, {"reduce_directions": "mean"}),
    Case("softmax_smooth", in_batch.in_batch_softmax, naive.in_batch_softmax, {"label_smoothing": 0.1, "margin": 0.3}),
    Case("hardness", in_batch.in_batch_softmax, naive_hardness("all"), {"hardness": 9.0}),
    Case("hardness_mined", in_batch.in_batch_softmax, naive_hardness("mined"), {"hardness": 5.0, "hardness_of": "mined"}),
    Case("hardness_in_batch", in_batch.in_batch_softmax, naive_hardness("in_batch"), {"hardness": 5.0, "hardness_of": "in_batch"}),
    Case("samtone_query", in_batch.samtone, naive.samtone, {"same_tower": "query"}),
    Case("samtone_doc", in_batch.samtone, naive.samtone, {"same_tower": "doc", "reduce_directions": "mean"}),
    Case("samtone_both", in_batch.samtone, naive.samtone, {"same_tower": "both", "margin": 0.2, "margin_on": "logit"}),
    Case("samtone_q2d", in_batch.samtone, naive.samtone, {"directions": "query_to_doc"}),
    Case("nce", in_batch.nce, naive.nce, {}),
    Case("pair_eq3", pair_loss.pair, naive.pair, {"form": "samtone_eq3"}),
    Case("pair_eq3_mean", pair_loss.pair, naive.pair, {"reduce_directions": "mean", "alpha": 0.7}),
    Case("pair_paper", pair_loss.pair, naive.pair, {"form": "pair_paper", "alpha": 0.4}),
    Case("pair_code", pair_loss.pair, naive.pair, {"form": "pair_code", "alpha": 0.4}),
    Case("ance", mined.ance, naive.ance, {}),
    Case("ance_in_batch", mined.ance, naive.ance, {"in_batch": True}),
    Case("dance", mined.dance, naive.dance, {"dual_weight": 0.3}),
    Case("margin_mse", without_masks(distillation.margin_mse), without_masks(naive.margin_mse), {}),
    Case("kl", without_masks(distillation.kl_distillation), without_masks(naive.kl_distillation), {"teacher_temperature": 0.7}),
    Case("margin_mse_guide", without_masks(distillation.margin_mse), without_masks(naive.margin_mse), {"teacher": "guide"}),
    Case(
        "kl_guide",
        without_masks(distillation.kl_distillation),
        without_masks(naive.kl_distillation),
        {"teacher_temperature": 0.1, "teacher": "guide"},
    ),
    Case("weighted", distillation.relevance_weighted, naive.relevance_weighted, {}),
    Case("weighted_sigmoid", distillation.relevance_weighted, naive.relevance_weighted, {"weight": "sigmoid"}),
    Case("cosent", without_masks(distillation.cosent), without_masks(naive.cosent), {}),
    Case("angle", without_masks(distillation.angle), without_masks(naive.angle), {}),
    Case("orthogonal", without_temperature(pair_loss.global_orthogonal), without_temperature(naive.global_orthogonal), {}),
    Case("guided", guided(in_batch.samtone), naive_guided(naive.samtone), {"directions": "query_to_doc"}),
    Case("guided_pair", guided(pair_loss.pair), naive_guided(naive.pair), {"form": "pair_paper"}),
    Case("guided_ance", guided(mined.ance, **RELATIVE), naive_guided(naive.ance, **RELATIVE), {}),
    Case("matryoshka", cut_samtone, naive_cut_samtone, {"directions": "query_to_doc"}),
]
BY_NAME = {case.name: case for case in CASES}
DISTINCT = ("softmax_smooth", "samtone_both", "nce", "pair_eq3", "pair_paper", "pair_code", "ance_in_batch", "dance")
DISTINCT += ("margin_mse", "kl", "kl_guide", "cosent", "angle")
OFTEN = ("samtone_both", "pair_eq3", "ance_in_batch", "margin_mse", "kl_guide", "angle")
"""One of each family; the others have what every loss must have in the soak."""


def by_name(names):
    return pytest.mark.parametrize(
        "case", [pytest.param(BY_NAME[name], id=name, marks=[pytest.mark.soak] * (name not in OFTEN)) for name in names]
    )


every_loss = by_name(DISTINCT)
every_case = by_name(BY_NAME)
GRADED = ("cosent", "angle")
NEEDS_MINED = ("ance", "ance_in_batch", "dance", "guided_ance", "margin_mse", "kl")
without_mined = by_name([name for name in BY_NAME if name not in NEEDS_MINED])
masked_or_not = pytest.mark.parametrize("mask_duplicates", [True, False])


@functools.cache
def compiled(name):
    """One program of a case for all tests and temperatures, which it takes as a learned one: compiling is most of their time."""
    loss = functools.partial(BY_NAME[name].loss, **BY_NAME[name].hyper_parameters, temperature=None)
    return jax.jit(lambda vectors, e: jax.value_and_grad(lambda v: loss(e._replace(**v)), has_aux=True)(vectors))


def value_and_gradient(case, e, *, temperature=0.1):
    """The loss, its gradient by the vectors and the scale 1 / temperature, and its metrics."""
    e = e._replace(scale=jnp.float32(1 / temperature))
    (value, metrics), gradient = compiled(case.name)({name: getattr(e, name) for name in (*VECTORS, "scale")}, e)
    return value, gradient, metrics


def by_numpy(change, e):
    """A batch whose arrays were changed without a program for it."""
    return jax.tree.map(lambda x: jnp.asarray(change(np.array(x))), e)


def reference(case, e, **more):
    """The loops' loss, over lists of Python floats, which hold what float32 and bfloat16 hold."""
    lists = {name: jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value) for name, value in e._asdict().items()}
    return case.reference(e._replace(**lists), **case.hyper_parameters, **more)


@pytest.mark.parametrize("case", CASES, ids=list(BY_NAME))
def test_loss_equals_loops(case, make_embeddings):
    for seed, (temperature, mask_duplicates) in enumerate(((0.01, True), (0.1, False), (1.0, True))):
        e, options = make_embeddings(seed), {"temperature": temperature, "mask_duplicates": mask_duplicates}
        np.testing.assert_allclose(case.loss(e, **options, **case.hyper_parameters)[0], reference(case, e, **options), rtol=1e-5)


@every_case
@masked_or_not
def test_loss_equals_loops_where_more_positives_are_known(case, mask_duplicates, make_embeddings):
    for seed in range(2):
        e = make_embeddings(seed, num_ids=9, num_positives=2)
        expected = reference(case, e, mask_duplicates=mask_duplicates)
        np.testing.assert_allclose(case.loss(e, mask_duplicates=mask_duplicates, **case.hyper_parameters)[0], expected, rtol=1e-5)


@without_mined
@pytest.mark.parametrize("dropped", [("neg_docs", "neg_doc_ids"), ("neg_doc_ids", "neg_query_ids"), VECTORS[2:]])
def test_loss_equals_loops_without_mined_negatives_or_their_ids(case, dropped, make_embeddings):
    e = make_embeddings(5)._replace(**dict.fromkeys(dropped))
    np.testing.assert_allclose(case.loss(e, **case.hyper_parameters)[0], reference(case, e), rtol=1e-5)


@every_case
def test_loss_equals_loops_where_logits_reach_thousands(case, make_embeddings):
    """Masked entries must stay below any logit, also below that of a dot product far from 0."""
    e = make_embeddings(9)
    e = e._replace(**{name: getattr(e, name) * 10.0 for name in VECTORS})
    np.testing.assert_allclose(case.loss(e, **case.hyper_parameters)[0], reference(case, e), rtol=1e-5)


@every_case
def test_loss_of_a_single_row_with_mined_negatives_equals_loops(case, make_embeddings):
    e = make_embeddings(3, num_padding=7)
    value, _ = case.loss(e, temperature=0.1, **case.hyper_parameters)
    np.testing.assert_allclose(value, reference(case, e, temperature=0.1), rtol=1e-5)


@every_loss
def test_gradient_equals_finite_differences_of_loops(case, make_embeddings):
    e = make_embeddings(1)
    _, gradient, _ = value_and_gradient(case, e)
    for name in VECTORS:
        expected = np.zeros(gradient[name].shape)
        for position in np.ndindex(*expected.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = np.array(getattr(e, name), np.float64)
                moved[position] += step
                sides.append(reference(case, e._replace(**{name: moved}), temperature=0.1))
            expected[position] = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@every_loss
def test_row_order_does_not_matter(case, make_embeddings):
    e = make_embeddings(2)
    order = np.random.default_rng(0).permutation(len(e.query_id))
    value, gradient, _ = value_and_gradient(case, e)
    permuted, permuted_gradient, _ = value_and_gradient(case, by_numpy(lambda x: x[order], e))
    np.testing.assert_allclose(permuted, value, rtol=1e-5)
    for name in VECTORS:
        np.testing.assert_allclose(permuted_gradient[name], gradient[name][order], rtol=1e-5, atol=1e-5)


@by_name((*DISTINCT, "guided", "hardness", "orthogonal"))
def test_eight_devices_equal_one(case, make_embeddings):
    e = make_embeddings(3, num_ids=12)
    mesh = sharding.make_mesh(8)
    sharded = jax.device_put(e, sharding.by_rows(mesh))
    assert len(sharded.query.sharding.device_set) == 8
    value, gradient, metrics = value_and_gradient(case, e)
    with jax.set_mesh(mesh):
        value_8, gradient_8, metrics_8 = value_and_gradient(case, sharded)
    np.testing.assert_allclose(value_8, value, rtol=1e-5)
    for name in gradient:
        np.testing.assert_allclose(gradient_8[name], gradient[name], rtol=1e-5, atol=1e-5)
    for name in metrics:
        np.testing.assert_allclose(metrics_8[name], metrics[name], rtol=1e-5, atol=1e-6)


@every_loss
def test_bfloat16_inputs_score_in_float32(case, make_embeddings):
    """The only error that bfloat16 makes is that of its inputs, so the loops over the rounded inputs agree to 1e-5."""
    e = make_embeddings(4)
    rounded = by_numpy(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, e)
    value, gradient, metrics = value_and_gradient(case, rounded, temperature=0.01)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, reference(case, rounded, temperature=0.01), rtol=1e-5)
    assert all(np.isfinite(g.astype(jnp.float32)).all() for g in gradient.values())
    assert all(m.dtype == jnp.float32 for m in metrics.values())


@every_loss
@pytest.mark.parametrize("have_one_id", [True, False])
def test_identical_rows_are_finite(case, have_one_id, make_embeddings):
    """As duplicates, which are masked, and as texts of their own."""
    e = by_numpy(lambda x: np.broadcast_to(x[:1], x.shape), make_embeddings(0, num_padding=0))
    if not have_one_id:
        e = e._replace(query_id=jnp.arange(8, dtype=jnp.int32), doc_id=jnp.arange(8, dtype=jnp.int32))
    for result in jax.tree.leaves(value_and_gradient(case, e)):
        assert np.isfinite(result).all()


@every_loss
@pytest.mark.parametrize("num_padding", [7, 8])
def test_batch_with_nothing_to_contrast_costs_nothing(case, num_padding, make_embeddings):
    e = make_embeddings(0, num_padding=num_padding)
    e = e._replace(**{name: jnp.full_like(getattr(e, name), PADDING_ID) for name in ("neg_doc_ids", "neg_query_ids")})
    value, gradient, metrics = value_and_gradient(case, e)
    np.testing.assert_allclose(value, 0.0, atol=1e-7)
    assert all(np.isfinite(metric) for metric in metrics.values())
    for g in gradient.values():
        np.testing.assert_array_equal(g, 0.0)


@every_loss
def test_padding_rows_count_in_no_block(case, make_embeddings):
    """Whatever lies in a padding row, NaN included, changes neither the loss nor the gradient of the real rows."""
    e = make_embeddings(6)
    padding = np.asarray(e.query_id) == PADDING_ID

    def spoil(x):
        return np.where(padding.reshape(-1, *[1] * (x.ndim - 1)), np.float32("nan"), x) if x.dtype == np.float32 else x

    loss, spoilt = functools.partial(case.loss, **case.hyper_parameters, temperature=0.1), by_numpy(spoil, e)
    value, gradient, metrics = value_and_gradient(case, spoilt)
    _, expected_gradient, _ = value_and_gradient(case, e)
    expected, expected_metrics = jax.jit(loss)(by_numpy(lambda x: x[~padding], e))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in VECTORS:
        np.testing.assert_allclose(gradient[name], expected_gradient[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(gradient[name][padding], 0.0)
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6)
    unmasked = {"temperature": 0.1, "mask_duplicates": False}
    np.testing.assert_allclose(loss(spoilt, **unmasked)[0], reference(case, spoilt, **unmasked), rtol=1e-5)


@every_loss
def test_learned_temperature_gives_the_same_loss_and_a_gradient(case, make_embeddings):
    e = make_embeddings(7)
    value, gradient, metrics = value_and_gradient(case, e, temperature=0.05)
    np.testing.assert_allclose(value, case.loss(e, temperature=0.05, **case.hyper_parameters)[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["temperature"], 0.05, rtol=1e-6)
    upper, lower = (reference(case, e, temperature=1 / (20.0 + step)) for step in (1e-4, -1e-4))
    np.testing.assert_allclose(gradient["scale"], (upper - lower) / 2e-4, rtol=1e-5, atol=1e-6)


@every_loss
def test_metrics_are_float32_scalars_and_the_loss_is_none_of_their_keys(case, make_embeddings):
    value, _, metrics = value_and_gradient(case, make_embeddings(8))
    assert {"positive_score", "negative_score"} <= set(metrics)
    assert ("accuracy" in metrics) != (case.name in GRADED)
    assert "loss" not in metrics
    for metric in (value, *metrics.values()):
        assert metric.shape == ()
        assert metric.dtype == jnp.float32


@every_loss
@pytest.mark.parametrize(
    ("hyper_parameters", "scale", "sentence"),
    [
        ({"temperature": None}, None, "temperature=None asks for a learned temperature"),
        ({"temperature": 0.01}, 20.0, "temperature=0.01 is given, but the model learns its own"),
        ({"temperature": 0.0}, None, r"temperature is 0\.0; it must be more than 0"),
        ({"temperature": float("nan")}, None, "temperature is nan; it must be a finite number"),
    ],
)
def test_temperature_must_be_given_or_learned(case, hyper_parameters, scale, sentence, make_embeddings):
    e = make_embeddings(0)._replace(scale=None if scale is None else jnp.float32(scale))
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(functools.partial(case.loss, **case.hyper_parameters, **hyper_parameters), e)
