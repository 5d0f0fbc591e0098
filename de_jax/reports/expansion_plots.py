"""Scores by the number of generated queries behind a document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.reports.plots import COLOURS, INK, NARROW, WIDE, new_figure
from de_jax.types import InputError

MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<")


class Line(NamedTuple):
    """A system's scores with its documents in one form, by the number of queries; 0 is the document as it is."""

    system: str
    form: str
    scores: Mapping[int, float]
    spread: Mapping[int, float]  # of its seeds


def by_number(
    panels: Mapping[str, Mapping[str, Line]], out_png: str | Path, *, title: str, measure: str, to_beat: tuple[str, float]
) -> None:
    """Draws lines by the number of queries, seeds as a band; a label has the same colour and marker in every panel.

    Args:
        panels: by the panel's title, lines by their label.
        out_png: appears by rename.
        title: above all panels.
        measure: of the scores.
        to_beat: a score that every panel has as a dashed line across, and its name.

    Raises:
        InputError: there is no line.
    """
    if not panels or not all(panels.values()):
        raise InputError("there is nothing to draw; give at least one run.")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    with new_figure(out_png, figsize=(WIDE if len(panels) > 1 else NARROW, 5.4), title=title) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
            for label, line in lines.items():
                index = labels.index(label)
                _draw(axis, line, label, COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)])
            name, score = to_beat
            axis.axhline(score, color=INK, lw=1, linestyle="--", label=name)
            axis.set_xticks(sorted({number for line in lines.values() for number in line.scores}))
            axis.set_title(panel)
            axis.set_xlabel("generated queries of a document (0: none)")
        axes[0].set_ylabel(measure)
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _draw(axis: Any, line: Line, label: str, colour: str, marker: str) -> None:
    numbers = sorted(line.scores)
    values = [line.scores[number] for number in numbers]
    axis.plot(numbers, values, color=colour, marker=marker, ms=4, lw=1.6, label=label)
    widths = [line.spread.get(number, 0.0) for number in numbers]
    if any(widths):
        low, high = ([v + sign * w for v, w in zip(values, widths, strict=True)] for sign in (-1, 1))
        axis.fill_between(numbers, low, high, color=colour, alpha=0.1, linewidth=0)
