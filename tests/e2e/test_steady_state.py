"""After its first steps a run compiles nothing and waits for the device only where it logs, saves or evaluates."""

import collections
import json
import os
import subprocess
import sys
import threading

import jax
import pytest
from jax._src.array import ArrayImpl  # what waits for a device has no public name
from toy_run import ALL_DEVICES, NO_DROPOUT, arguments

from de_jax import cli
from de_jax.training.run import loop, run_log
from de_jax.training.run.fit import fit

COMPILATION = "/jax/core/compile/backend_compile_duration"
WAITS = ("__array__", "__float__", "__int__", "__bool__", "__index__", "item", "tolist", "block_until_ready")


class Steps:
    """Counts what happens between the updates of `fit`, by the number of updates done.

    Waits are those of the thread that trains: a checkpoint is copied and written by others, whenever they come to it.
    """

    def __init__(self, monkeypatch):
        self.thread = threading.get_ident()
        self.step, self.compilations, self.waits = -1, collections.Counter(), collections.Counter()
        self.first_of_shape = {}

        def seen(batches):
            for batch in batches:
                self.first_of_shape.setdefault(str(jax.tree.map(lambda rows: rows.shape, batch)), self.step)
                yield batch

        def counting_fit(step_fn, state, batches, *, num_steps, hooks):
            self.step = 0
            return fit(step_fn, state, lambda start: seen(batches(start)), num_steps=num_steps, hooks=[*hooks, self._next])

        monkeypatch.setattr(loop, "fit", counting_fit)
        for name in WAITS:
            monkeypatch.setattr(ArrayImpl, name, self._counted(name, getattr(ArrayImpl, name)))
        value = ArrayImpl._value.fget
        monkeypatch.setattr(ArrayImpl, "_value", property(self._counted("_value", value)))
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _next(self, step, state, metrics):
        self.step = step

    def _listen(self, event, seconds, **about):
        if event == COMPILATION:
            self.compilations[self.step] += 1

    def _counted(self, name, method):
        def counted(*args, **options):
            self.waits[self.step] += threading.get_ident() == self.thread
            return method(*args, **options)

        return counted


@pytest.fixture
def steps(monkeypatch):
    steps = Steps(monkeypatch)
    yield steps
    steps.close()


@pytest.mark.soak
def test_nothing_is_compiled_and_nothing_waited_for_between_logs(steps, dataset_dir, tmp_path):
    """Logged every 5 updates, each line one update late; evaluated every 10, saved every 20, and all with the last update."""
    periods = {"Logging__log_every_steps": 5, "Logging__evaluate_every_steps": 10, "Logging__save_every_steps": 20}
    jax.clear_caches()  # other tests may have compiled the same towers in this process
    cli.call(
        "train",
        arguments(
            dataset_dir,
            tmp_path / "run",
            Optimization__num_steps=40,
            Logging__grad_norm_groups="thirds",
            **ALL_DEVICES,
            **NO_DROPOUT,
            **periods,
        ),
    )
    # By the updates done before: what happens in update 10 and in the hooks after it is counted under 9.
    start, second_update, first_line, first_evaluation = (-1, 0), 1, 4, 9
    new_shapes = set(steps.first_of_shape.values())
    assert len(new_shapes) <= 3
    assert set(steps.compilations) - new_shapes <= {*start, second_update, first_line, first_evaluation}
    assert all(steps.compilations[step] == 1 for step in new_shapes if step > first_evaluation)
    assert {0, first_evaluation} <= set(steps.compilations)
    assert {step for step, waits in steps.waits.items() if step > 0 and waits} == {5, 9, 15, 19, 25, 29, 35, 39, 40}
    lines = [line for line in run_log.read_metrics(tmp_path / "run" / run_log.METRICS_FILE) if "loss" in line]
    assert all(0 < line["grad_norm/middle"] < line["grad_norm"] for line in lines)


COUNT = """
import json, jax, jax.numpy as jnp
from de_jax import command
found = {"hits": 0, "misses": 0}
def listen(event, **about):
    for name in found:
        found[name] += event == f"/jax/compilation_cache/cache_{name}"
jax.monitoring.register_event_listener(listen)
"""
SMALL_COMMAND = "command.run(lambda: [jnp.arange(n) for n in range(3, 6)])"


@pytest.fixture
def compiled_by(tmp_path):
    """Runs a program in a process with a compile cache of the test's own; how many programs it found there and how many not."""

    def run(program, *argv, **environment):
        own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        done = subprocess.run(
            [sys.executable, "-c", f"{COUNT}{program}\nprint(json.dumps(found))", *argv],
            env={**own, "JAX_PLATFORMS": "cpu", "DE_JAX_CACHE": str(tmp_path / "cache"), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.soak
def test_commands_keep_compiled_programs_unless_told_not_to_and_replace_damaged_ones(compiled_by, tmp_path):
    first, second = compiled_by(SMALL_COMMAND), compiled_by(SMALL_COMMAND)
    assert first["misses"] >= 3
    assert second == {"hits": first["hits"] + first["misses"], "misses": 0}
    assert compiled_by(SMALL_COMMAND, JAX_ENABLE_COMPILATION_CACHE="0") == {"hits": 0, "misses": 0}
    for entry in (tmp_path / "cache" / "xla").rglob("*-cache"):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert compiled_by(SMALL_COMMAND) == {"hits": 0, "misses": second["hits"]}


@pytest.mark.soak
def test_second_process_of_a_run_compiles_nothing(dataset_dir, tmp_path, compiled_by):
    program = "import sys; from de_jax import cli; sys.argv.insert(1, 'train'); cli.main()"
    first, second = (
        compiled_by(program, *arguments(dataset_dir, tmp_path / name, Optimization__num_steps=10, **NO_DROPOUT)) for name in "ab"
    )
    assert first["misses"] > 10
    assert second == {"hits": first["hits"] + first["misses"], "misses": 0}
