"""A step, the loop, checkpoints: a resumed run equals one that was never stopped. `test_sharding` has the meshes."""

import contextlib
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.losses.in_batch import samtone
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.hooks.dev_evaluation import EvaluateOnDev, ended_early
from de_jax.training.mesh import sharding
from de_jax.training.optim.optimizer import adafactor, linear, make_optimizer
from de_jax.training.run import run_log
from de_jax.training.run.checkpoint import Checkpoints, SaveCheckpoints
from de_jax.training.run.fit import Stop, fit
from de_jax.training.step.train_step import init_state, make_train_step
from de_jax.types import Batch, InputError, Packed, TrainState

NUM_STEPS = 6
ENCODER = T5Config(
    vocab_size=61, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dtype="float32", dropout_rate=0.1
)
MODEL = DualEncoder(TowerConfig(ENCODER, projection_dim=8), TowerConfig(ENCODER, projection_dim=8), ("projection",))
SCHEDULE = linear(peak=1e-2, num_steps=2 * NUM_STEPS)
LOSS = functools.partial(samtone, temperature=0.05)


def batches(start):
    step = start
    while True:
        rng = np.random.default_rng(step)
        draw = lambda *shape, rng=rng: rng.integers(1, 61, shape).astype(np.int32)  # noqa: E731
        yield Batch(draw(16, 6), draw(16, 10), np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int32))
        step += 1


@functools.cache
def step_fn():
    tx = functools.partial(make_optimizer, adafactor, SCHEDULE)
    abstract = jax.eval_shape(lambda: init_state(MODEL, tx, jax.random.key(0)))
    init = jax.jit(lambda: init_state(MODEL, tx, jax.random.key(0)))
    return init, jax.jit(make_train_step(MODEL, LOSS, tx(abstract.params)), donate_argnums=0)


def run(state, mesh, num_steps=NUM_STEPS, hooks=()):
    return fit(step_fn()[1], state, lambda start: sharding.placed(batches(start), mesh), num_steps=num_steps, hooks=hooks)


def first_state(mesh):
    return jax.device_put(step_fn()[0](), sharding.replicated(mesh))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_loss_falls_and_metrics_stay_on_the_device():
    losses = []

    def keep(step, state, metrics):
        assert isinstance(metrics["loss"], jax.Array)
        losses.append(metrics["loss"])

    mesh = sharding.make_mesh(1)
    one_batch = next(batches(0))
    repeat = lambda start: iter(lambda: sharding.place(one_batch, mesh), None)  # noqa: E731
    fit(step_fn()[1], first_state(mesh), repeat, num_steps=2 * NUM_STEPS, hooks=[keep])
    assert float(losses[-1]) < 0.7 * float(losses[0])


@pytest.mark.parametrize("num_batches", [0, 3])
def test_batches_that_end_before_the_run_are_an_error(num_batches):
    state = TrainState(step=np.int32(2), params={}, opt_state=(), rng=None)
    step = lambda state, batch: (state._replace(step=state.step + 1), {})  # noqa: E731
    endless = lambda start: itertools.count(start)  # noqa: E731
    assert fit(step, state, endless, num_steps=5)[0].step == 5
    assert fit(step, state, lambda start: itertools.islice(endless(start), 3), num_steps=5)[0].step == 5
    with pytest.raises(InputError, match=rf"the batches end after update {2 + num_batches}, but num_steps is 6; "):
        fit(step, state, lambda start: itertools.islice(endless(start), num_batches), num_steps=6)


@pytest.mark.soak
def test_run_stopped_at_any_step_and_resumed_ends_bit_equal(tmp_path, whole_run):
    """The checkpoint of every step of a run that is stopped before its last one continues to the same state."""
    mesh = sharding.make_mesh(2)
    first = Checkpoints(tmp_path / "checkpoints", keep=NUM_STEPS)
    stop = lambda step, state, metrics: Stop("for the test") if step == NUM_STEPS - 1 else None  # noqa: E731
    _, reason = run(first_state(mesh), mesh, hooks=[SaveCheckpoints(first, every_steps=1, num_steps=NUM_STEPS), stop])
    first.close()
    assert reason == Stop("for the test")
    second = Checkpoints(tmp_path / "checkpoints")
    assert second.steps() == [*range(1, NUM_STEPS)]
    for step in second.steps():
        resumed, _ = run(second.restore(step, first_state(mesh)), mesh)
        assert_equal(resumed, whole_run)
    second.close()


@pytest.fixture(scope="module")
def whole_run():
    mesh = sharding.make_mesh(2)
    state, reason = run(first_state(mesh), mesh)
    assert reason is None
    return state


