"""Two real processes that save to two folders at once, as a run does with its last checkpoint and its best."""

import os
import socket
import subprocess
import sys

import pytest

from de_jax.files import folders

ROUNDS = 12
PROGRAM = f"""
import random, sys, time
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
process, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, process)
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.types import TrainState
everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
last, best = Checkpoints(folder + "/checkpoints", keep=2), Checkpoints(folder + "/best", keep=1)
pauses = random.Random(process)
for step in range(1, {ROUNDS} + 1):
    array = jax.make_array_from_callback((600_000,), everywhere, lambda index: np.full(600_000, step, np.float32)[index])
    state = TrainState(step=array, params={{"w": array}}, opt_state=(array,), rng=array)
    last.save(step, state)
    best.save(step, state)
    time.sleep(0.3 * pauses.random())
last.close()
best.close()
"""


@pytest.mark.soak
def test_saving_to_two_folders_at_once_ends(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(number), address, str(tmp_path)], env=environment)
        for number in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    assert (tmp_path / "checkpoints" / str(ROUNDS)).is_dir()
    assert [path.name for path in (tmp_path / "best").iterdir()] == [str(ROUNDS)]
    for folder in tmp_path.glob("*/[0-9]*"):
        assert folders.read_checksums(folder)
        assert not list(folders.damages(folder))
