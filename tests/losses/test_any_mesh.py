"""Losses under the axes that a caller's mesh may have, without our trainer: Auto, Explicit and Manual, the latter in shard_map."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from often import often

from de_jax import losses
from de_jax.types import InputError

VECTORS = ("query", "doc", "neg_docs", "neg_queries")
CASES = {
    "samtone": functools.partial(losses.samtone, same_tower="both", temperature=0.1),
    "samtone_in_blocks": functools.partial(losses.samtone, same_tower="both", temperature=0.1, block_size=8),
    "pair": functools.partial(losses.pair, temperature=0.1),
    "nce": functools.partial(losses.nce, temperature=0.1),
    "dance": functools.partial(losses.dance, temperature=0.1),
    "margin_mse": losses.margin_mse,
    "kl_guide": functools.partial(losses.kl_distillation, teacher="guide"),
    "angle": losses.angle,
    "global_orthogonal": losses.global_orthogonal,
    "guided": functools.partial(losses.guided, loss=losses.in_batch_softmax),
}
CASES["combined"] = functools.partial(losses.combined, losses=(CASES["samtone"], losses.global_orthogonal))
every_case = pytest.mark.parametrize("case", often(CASES, "samtone", "margin_mse", "guided", "combined"))
BY_ROWS = PartitionSpec("data")


@pytest.fixture
def e(make_embeddings):
    return make_embeddings(5, num_rows=32, num_ids=20)


@pytest.mark.parametrize("missing", ["query_id", "doc_id", "doc"])
def test_a_part_that_is_missing_or_has_other_rows_is_refused(missing, e):
    for part in (None, np.zeros((3, 8))):
        with pytest.raises(InputError, match=rf"{missing} has the shape .*, but query \(32, \d+\); give one for each row\."):
            losses.samtone(e._replace(**{missing: part}))


def value_and_gradient(case, e):
    return jax.value_and_grad(lambda vectors: CASES[case](e._replace(**vectors)), has_aux=True)(
        {name: getattr(e, name) for name in VECTORS}
    )


@functools.cache
def program_of_one_device(case):
    return jax.jit(functools.partial(value_and_gradient, case))


def mapped(function, e, in_specs=BY_ROWS, **options):
    """A function in shard_map, of a batch on the devices of its mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, **options))
    return program(jax.device_put(e, NamedSharding(mesh, in_specs)))


def assert_equal(case, found, e):
    (value, metrics), gradient = found
    (expected, expected_metrics), expected_gradient = program_of_one_device(case)(e)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in VECTORS:
        np.testing.assert_allclose(gradient[name], expected_gradient[name], rtol=1e-5, atol=1e-5, err_msg=name)


@every_case
@pytest.mark.parametrize("axis_type", often([AxisType.Auto, AxisType.Explicit], AxisType.Explicit))  # Auto: see test_losses
@pytest.mark.parametrize("is_set", often([True, False], True))
def test_a_mesh_of_the_callers_gives_the_loss_of_one_device(case, axis_type, is_set, e):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharded = jax.device_put(e, NamedSharding(mesh, BY_ROWS))
    program = jax.jit(functools.partial(value_and_gradient, case))
    if is_set:
        with jax.set_mesh(mesh):
            found = program(sharded)
    else:
        found = program(sharded)
    assert found[1]["query"].sharding.spec[0] == "data"
    assert_equal(case, found, e)


@every_case
def test_shard_map_gives_the_loss_of_all_rows(case, e):
    out = (PartitionSpec(), dict.fromkeys(VECTORS, BY_ROWS))
    assert_equal(case, mapped(functools.partial(value_and_gradient, case), e, out_specs=out), e)


def test_shard_map_of_whole_batches_leaves_them_as_they_are(e):
    whole = PartitionSpec()
    assert_equal("samtone", mapped(functools.partial(value_and_gradient, "samtone"), e, whole, out_specs=whole), e)


def test_shard_map_that_hides_the_split_is_refused(e):
    with pytest.raises(InputError, match="inside shard_map needs check_vma=True"):
        mapped(lambda e: losses.samtone(e)[0], e, out_specs=PartitionSpec(), check_vma=False)
