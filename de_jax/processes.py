"""Commands of several processes: their flags, and how they meet before JAX starts."""

from __future__ import annotations

import argparse

from de_jax import command
from de_jax.settings import NonNegativeInt, numeric
from de_jax.training.mesh import distributed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for `join`."""
    processes = parser.add_argument_group("several processes", "the same command on every host, with its own --process_id")
    processes.add_argument("--distributed", action="store_true", help="join the processes started by a TPU pod, SLURM or MPI")
    processes.add_argument("--coordinator_address", help="host:port of process 0, outside a known cluster")
    processes.add_argument("--num_processes", type=int)
    processes.add_argument("--process_id", type=numeric(NonNegativeInt), help="0 to num_processes - 1; process 0 writes the logs")
    processes.add_argument(
        "--lost_after_seconds",
        type=int,
        default=60,
        help="end the run if a process is silent for this long",
    )


def join(args: argparse.Namespace) -> bool:
    """Joins the other processes, where the flags of `add_flags` ask for it; says whether they did. Before JAX starts.

    Raises:
        InputError: see `distributed.is_asked_for` and `distributed.join`.
    """
    process = {name: getattr(args, name) for name in ("coordinator_address", "num_processes", "process_id")}
    if not distributed.is_asked_for(automatic=args.distributed, **process):
        return False
    command.go_on_in_child()
    distributed.join(**process, lost_after_seconds=args.lost_after_seconds)
    return True
