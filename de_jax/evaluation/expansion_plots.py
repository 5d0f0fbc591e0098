"""Scores by the number of generated queries behind a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from de_jax.evaluation.plots import COLOURS, new_figure
from de_jax.types import InputError

STYLES = ("-", "--", ":", "-.")


class Line(NamedTuple):
    """A system's scores with its documents in one form, by the number of queries; 0 is the document as it is."""

    system: str
    form: str
    scores: Mapping[int, float]
    spread: Mapping[int, float]  # of its seeds


def by_number(lines: Sequence[Line], out_png: str | Path, *, title: str, measure: str) -> None:
    """Draws a line for each system and form: a colour for each system, a stroke for each form, seeds as a band.

    Args:
        lines: what is drawn.
        out_png: appears by rename.
        title: above the picture.
        measure: of the scores.

    Raises:
        InputError: there is no line.
    """
    if not lines:
        raise InputError("there is nothing to draw; give at least one run.")
    systems, forms = (list(dict.fromkeys(values)) for values in zip(*((line.system, line.form) for line in lines), strict=True))
    with new_figure(out_png, figsize=(7.6, 4.8)) as figure:
        axis = figure.subplots()
        for line in lines:
            numbers = sorted(line.scores)
            values = [line.scores[number] for number in numbers]
            colour = COLOURS[systems.index(line.system) % len(COLOURS)]
            stroke = STYLES[forms.index(line.form) % len(STYLES)]
            axis.plot(numbers, values, stroke, color=colour, marker="o", ms=3.5, lw=1.6, label=f"{line.system}, {line.form}")
            widths = [line.spread.get(number, 0.0) for number in numbers]
            if any(widths):
                low, high = ([v + sign * w for v, w in zip(values, widths, strict=True)] for sign in (-1, 1))
                axis.fill_between(numbers, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xticks(sorted({number for line in lines for number in line.scores}))
        axis.set_title(title)
        axis.set_xlabel("generated queries of a document; 0: the document as it is")
        axis.set_ylabel(measure)
        axis.legend(loc="best", fontsize=8, ncols=2)
