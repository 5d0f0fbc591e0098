"""Trainer and miner as the processes that they are, killed at random: the run is the one that its switches describe."""

import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy_run import ALL_DEVICES, arguments
from two_processes import TwoProcesses, assert_close

from de_jax import command
from de_jax.data.negatives import mined_negatives
from de_jax.training.run.run_folder import complete_steps, load_run

NEVER = 100_000
MINED = {
    **ALL_DEVICES,
    "Recipe__loss": "@ance",
    "HardNegatives__miner": "@Miner()",
    "Optimization__num_steps": NEVER,
    "Optimization__learning_rate": 0.005,
    "linear__end": 0.005,  # the same schedule whatever the number of steps
    "Logging__save_every_steps": 10,
    "Logging__evaluate_every_steps": NEVER,
    "HardNegatives__follow_every_steps": 5,
    "PairsOptions__negatives_dir": "{run_dir}/negatives",
    "PairsOptions__num_neg_docs": 2,
    "Miner__last_rank": 20,
    "ance__temperature": 0.05,
}
NUM_SWITCHES = 4

pytestmark = [pytest.mark.soak, pytest.mark.timeout(36000)]


def settings(dataset_dir, run_dir, **changes):
    found = arguments(dataset_dir, run_dir, recipe="recipes/sde.gin", **(MINED | changes))
    return [one for one in found if not one.startswith("--gin.samtone")]


def start(verb, argv):
    return subprocess.Popen(
        [sys.executable, "-m", "de_jax", verb, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def miner(argv):
    return start("mine", [*argv, "--poll_seconds=0.05"])


def num_switches(run_dir):
    path = run_dir / "switches.jsonl"
    return len(mined_negatives.read_switches(path)) if path.exists() else 0


def newest_step(run_dir):
    return max(complete_steps(run_dir / "checkpoints"), default=0)


def wait_until(condition, *processes):
    deadline = time.monotonic() + 600
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def repeat(dataset_dir, run_dir, again_dir, step, **changes):
    """Trains to `step` by the negatives and switches of another run, without any miner."""
    again_dir.mkdir()
    shutil.copytree(run_dir / "negatives", again_dir / "negatives")
    shutil.copy(run_dir / "switches.jsonl", again_dir)
    static = {
        "HardNegatives__miner": None,
        "HardNegatives__follow_every_steps": None,
        "Optimization__num_steps": step,
        "Logging__save_every_steps": NEVER,
    }
    given = settings(dataset_dir, again_dir, **static, **changes)
    again = start("train", [one for one in given if "Miner" not in one])  # with as many devices as the first had
    assert again.wait() == 0, again.communicate()


def test_trainer_and_miner_killed_at_random_give_the_run_that_its_switches_describe(dataset_dir, tmp_path, num_kills, rng):
    run_dir = tmp_path / "run"
    argv = settings(dataset_dir, run_dir)
    both = {"train": start("train", argv), "mine": miner(argv)}
    for number in range(num_kills):
        victim = ("mine", "train")[number % 2]
        before = num_switches(run_dir)
        wait_until(lambda before=before: num_switches(run_dir) > before, *both.values())
        time.sleep(rng.uniform(0, 2))
        both[victim].kill()
        both[victim].wait()
        both[victim] = miner(argv) if victim == "mine" else start(victim, argv)
    wait_until(lambda: num_switches(run_dir) > NUM_SWITCHES, *both.values())
    both["mine"].kill()  # the run goes on without its miner, until it is asked to stop
    both["mine"].wait()
    last = max(mined_negatives.read_switches(run_dir / "switches.jsonl")[-1].step, newest_step(run_dir))
    wait_until(lambda: newest_step(run_dir) > last, both["train"])
    both["train"].send_signal(signal.SIGTERM)
    output, errors = both["train"].communicate()
    assert both["train"].returncode == command.EXIT_STOPPED, errors
    step = json.loads(output.splitlines()[-1])["step"]
    assert mined_negatives.read_switches(run_dir / "switches.jsonl")[NUM_SWITCHES].step < step
    repeat(dataset_dir, run_dir, tmp_path / "again", step)
    jax.tree.map(np.testing.assert_array_equal, load_run(run_dir).params, load_run(tmp_path / "again").params)


def test_two_processes_that_train_switch_at_the_same_update_to_what_a_third_mines(dataset_dir, tmp_path):
    run_dir = tmp_path / "two"
    argv = settings(dataset_dir, run_dir, T5Config__dropout_rate=0.0)  # each process packs its own rows
    both, third = TwoProcesses(argv), miner(argv)
    wait_until(lambda: num_switches(run_dir) >= 3, third, *both.processes)
    both.processes[1].send_signal(signal.SIGTERM)
    codes, summary = both.finish()
    third.kill()
    third.wait()
    assert codes == [command.EXIT_STOPPED] * 2
    switches = mined_negatives.read_switches(run_dir / "switches.jsonl")
    assert len({switch.generation for switch in switches}) >= 3
    repeat(dataset_dir, run_dir, tmp_path / "one", summary["step"], T5Config__dropout_rate=0.0)
    assert_close(run_dir, tmp_path / "one")
