"""The pictures of light query towers: what speed costs, and how the towers came together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from de_jax.reports.plots import COLOURS, DOC_COLOUR, INK, NARROW, QUERY_COLOUR, WIDE, new_figure, place_by_pca
from de_jax.types import InputError

BothTowers = tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"]]
"""The same texts by the query tower and by the document tower."""
Curve = tuple[Sequence[float], Sequence[float]]
"""Updates, and the divergence at each."""


class Point(NamedTuple):
    """A system in the plane of quality and latency."""

    name: str
    milliseconds: float  # a query
    score: float
    group: str = ""  # systems of one group have one colour, and a line


def tradeoff(points: Sequence[Point], out_png: str | Path, *, title: str, measure: str, what: str) -> None:
    """Draws quality against the time that a query takes (Leonhardt et al., figure 6).

    Args:
        points: the systems.
        out_png: appears by rename.
        title: above the picture.
        measure: of the scores.
        what: setting of the measured time, such as "CPU, batch of 1".

    Raises:
        InputError: there is no system.
    """
    if not points:
        raise InputError("there is no system to draw; give at least one.")
    groups = list(dict.fromkeys(point.group for point in points))
    with new_figure(out_png, figsize=(NARROW, 4.6)) as figure:
        axis = figure.subplots()
        for index, group in enumerate(groups):
            own = sorted((point for point in points if point.group == group), key=lambda point: point.milliseconds)
            colour = COLOURS[index % len(COLOURS)]
            axis.plot([p.milliseconds for p in own], [p.score for p in own], "o-", color=colour, lw=1.4, ms=6, label=group or None)
            for point in own:
                axis.annotate(
                    point.name, (point.milliseconds, point.score), xytext=(7, -12), textcoords="offset points", fontsize=9
                )
        axis.set_title(title)
        axis.set_xlabel(f"milliseconds a query ({what})")
        axis.set_ylabel(measure)
        axis.set_xlim(left=0)
        axis.margins(x=0.15, y=0.2)
        if len(groups) > 1:
            axis.legend(loc="lower right")


def alignment_curves(panels: Mapping[str, Mapping[str, Curve]], out_png: str | Path, *, threshold: float | None) -> None:
    """Draws the divergence of the towers over the updates of the first stage, and its threshold (Leonhardt et al., figure 4).

    Args:
        panels: by the panel's title, curves by the run's name.
        out_png: appears by rename.
        threshold: below which the towers are aligned.
    """
    with new_figure(out_png, figsize=(WIDE if len(panels) > 1 else NARROW, 4.2)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            for index, (name, (steps, values)) in enumerate(curves.items()):
                axis.plot(steps, values, "o-", color=COLOURS[index % len(COLOURS)], lw=1.6, ms=4, label=name)
            if threshold is not None:
                axis.axhline(threshold, color=INK, lw=1, linestyle="--", label=f"threshold {threshold:.4g}")
            axis.set_title(title)
            axis.set_xlabel("update of the first stage")
            axis.legend(loc="best")
        axes[0].set_ylabel("KL divergence of the towers (nats)")


def towers(panels: Mapping[str, Mapping[str, BothTowers]], out_png: str | Path, *, title: str) -> None:
    """Draws the same texts by both towers, a row for each pair and a panel for each of its stages, by their largest variance.

    Leonhardt et al. (figures 1, 3 and 5) see a collapse as one small cloud, and towers that are not aligned as two.

    Args:
        panels: by pair and stage; every pair has the same stages.
        out_png: appears by rename.
        title: above all panels.

    Raises:
        InputError: there is no panel.
    """
    if not panels or not all(panels.values()):
        raise InputError("there is no pair of towers to draw; give at least one.")
    num_columns = max(map(len, panels.values()))
    side = min(3.4, WIDE / num_columns)
    with new_figure(out_png, figsize=(side * num_columns, (side + 0.1) * len(panels) + 0.5), title=title) as figure:
        axes = figure.subplots(len(panels), num_columns, squeeze=False)
        for row, (pair, stages) in zip(axes, panels.items(), strict=True):
            for axis, (stage, (by_query, by_doc)) in zip(row, stages.items(), strict=False):
                places, share = place_by_pca(np.concatenate([by_query, by_doc]))
                axis.scatter(*places[len(by_query) :].T, s=26, color=DOC_COLOUR, alpha=0.45, linewidths=0, label="document tower")
                axis.scatter(*places[: len(by_query)].T, s=9, color=QUERY_COLOUR, alpha=0.8, linewidths=0, label="query tower")
                axis.set_title(f"{pair}, {stage}\n{share:.0%} of the variance", fontsize=9)
                axis.set_aspect("equal", adjustable="datalim")
        axes[0][0].legend(loc="best")