def test_step_is_compiled_once():
    mesh = sharding.make_mesh(1)
    _, step = step_fn()
    before = step._cache_size()
    run(first_state(mesh), mesh)
    assert step._cache_size() - before <= 1


def test_fit_with_nothing_left_to_do_returns_the_state(whole_run):
    state, reason = run(whole_run, sharding.make_mesh(2))
    assert state is whole_run
    assert reason is None


def test_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = step_fn()[0]()
    checkpoints.save(1, state)
    checkpoints.wait()
    other = jax.tree.map(lambda x: x, state.params)
    other["shared"]["projection"]["kernel"] = jnp.zeros((16, 4))
    with pytest.raises(InputError, match=r"'shared/projection/kernel' has shape \(16, 8\) there and shape \(16, 4\) here"):
        checkpoints.restore_params(1, other)
    del other["shared"]
    with pytest.raises(InputError, match=r"'shared/projection/kernel' has shape \(16, 8\) there and no entry here"):
        checkpoints.restore_params(1, other)


def test_half_written_checkpoint_is_not_a_checkpoint_and_a_damaged_one_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = step_fn()[0]()
    for step in (1, 2):
        checkpoints.save(step, state)
    checkpoints.close()
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    for file in (tmp_path / "2" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest_step() == 2
    with pytest.raises(InputError, match=r"checkpoint .*2.* (damaged|cannot be read).*delete"):
        again.restore_params(2, state.params)
    assert_equal(again.restore_params(1, state.params), state.params)


def test_log_averages_its_period_and_a_resumed_log_drops_what_was_cut_off(tmp_path):
    seen, state = [], step_fn()[0]()
    log = run_log.LogMetrics(
        [lambda step, scalars: seen.append((step, scalars))], every_steps=2, num_steps=5, pairs_per_step=16, schedule=SCHEDULE
    )
    for step, loss in enumerate((4.0, 2.0, 8.0, 0.0, 1.0), start=1):
        log(step, state, {"loss": jnp.asarray(loss)})
    assert [(step, scalars["loss"]) for step, scalars in seen] == [(2, 3.0), (4, 4.0), (5, 1.0)]
    assert seen[0][1]["learning_rate"] == pytest.approx(float(SCHEDULE(1)))
    run_log.jsonl_sink(tmp_path, 0)(1, {"learning_rate": 1.4e-9, "loss": float(np.float32(12.345678))})
    assert run_log.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "learning_rate": 1.4e-9, "loss": 12.345678}]
    write = run_log.jsonl_sink(tmp_path, 0)
    for step in (10, 20, 30):
        write(step, {"loss": 1.0})
    with open(tmp_path / run_log.METRICS_FILE, "a") as file:
        file.write('{"step": 40, "lo')
    run_log.jsonl_sink(tmp_path, 20)(30, {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / run_log.METRICS_FILE).read_text().splitlines()]
    assert lines == [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 1.0}, {"step": 30, "loss": 2.0}]
    run_log.jsonl_sink(tmp_path, 0)(0, {"alignment": 1.0})  # of a run that was killed before its first checkpoint
    run_log.jsonl_sink(tmp_path, 0)(0, {"alignment": 1.0})
    assert run_log.read_metrics(tmp_path / run_log.METRICS_FILE) == [{"step": 0, "alignment": 1.0}]


def test_the_bar_shows_epochs_beside_steps(capsys):
    with run_log.progress_sink(20, 0, epoch_steps=8) as bar:
        bar(4, {"loss": 0.5})
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "epoch=0.50/2.50, loss=0.5" in shown


def test_a_new_shape_is_named_when_it_is_compiled_and_only_then(capsys):
    step = run_log.naming_shapes(lambda state, batch: (state, {}))
    packed = Packed(np.ones((3, 8), np.int32), np.ones((3, 4), np.int32), np.arange(5, dtype=np.int32))
    for rows in (5, 5, 6):
        ids = np.arange(rows, dtype=np.int32)
        step(None, Batch(query=packed, doc=np.ones((rows, 16), np.int32), query_id=ids, doc_id=ids))
    said = capsys.readouterr().err.splitlines()
    assert said[::2] == [f"compiling an update for batches of query 3 x 8, doc {rows} x 16" for rows in (5, 6)]
    assert [line[:12] for line in said[1::2]] == ["compiled in "] * 2


