"""Two real processes of one run, and what they end with."""

import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np

from de_jax import command
from de_jax.training.run.run_folder import load_run


class TwoProcesses:
    """The train command, started twice on this machine."""

    def __init__(self, argv):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
        joined = [*argv, f"--coordinator_address=localhost:{port}", "--num_processes=2"]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "de_jax", "train", *joined, f"--process_id={number}"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]

    def wait_for(self, path):
        while not path.exists() and all(process.poll() is None for process in self.processes):
            time.sleep(0.02)

    def finish(self):
        """The exit codes, and what the first process printed in its last line."""
        outputs = [process.communicate() for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert set(codes) <= {0, command.EXIT_STOPPED}, outputs
        assert not any(line.startswith("{") for line in outputs[1][0].splitlines())
        return codes, json.loads(outputs[0][0].splitlines()[-1])


def parameters(run_dir):
    return jax.tree.map(np.asarray, load_run(run_dir).params)


def assert_close(run_dir, other_dir):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parameters(run_dir), parameters(other_dir))
