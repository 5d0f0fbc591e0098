"""What is said where training stops half-way: numbers that are none, no memory left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.training.hooks import faults
from de_jax.training.hooks.faults import NonFiniteError
from de_jax.training.mesh import sharding
from de_jax.training.run import run_log
from de_jax.types import Batch, Embeddings, TrainState

STATE = TrainState(0, {"scale": jnp.ones(())}, (), None)


def log(seen, every_steps=4, **options):
    options = {"num_steps": 100, "pairs_per_step": 2, "schedule": lambda step: jnp.asarray(0.5), **options}
    return run_log.LogMetrics([lambda step, scalars: seen.append((step, scalars["loss"]))], every_steps=every_steps, **options)


def metrics(loss, grad_norm=1.0):
    return {"loss": jnp.asarray(loss, jnp.float32), "grad_norm": jnp.asarray(grad_norm, jnp.float32)}


@pytest.mark.parametrize("bad_step", [1, 4, 5, 6, 8])
@pytest.mark.parametrize("bad", [metrics(np.nan), metrics(np.inf), metrics(1.0, np.nan)], ids=["nan", "inf", "gradient"])
def test_first_step_of_a_window_without_a_finite_number_is_found_and_its_line_not_written(bad_step, bad):
    seen = []
    hook = log(seen)
    with pytest.raises(NonFiniteError, match=f"the loss or the gradient of step {bad_step} is not") as caught:  # noqa: PT012
        for step in range(1, 20):
            hook(step, STATE, bad if step == bad_step else metrics(np.nan if step > bad_step else 1.0))
    assert caught.value.step == bad_step
    assert step == (5 if bad_step <= 4 else 9)  # one step after the window, when the next is queued already
    assert seen == [(4, 1.0)] * (bad_step > 4)


def test_save_in_the_middle_of_a_window_finds_it_too():
    hook = log([])
    for step, loss in enumerate((1.0, 1.0, 1.0, 1.0, 1.0, np.nan), start=1):
        hook(step, STATE, metrics(loss))
    with pytest.raises(NonFiniteError, match="step 6"):
        hook.unfinished()


def test_window_that_was_saved_unfinished_goes_on_as_if_nothing_had_been():
    losses = np.random.default_rng(0).normal(size=12).astype(np.float32)
    whole, cut = [], []
    hook = log(whole)
    for step, loss in enumerate(losses, start=1):
        hook(step, STATE, metrics(loss))
    hook.flush()
    hook = log(cut)
    for step, loss in enumerate(losses, start=1):
        hook(step, STATE, metrics(loss))
        hook = log(cut, begun=hook.unfinished())
    assert cut == whole
    assert [step for step, _ in whole] == [4, 8, 12]


def test_window_that_was_saved_with_other_metrics_is_begun_anew():
    seen = []
    hook = log(seen)
    hook(1, STATE, metrics(5.0))
    hook = log(seen, begun=hook.unfinished())
    for step, loss in ((2, 1.0), (3, 2.0), (4, 3.0)):
        hook(step, STATE, metrics(loss) | {"grad_norm/top": jnp.ones(())})
    hook.flush()
    assert seen == [(4, 2.0)]


def by_source(step):
    """Updates 2, 5, 8, ... have batches of b, and so other metrics."""
    return "b" if step % 3 == 1 else "a"


def metrics_of(step, loss):
    return metrics(loss) | ({"grad_norm/top": jnp.float32(loss)} if by_source(step - 1) == "b" else {})


def test_losses_are_logged_by_source_and_a_window_that_was_cut_off_goes_on():
    losses = np.random.default_rng(0).normal(size=8).astype(np.float32)
    lines = {"whole": [], "cut": []}
    for name, seen in lines.items():
        options = {"every_steps": 4, "num_steps": 100, "pairs_per_step": 2, "schedule": lambda step: jnp.asarray(0.5)}
        write = lambda step, scalars, seen=seen: seen.append((step, scalars))  # noqa: E731
        make = functools.partial(run_log.LogMetrics, [write], source_of=by_source, **options)
        hook = make()
        for step, loss in enumerate(losses, start=1):
            hook(step, STATE, metrics_of(step, loss))
            if name == "cut":
                hook = make(begun=hook.unfinished())
        hook.flush()
    first, second = (line for _, line in lines["whole"])
    assert first["loss"] == pytest.approx(losses[:4].mean())
    assert first["loss/a"] == pytest.approx(losses[[0, 2, 3]].mean())
    assert first["loss/b"] == first["grad_norm/top"] == pytest.approx(losses[1])
    assert second["loss/b"] == second["grad_norm/top"] == pytest.approx(losses[[4, 7]].mean())
    for line in lines["whole"] + lines["cut"]:
        line[1].pop("pairs_per_second")
    assert lines["cut"] == lines["whole"]


@pytest.mark.parametrize("bad_step", [1, 2, 3, 4, 6])
def test_first_step_without_a_finite_number_is_found_whichever_source_it_had(bad_step):
    hook = log([], source_of=by_source)
    with pytest.raises(NonFiniteError, match=f"step {bad_step} is not"):  # noqa: PT012
        for step in range(1, 20):
            hook(step, STATE, metrics_of(step, np.nan if step >= bad_step else 1.0))


class ByToken:
    """Embeds a text as its first token; token 13 as no number."""

    def init(self, rng):
        return {"scale": jnp.ones(())}

    def embed(self, params, batch, rng=None):
        rows = [jnp.where(t[:, :1] == 13, jnp.nan, t[:, :1] * params["scale"]) for t in (batch.query, batch.doc)]
        return Embeddings(*rows, batch.query_id, batch.doc_id)


SETTINGS = {"PairsOptions.batch_size": 512, "Devices.num_chunks": 1, "T5Config.remat": "none", "samtone.block_size": None}
EXPLANATION = faults.Explanation(
    is_finite=functools.partial(faults.has_finite_embeddings, ByToken()),
    given="embedding",
    lower="Optimization.learning_rate",
    memory=SETTINGS,
    devices=", over which make_mesh.fsdp also splits parameters and optimizer state",
    num_steps="Optimization.num_steps",
    name=lambda batch, row: f"row {row}",
)


def explained(first_doc_tokens, kept=6, ids=None):
    rows = np.arange(len(first_doc_tokens), dtype=np.int32)
    tokens = np.ones((len(rows), 3), np.int32)
    batch = Batch(tokens, np.asarray(first_doc_tokens, np.int32)[:, None] * tokens, rows, rows + 1)
    error, explanation = NonFiniteError("the loss of", 7), EXPLANATION._replace(name=functools.partial(faults.pair_name, ids, ids))
    return str(faults.non_finite(error, batch, explanation, sharding.make_mesh(1), lambda: STATE.params, kept))


def test_pairs_without_a_finite_embedding_are_named_by_their_ids():
    names = [f"text {row}" for row in range(9)]
    message = explained([5, 13, 5, 13], ids=names)
    assert "the loss of step 7 is not a finite number; these pairs of its batch give no finite embedding: " in message
    assert "(query 'text 1', document 'text 2'), (query 'text 3', document 'text 4'); checkpoint 6 is kept" in message
    assert "text 0" not in message
    assert message.endswith(": fix or remove these texts, or continue with a lower Optimization.learning_rate.")


def test_where_no_pair_stands_out_the_first_of_the_batch_are_named():
    message = explained([5] * 10, kept=None)
    assert "its batch holds: (query 0, document 1), (query 1, document 2)" in message
    assert "(query 7, document 8) and 2 more; no checkpoint is there yet" in message


def test_out_of_memory_names_what_to_change_with_current_values():
    raised = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.\nmore")
    assert faults.is_out_of_memory(raised)
    message = str(faults.out_of_memory(raised, EXPLANATION, sharding.make_mesh(4), 13 << 30))
    assert message == (
        "the device ran out of memory (Out of memory allocating 12884901888 bytes), a step takes 13 GiB of it by the compiler's "
        "count: lower PairsOptions.batch_size (now 512), raise Devices.num_chunks (now 1), set T5Config.remat (now none) to "
        '"dots" or "full", set samtone.block_size (now None) to 256 or so, or take more devices, over which make_mesh.fsdp also '
        "splits parameters and optimizer state (the mesh is data=4, fsdp=1, tensor=1)."
    )
    assert not faults.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: else"))
    assert not faults.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED: a disk"))