def test_a_log_that_is_damaged_in_its_middle_loses_the_damaged_line_alone(tmp_path):
    path = tmp_path / run_log.METRICS_FILE
    lines = [json.dumps({"step": step, "loss": 0.5}).encode() for step in range(1, 11)]
    lines[2], lines[4], lines[5], lines[6] = b'{"step": 3, "lo', b"\x00\xff", b'{"loss": 1}', b"[" * 9000
    lines[7] = b'{"step": 8, "loss": "x"}'
    path.write_bytes(b"\n".join(lines)[:-4])
    with pytest.warns(UserWarning, match="damaged") as warned:
        run_log.jsonl_sink(tmp_path, 8)(9, {"loss": 1.0})
    named = [f"{path}, line {number}: damaged, so it is left out; the other lines are kept." for number in (3, 5, 6, 7, 8)]
    assert [str(one.message) for one in warned] == named
    assert [line["step"] for line in run_log.read_metrics(path)] == [1, 2, 4, 9]


def test_best_checkpoint_is_the_one_with_the_highest_dev_score_also_after_a_restart(tmp_path):
    state = step_fn()[0]()
    scores = iter([0.2, 0.5, 0.4, 0.3, 0.6])

    def evaluate_at(step):
        best = Checkpoints(tmp_path, keep=1)
        hook = EvaluateOnDev(lambda params: {"ndcg@10": next(scores)}, every_steps=1, num_steps=5, best=best, start_step=step - 1)
        hook(step, state, {"loss": jnp.asarray(1.0)})
        hook._best.close()
        return Checkpoints(tmp_path).steps()

    assert [evaluate_at(step) for step in range(1, 6)] == [[1], [2], [2], [2], [5]]


def test_a_run_that_is_set_back_keeps_its_better_checkpoint_at_an_earlier_step(tmp_path):
    state, scores = step_fn()[0](), iter([0.5, 0.4, 0.9])
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as best:
        hook = EvaluateOnDev(lambda params: {"ndcg@10": next(scores)}, every_steps=1, num_steps=9, best=best)
        for step, kept in ((9, [9]), (3, [9]), (6, [6])):
            hook(step, state, {})
            best.wait()
            assert best.steps() == kept
        assert best.beside(6) == {"ndcg@10": 0.9}
        with pytest.raises(ValueError, match="has later steps than 5"):
            best.save(5, state)


@pytest.mark.parametrize(("metric", "sign"), [("ndcg@10", 1), ("loss", -1)])
def test_a_run_is_over_after_evaluations_in_a_row_that_are_no_better(tmp_path, metric, sign):
    state, scores = step_fn()[0](), [sign * score for score in (0.2, 0.5, 0.4, 0.6, 0.6, 0.1)]

    def hook(best, start_step=0):
        evaluate = lambda params: {metric: scores[at[0] - 1]}  # noqa: E731
        options = {"metric": metric, "patience": 2, "begun": saved.get(start_step), "start_step": start_step}
        return EvaluateOnDev(evaluate, every_steps=1, num_steps=9, best=best, **options)

    at, reasons, saved = [0], [], {}
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as best:
        evaluated = hook(best)
        for at[0] in range(1, 7):
            evaluated(at[0], state, {})
            reasons.append(evaluated.reason())
            saved[at[0]] = evaluated.progress()
        assert best.steps() == [4]
        assert reasons[:5] == [None] * 5
        assert reasons[5] == f"2 evaluations on dev in a row were no better than the best, {sign * 0.6:.4g}"
        # Killed when the best checkpoint was on the disk, and continued from an earlier checkpoint, a later one, or none.
        for start_step in (3, 0, 5):
            continued = hook(best, start_step)
            for at[0] in range(start_step + 1, 7):
                continued(at[0], state, {})
                assert continued.progress() == saved[at[0]]
            assert continued.reason() == reasons[5]
            assert best.steps() == [4]
        at[0], scores[2] = 3, float("nan")
        continued = hook(best, 2)
        continued(3, state, {})
        assert continued.progress() == {**saved[2], "num_worse": 1}
        assert ended_early({"best": None, "num_worse": 2}, 2) == "2 evaluations on dev in a row gave no number"


def test_mesh_and_batch_must_fit_the_devices():
    with pytest.raises(InputError, match="asks for 9 devices, but there are 8"):
        sharding.make_mesh(9)
    with pytest.raises(InputError, match=r"batch_size 12 is not divisible by the 8 devices .*take 8 or 16"):
        sharding.check_batch_size(12, sharding.make_mesh(8))


def test_placed_batches_keep_their_order_and_are_split_by_rows():
    mesh = sharding.make_mesh(4)
    wanted = [batch for batch, _ in zip(batches(0), range(5), strict=False)]
    got = list(sharding.placed(iter(wanted), mesh))
    assert len(got) == 5
    for a, b in zip(got, wanted, strict=True):
        assert_equal(a, b)
    assert {shard.data.shape for shard in got[0].query.addressable_shards} == {(4, 6)}
