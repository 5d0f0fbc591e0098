"""Cost and training of light query towers, from the folders of `python -m reproduction train daft`: numbers, pictures, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax.reports import tables
from de_jax.reports.plots import DOC_COLOUR, INK, NARROW, QUERY_COLOUR, WIDE, colour_of, new_figure, one_panel, place_by_pca
from de_jax.retrieval import encode
from de_jax.retrieval.searcher import LENGTH_MULTIPLE, padded_tokens
from de_jax.training.hooks.alignment import KL
from de_jax.training.hooks.collapse import CollapseAlarm, diagnoses
from de_jax.training.run.run_folder import Run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.types import InputError

MEASURE = "ndcg@10"
MODEL = "model"
BothTowers = tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"]]
"""The same texts by the query tower and by the document tower."""
Curve = tuple[Sequence[float], Sequence[float]]
"""Updates, and the divergence at each."""


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


def by_both_towers(run: Run, texts: Sequence[str]) -> BothTowers:
    """Some texts by the query tower and by the document tower, cut to the length of queries."""

    def by(tower: str) -> np.ndarray:
        tokenizer, max_length = run.side(tower).tokenizer, run.query.max_length
        tokens, lengths = padded_tokens(tokenizer, texts, max_length=max_length, length_multiple=LENGTH_MULTIPLE)
        return np.asarray(encode.encode_fn(run, tower)(tokens, lengths))[:, 0]

    return by("query"), by("doc")


def draw(out_dir: Path, report: Mapping[str, Any], panels: Mapping[str, Mapping[str, BothTowers]]) -> None:
    """Draws tradeoff.png, alignment.png where it was measured, and towers.png.

    Args:
        out_dir: an existing folder.
        report: with "dataset", "device" and "systems": by name, their scores, latencies and `stages`.
        panels: the same texts by both towers of each pair, by stage.
    """
    systems = {name.replace("_", " "): system for name, system in report["systems"].items()}
    _tradeoff(systems, report, out_dir / "tradeoff.png")
    if measured := {name: system for name, system in systems.items() if system.get("divergence")}:
        curves = {
            name: ([float(step) for step in system["divergence"]], list(system["divergence"].values()))
            for name, system in measured.items()
        }
        threshold = next(iter(measured.values()))["threshold"]
        alignment_curves({"Alignment of the query towers": curves}, out_dir / "alignment.png", threshold=threshold)
    named = {name.replace("_", " "): of_stages for name, of_stages in panels.items()}
    towers(named, out_dir / "towers.png", title="The same queries by both towers")


def table(report: Mapping[str, Any]) -> str:
    """A line for each system."""
    rows = []
    for name, system in report["systems"].items():
        one = system["latency"][0]
        collapsed = "; ".join(system.get("collapsed", [])) or "no"
        rows.append([name, f"{system['scores'][MEASURE]:.4f}", f"{one['p50']:.2f}", f"{one['ratio']:.1f}", collapsed])
    return tables.text_table(["system", "nDCG@10", "ms a query", "times as fast", "collapsed"], rows)


def _tradeoff(systems: Mapping[str, Any], report: Mapping[str, Any], out_png: Path) -> None:
    """Quality against the time that a query takes (Leonhardt et al., figure 6); the light towers are on a line."""
    points = {name: (system["latency"][0]["p50"], system["scores"][MEASURE]) for name, system in systems.items()}
    groups = {"original model": [MODEL], "light query tower": [name for name in points if name != MODEL]}
    xlabel = f"milliseconds a query ({report['device']}, one at a time, without tokenizer)"
    labels: dict[str, Any] = {"xlabel": xlabel, "ylabel": "nDCG@10", "legend": "lower right", "height": 4.6}
    with one_panel(out_png, f"Light query towers on {report['dataset']}", **labels) as axis:
        for index, (group, names) in enumerate(groups.items()):
            own = sorted(names, key=lambda name: points[name][0])
            axis.plot(*zip(*(points[name] for name in own), strict=True), "o-", color=colour_of(index), lw=1.4, ms=6, label=group)
            for name in own:
                axis.annotate(name, points[name], xytext=(7, -12), textcoords="offset points", fontsize=9)
        axis.set_xlim(left=0)
        axis.margins(x=0.15, y=0.2)


def alignment_curves(panels: Mapping[str, Mapping[str, Curve]], out_png: str | Path, *, threshold: float | None) -> None:
    """Draws the divergence of the towers over the updates of the first stage, and its threshold (Leonhardt et al., figure 4).

    `panels` holds curves by the panel's title and the run's name; below `threshold` the towers are aligned.
    """
    with new_figure(out_png, figsize=(WIDE if len(panels) > 1 else NARROW, 4.2)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            for index, (name, (steps, values)) in enumerate(curves.items()):
                axis.plot(steps, values, "o-", color=colour_of(index), lw=1.6, ms=4, label=name)
            if threshold is not None:
                axis.axhline(threshold, color=INK, lw=1, linestyle="--", label=f"threshold {threshold:.4g}")
            axis.set_title(title)
            axis.set_xlabel("update of the first stage")
            axis.legend(loc="best")
        axes[0].set_ylabel("KL divergence of the towers (nats)")


def towers(panels: Mapping[str, Mapping[str, BothTowers]], out_png: str | Path, *, title: str) -> None:
    """Draws the same texts by both towers, a row for each pair and a panel for each of its stages, by their largest variance.

    Leonhardt et al. (figures 1, 3 and 5) see a collapse as one small cloud, and towers that are not aligned as two.

    `panels` are by pair and stage, and every pair has the same stages; none is an InputError.
    """
    if not panels or not all(panels.values()):
        raise InputError("there is no pair of towers to draw; give at least one.")
    num_columns = max(map(len, panels.values()))
    side = min(3.4, WIDE / num_columns)
    with new_figure(out_png, figsize=(side * num_columns, (side + 0.1) * len(panels) + 0.5), title=title) as figure:
        axes = figure.subplots(len(panels), num_columns, squeeze=False)
        for row, (pair, of_stages) in zip(axes, panels.items(), strict=True):
            for axis, (stage, (by_query, by_doc)) in zip(row, of_stages.items(), strict=False):
                places, share = place_by_pca(np.concatenate([by_query, by_doc]))
                axis.scatter(*places[len(by_query) :].T, s=26, color=DOC_COLOUR, alpha=0.45, linewidths=0, label="document tower")
                axis.scatter(*places[: len(by_query)].T, s=9, color=QUERY_COLOUR, alpha=0.8, linewidths=0, label="query tower")
                axis.set_title(f"{pair}, {stage}\n{share:.0%} of the variance", fontsize=9)
                axis.set_aspect("equal", adjustable="datalim")
        axes[0][0].legend(loc="best")
