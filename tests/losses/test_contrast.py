"""The streaming form of every loss: the dense form's values, gradients and metrics in a fraction of its memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from de_jax.losses.combination import guided
from de_jax.losses.in_batch import in_batch_softmax, nce, samtone
from de_jax.losses.pair_loss import pair
from de_jax.types import PADDING_ID, Embeddings

CASES = {
    "softmax_q2d": functools.partial(in_batch_softmax, directions="query_to_doc", reduce_directions="mean"),
    "softmax_smooth": functools.partial(in_batch_softmax, label_smoothing=0.1, margin=0.3),
    "hardness": functools.partial(in_batch_softmax, hardness=5.0),
    "hardness_mined": functools.partial(in_batch_softmax, hardness=5.0, hardness_of="mined"),
    "samtone_both": functools.partial(samtone, same_tower="both", margin=0.2),
    "nce": functools.partial(nce),
    "pair_eq3": functools.partial(pair, form="samtone_eq3"),
    "pair_paper": functools.partial(pair, form="pair_paper", alpha=0.4),
    "pair_code": functools.partial(pair, form="pair_code", alpha=0.4),
    "guided": lambda e, **options: guided(e, loss=functools.partial(samtone, directions="query_to_doc", **options), margin=0.1),
}
every_case = pytest.mark.parametrize("case", CASES)
RARELY = ("softmax_q2d", "hardness", "pair_paper", "pair_code")
most_cases = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.soak) if name in RARELY else name for name in CASES]
)
some_cases = pytest.mark.parametrize(
    "case", ["samtone_both", *(pytest.param(name, marks=pytest.mark.soak) for name in ("softmax_smooth", "nce"))]
)
BLOCK_SIZES = (None, 3)  # dense, and one that divides 24 mined documents but neither 8 rows nor 16 mined queries
WITHOUT_MINED = {"num_neg_docs": 0, "num_neg_queries": 0}
VECTORS = ("query", "doc", "neg_docs", "neg_queries", "scale")


@functools.cache
def compiled(case, block_sizes=BLOCK_SIZES, mask_duplicates=True):
    """One program for all block sizes: value, metrics and gradient of each. Compiling it is most of the tests' time."""

    def run(vectors, e):
        def value_of(v, block_size):
            return CASES[case](e._replace(**v), temperature=None, mask_duplicates=mask_duplicates, block_size=block_size)

        return [jax.value_and_grad(functools.partial(value_of, block_size=size), has_aux=True)(vectors) for size in block_sizes]

    return jax.jit(run)


def run(case, e, *, scale=10.0, **options):
    e = e._replace(scale=jnp.float32(scale))
    return compiled(case, **options)({name: getattr(e, name) for name in VECTORS if getattr(e, name) is not None}, e)


def assert_equal(results, expected):
    (value, metrics), gradient = results
    (expected_value, expected_metrics), expected_gradient = expected
    np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, by_name in expected_gradient.items():
        largest = max(1.0, np.abs(by_name).max())
        np.testing.assert_allclose(gradient[name], by_name, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


def check_equality(case, make_embeddings, **options):
    for seed, scale, length in ((0, 1.0, 1.0), (1, 100.0, 1.0), (2, 100.0, 10.0)):
        e = make_embeddings(seed)
        e = e._replace(**{name: length * getattr(e, name) for name in VECTORS[:4]})
        dense, streamed = run(case, e, scale=scale, **options)
        assert_equal(streamed, dense)


@most_cases
def test_streaming_equals_dense(case, make_embeddings):
    check_equality(case, make_embeddings)


def test_streaming_equals_dense_where_duplicates_are_negatives(make_embeddings):
    check_equality("samtone_both", make_embeddings, mask_duplicates=False)


@pytest.mark.soak
def test_streaming_equals_dense_where_more_positives_are_known(make_embeddings):
    dense, streamed = run("softmax_smooth", make_embeddings(2, num_ids=9, num_positives=2))
    assert_equal(streamed, dense)


@some_cases
def test_streaming_equals_dense_without_mined_negatives(case, make_embeddings):
    """Blocks that divide the batch, and a block that is larger."""
    dense, *streamed = run(case, make_embeddings(3, **WITHOUT_MINED), block_sizes=(None, 4, 100))
    for results in streamed:
        assert_equal(results, dense)


@some_cases
@pytest.mark.parametrize("num_padding", [7, 8])
def test_batch_with_nothing_to_contrast_costs_nothing(case, num_padding, make_embeddings):
    e = make_embeddings(0, num_padding=num_padding, **WITHOUT_MINED)
    _, ((value, metrics), gradient), _ = run(case, e, block_sizes=(None, 4, 100))
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    assert all(np.isfinite(metric) for metric in metrics.values())
    for by_name in gradient.values():
        np.testing.assert_array_equal(by_name, 0.0)


@some_cases
def test_nothing_in_padding_rows_matters(case, make_embeddings):
    e = make_embeddings(6)
    padding = np.asarray(e.query_id) == PADDING_ID
    spoilt = e._replace(**{name: getattr(e, name).at[padding].set(jnp.nan) for name in VECTORS[:4]})
    for results, expected in zip(run(case, spoilt), run(case, e), strict=True):
        assert_equal(results, expected)
        for name in VECTORS[:4]:
            np.testing.assert_array_equal(results[1][name][padding], 0.0)


@some_cases
def test_identical_rows_are_finite(case, make_embeddings):
    e = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), make_embeddings(0, num_padding=0))
    own_ids = np.arange(8, dtype=np.int32)
    for results in run(case, e._replace(query_id=own_ids, doc_id=own_ids)):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def test_tied_hardest_negatives_give_their_gradient_to_one_of_them(make_embeddings):
    """Every document is the same text under another id: the dense form pushes all of them equally."""
    e = make_embeddings(0, num_padding=0, unique=True)
    e = e._replace(doc=jnp.broadcast_to(e.doc[:1], e.doc.shape))
    dense, streamed = run("nce", e)
    np.testing.assert_allclose(streamed[0][0], math.log(2), rtol=1e-5)
    for name, total in (("query", lambda x: x), ("doc", lambda x: x.sum(axis=0))):
        np.testing.assert_allclose(total(streamed[1][name]), total(dense[1][name]), atol=1e-5)


