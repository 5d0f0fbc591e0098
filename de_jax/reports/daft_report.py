"""Cost and training of light query towers, from the folders of `de-jax daft`: numbers, pictures, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.reports import daft_plots, tables
from de_jax.reports.daft_plots import BothTowers, Point
from de_jax.training.hooks.alignment import KL
from de_jax.training.hooks.collapse import CollapseAlarm, diagnoses
from de_jax.training.run.run_log import METRICS_FILE, read_metrics

MEASURE = "ndcg@10"
MODEL = "model"
GROUPS = ("light query tower", "original model")


def name_of(num_layers: int) -> str:
    """A pair of towers, as folders and pictures call it."""
    return f"{num_layers}_layer" if num_layers == 1 else f"{num_layers}_layers"


def stages(folders: Sequence[Path]) -> dict[str, Any]:
    """The course of a pair's stages, from the logs of their runs: collapses in their last lines, and the divergence by update."""
    found: dict[str, Any] = {"collapsed": []}
    for folder in folders:
        spreads = [line for line in read_metrics(folder / METRICS_FILE) if "query_variance" in line]
        found["collapsed"] += [
            f"{folder.name}: {sentence}" for sentence in diagnoses(CollapseAlarm(), spreads[-1], spreads[0]).values()
        ]
    measured = [line for line in read_metrics(folders[0] / METRICS_FILE) if f"alignment/{KL}" in line]
    found["divergence"] = {str(line["step"]): line[f"alignment/{KL}"] for line in measured}
    found["threshold"] = measured[0].get("alignment/threshold") if measured else None
    return found


def draw(out_dir: Path, report: Mapping[str, Any], panels: Mapping[str, Mapping[str, BothTowers]]) -> None:
    """Draws tradeoff.png, alignment.png where it was measured, and towers.png.

    Args:
        out_dir: an existing folder.
        report: with "dataset", "device" and "systems": by name, their scores, latencies and `stages`.
        panels: the same texts by both towers of each pair, by stage.
    """
    systems = report["systems"]
    points = [
        Point(_words(name), system["latency"][0]["p50"], system["scores"][MEASURE], GROUPS[name == MODEL])
        for name, system in systems.items()
    ]
    what = f"{report['device']}, one at a time, without tokenizer"
    title = f"Light query towers on {report['dataset']}"
    daft_plots.tradeoff(points, out_dir / "tradeoff.png", title=title, measure="nDCG@10", what=what)
    measured = {name: system for name, system in systems.items() if system.get("divergence")}
    if measured:
        curves = {
            _words(name): ([float(step) for step in system["divergence"]], list(system["divergence"].values()))
            for name, system in measured.items()
        }
        threshold = next(iter(measured.values()))["threshold"]
        daft_plots.alignment_curves({"Alignment of the query towers": curves}, out_dir / "alignment.png", threshold=threshold)
    named = {_words(name): stages for name, stages in panels.items()}
    daft_plots.towers(named, out_dir / "towers.png", title="The same queries by both towers")


def table(report: Mapping[str, Any]) -> str:
    """A line for each system."""
    rows = []
    for name, system in report["systems"].items():
        one = system["latency"][0]
        collapsed = "; ".join(system.get("collapsed", [])) or "no"
        rows.append([name, f"{system['scores'][MEASURE]:.4f}", f"{one['p50']:.2f}", f"{one['ratio']:.1f}", collapsed])
    return tables.text_table(["system", "nDCG@10", "ms a query", "times as fast", "collapsed"], rows)


def _words(name: str) -> str:
    return name.replace("_", " ")
