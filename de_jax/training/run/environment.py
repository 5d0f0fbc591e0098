"""The versions and devices that a run is trained with: `environment.json` in its folder, and beside each checkpoint."""

from __future__ import annotations

import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from de_jax import __version__
from de_jax.files import outputs, reading
from de_jax.settings import Count, Record, list_of

FILE = "environment.json"
CHECKPOINT_KEY = "environment"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_RECORDS = list_of(Record({"from_step": Count}))


def now() -> dict[str, Any]:
    """What decides the bits of an update beside the settings: versions, devices and the number of processes."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "de_jax": __version__,
        "python": platform.python_version(),
        **versions,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "machine": platform.machine(),
    }


def of_run(run_dir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The environments of a run up to a step, each with the step `from_step` that it began at; none for runs of before 0.2.

    Raises:
        InputError: `environment.json` is damaged.
    """
    path = run_dir / FILE
    found: list[dict[str, Any]] = reading.read_json(path, _RECORDS) if path.is_file() else []
    return [one for one in found if step is None or one["from_step"] <= step]


def keep(run_dir: Path, start_step: int, before: dict[str, Any] | None) -> None:
    """Adds the environment of a start to `environment.json`; warns if it differs from that of the checkpoint continued from."""
    here = now()
    changed = [f"{name} {before.get(name)} is now {value}" for name, value in here.items() if before and before.get(name) != value]
    if changed:
        warnings.warn(f"{run_dir} continues elsewhere ({', '.join(changed)}), so its bits may differ from then on.", stacklevel=2)
    there = of_run(run_dir)
    records = [one for one in there if one["from_step"] < start_step]
    if not records or {**records[-1], **here} != records[-1]:
        records.append({"from_step": start_step, **here})
    if records != there:
        outputs.write_json(run_dir / FILE, records)


def sentence(records: list[dict[str, Any]]) -> str:
    """The environments in words: "de_jax 0.2.0, Python 3.11.7, jax 0.10.2 on 1 x cpu"."""
    told = (
        f"de_jax {one['de_jax']}, Python {one['python']}, jax {one['jax']} on {one['num_devices']} x {one['device']}"
        for one in records
    )
    return "; then ".join(dict.fromkeys(told))
