"""A command on all machines of a Ray cluster: its shards as tasks, then the command itself, which joins them."""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from de_jax import command
from de_jax.files import addresses
from de_jax.settings import needs

RETRIES = 3  # of a task whose process or machine was lost
_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}  # how the chips of a TPU host are laid out


def run(verb: str, argv: Sequence[str], num_shards: int | None = None) -> list[dict[str, Any]]:
    """Runs a command with --shard=0/n to n-1/n, then without; each in a process of its own, on whatever machine is free.

    A task has one GPU, all TPU chips of a host, or all processors of a machine in a cluster without either. The shards of a machine
    that is lost run elsewhere, and continue. All machines see the same folders under the same paths, and have the same packages.
    Without `num_shards`, n is as many as can run at once.

    Returns:
        The JSON objects that the command without a shard prints.
    """
    with needs("ray", "--engine=ray"):
        import ray
    flags = _without_own(argv)
    place = os.getcwd(), {name: value for name, value in os.environ.items() if name.startswith("DE_JAX_")}
    with contextlib.redirect_stdout(sys.stderr):  # Ray repeats the output of its tasks
        ray.init()  # the cluster in RAY_ADDRESS, or the one of this machine
        try:
            options, at_once = _places([node["Resources"] for node in ray.nodes() if node["Alive"]])
            total = num_shards or at_once
            task = ray.remote(max_calls=1, max_retries=RETRIES, scheduling_strategy="SPREAD", **options)(_run)
            ray.get([task.remote(verb, [*flags, f"--shard={number}/{total}"], *place) for number in range(total)])
            found: list[dict[str, Any]] = ray.get(task.remote(verb, flags, *place))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            ray.shutdown()
    return found


def _without_own(argv: Sequence[str]) -> list[str]:
    """The flags that are not of this module."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--engine", "--num_shards"):
        own.add_argument(flag)
    return own.parse_known_args(argv)[1]


def _places(machines: Sequence[dict[str, float]]) -> tuple[dict[str, Any], int]:
    """The resources of a task, and how many tasks fit into a cluster of machines with these resources."""
    if chips := [int(machine["TPU"]) for machine in machines if machine.get("TPU")]:
        return {"resources": {"TPU": min(chips)}, "num_cpus": 0}, len(chips)
    if gpus := [int(machine["GPU"]) for machine in machines if machine.get("GPU")]:
        return {"num_gpus": 1, "num_cpus": 0}, sum(gpus)
    processors = [machine["CPU"] for machine in machines if machine.get("CPU")]
    return {"num_cpus": min(processors)}, len(processors)


def _run(verb: str, argv: list[str], folder: str, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The JSON objects that a command prints."""
    import ray

    os.chdir(folder)
    os.environ.update(settings)
    if chips := int(ray.get_runtime_context().get_assigned_resources().get("TPU", 0)):  # of one host, though the slice has more
        os.environ |= {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS.get(chips, f"{chips},1,1")}
    command.import_asked_for()
    command.keep_compiled()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module("de_jax.cli").call(verb, argv)
    addresses.upload()
    return [json.loads(line) for line in printed.getvalue().splitlines()]
