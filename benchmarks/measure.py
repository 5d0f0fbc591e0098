"""What every benchmark needs: runs in turns, useful FLOPs, the machine's peak, and a description of where it ran."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from de_jax.configurables import read_recipe
from de_jax.interop import any_model
from de_jax.models.dual_encoder import DualEncoder
from de_jax.recipe import Recipe
from de_jax.types import Params

MODEL_HELP = "a model file: tiny, small, ..., or t5_1_0_small (default small); or a folder with a model"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "sentence-transformers")

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts this process's processor seconds: on a shared machine, the time of one thread on a free core."""


def read_model(model: str, recipe: str, bindings: list[str]) -> Recipe:
    """The recipe with the model file `models/<model>.gin` ("small" is short for "t5_1_1_small") over its own.

    A model in a folder has its own sizes, and its recipe is always `recipes/fine_tune.gin`.
    """
    if is_folder(model):
        return read_recipe(["recipes/fine_tune.gin"], [f"MODEL='{model}'", *bindings])
    name = model if model.startswith("t5_") else f"t5_1_1_{model}"
    return read_recipe([recipe, f"models/{name}.gin"], bindings)


def is_folder(model: str) -> bool:
    """Whether `--model` is a folder with a model, and not the name of a model file."""
    return Path(model).is_dir()


def encoder_settings(model: str) -> str:
    """The configurable that takes the settings of the model's encoder."""
    return "pretrained_tower" if is_folder(model) else "T5Config"


def params_of(recipe: Recipe, seed: int = 0) -> Params:
    """The parameters of the recipe's model, from its folder or random."""
    source = recipe.initialization.init_from
    if source is None:
        return jax.jit(recipe.model.init)(jax.random.key(seed))
    return jax.tree.map(jnp.asarray, any_model.read(str(source)).params)


def in_turns(runs: Mapping[str, Callable[[], Any]], repeats: int, clock: str = "wall") -> dict[str, list[float]]:
    """Seconds of each run in each repeat, taken in the order A B A B ..., after two unmeasured rounds.

    The first compiles; in the second the memory that the sides free and take from each other settles.

    Args:
        runs: by name; each returns when its result is on the host or the device is done.
        repeats: measured calls of each.
        clock: one of `CLOCKS`.
    """
    now = CLOCKS[clock]
    for name, run in [*runs.items()] * 2:
        start = now()
        run()
        log(f"{name}: unmeasured call {now() - start:.2f} s")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            start = now()
            run()
            seconds[name].append(now() - start)
        log(f"repeat {repeat + 1}/{repeats}: " + ", ".join(f"{name} {values[-1]:.3f} s" for name, values in seconds.items()))
    return seconds


def speedup(seconds: Mapping[str, list[float]], ours: str, peer: str) -> dict[str, float]:
    """How much less time `ours` takes than `peer`: the median and the range of the ratios within one repeat."""
    ratios = [b / a for a, b in zip(seconds[ours], seconds[peer], strict=True)]
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def peak_tflops(dtype: str, clock: str = "wall", sizes: Sequence[int] = (512, 1024, 2048, 4096), repeats: int = 5) -> float:
    """The best rate of square matrix products on this device, in TFLOP/s: operands in `dtype`, the result in float32."""
    now = CLOCKS[clock]
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    best = 0.0
    for size in sizes:
        a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.dtype(dtype)) for seed in (0, 1))
        product(a, b).block_until_ready()
        for _ in range(repeats):
            start = now()
            product(a, b).block_until_ready()
            best = max(best, 2 * size**3 / (now() - start) / 1e12)
    return best


def why_no_torch() -> str | None:
    """Why there is no torch peer; None where there is one."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else None


def environment() -> dict[str, Any]:
    """Machine, processors, packages and commit."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": installed,
        "commit": commit(),
    }


def describe_model(model: DualEncoder) -> dict[str, Any]:
    """The sizes that decide the speed."""
    encoder = model.doc.encoder
    names = ("vocab_size", "model_dim", "num_layers", "num_heads", "head_dim", "mlp_dim", "activation", "dtype", "dropout_rate")
    sizes = {name: getattr(encoder, name) for name in names if hasattr(encoder, name)}
    return {"encoder": type(encoder).__name__, **sizes, "projection_dim": model.doc.projection_dim}


def log(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def commit() -> str | None:
    """Of the clone that the benchmarks are in, if they are in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