@some_cases
def test_bfloat16_embeddings_score_in_float32_and_get_bfloat16_gradients(case, make_embeddings):
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, make_embeddings(4))
    same_in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, rounded)
    exact = run(case, same_in_float32, scale=100.0)[0]
    ((value, metrics), gradient) = run(case, rounded, scale=100.0, block_sizes=(3,))[0]
    np.testing.assert_allclose(value, exact[0][0], rtol=1e-5)
    assert all(metric.dtype == jnp.float32 for metric in metrics.values())
    for name in VECTORS[:4]:
        assert gradient[name].dtype == jnp.bfloat16
        largest = np.abs(exact[1][name]).max()
        # Two parts, the negatives' and the positives', are rounded by up to 2**-9 each, and so is their sum.
        np.testing.assert_allclose(gradient[name].astype(jnp.float32), exact[1][name], rtol=0, atol=3 * 2**-9 * largest)


@pytest.fixture
def by_rows():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.mark.parametrize("case", ["samtone_both", "nce"])
def test_eight_devices_equal_one(case, by_rows, make_embeddings):
    e = make_embeddings(5, num_rows=32, num_ids=20)
    expected = run(case, e, block_sizes=(None,))[0]
    assert_equal(run(case, jax.device_put(e, by_rows), block_sizes=(24,))[0], expected)


def compiled_without_data(case, block_size, sharding, num_rows=4096, dim=64):
    """The program for a batch of 4096 rows; nothing is computed."""
    vectors = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32, sharding=sharding)
    ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32, sharding=sharding)

    def value_of(query, doc, query_id, doc_id):
        return CASES[case](Embeddings(query, doc, query_id, doc_id), block_size=block_size)

    gradient = jax.value_and_grad(value_of, argnums=(0, 1), has_aux=True)
    return jax.jit(gradient).lower(vectors, vectors, ids, ids).compile()


def largest_array(program) -> int:
    """The number of elements of the largest array that one device ever holds."""
    return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"\b[a-z]+\d*\[(\d[\d,]*)\]", program.as_text()))


@pytest.mark.parametrize("case", ["samtone_both", "nce", "pair_eq3"])
def test_no_array_of_all_scores_is_ever_made(case):
    program = compiled_without_data(case, 256, None)
    assert largest_array(program) == 4096 * 256
    assert program.memory_analysis().temp_size_in_bytes < 4 * 4096 * (3 * 256 + 8 * 64)


def test_the_dense_form_does_make_it():
    program = compiled_without_data("softmax_smooth", None, None)
    assert largest_array(program) >= 4096 * 4096
    assert program.memory_analysis().temp_size_in_bytes > 4 * 4096 * 4096


@pytest.mark.parametrize("case", ["samtone_both", "nce"])
def test_each_device_holds_its_own_rows_and_one_block(case, by_rows):
    """Not the block's scores for all rows, and not all candidates: neither set is ever gathered, its gradient neither."""
    program = compiled_without_data(case, 256, by_rows)
    assert largest_array(program) == 4096 // 8 * 256
    assert 4096 // 8 * 256 < 4096 * 64
    _, gradient = program.output_shardings
    assert all(sharding.spec == by_rows.spec for sharding in gradient)


@every_case
@pytest.mark.parametrize("block_size", [0, -1])
def test_block_size_must_be_positive(case, block_size, make_embeddings):
    with pytest.raises(ValueError, match=f"block_size is {block_size}; it must be at least 1"):
        jax.eval_shape(functools.partial(CASES[case], block_size=block_size), make_embeddings(0))
