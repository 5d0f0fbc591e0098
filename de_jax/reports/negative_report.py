"""An analysis of negatives as files: pictures, analysis.json and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from de_jax.evaluation.negative_analysis import WHOLE, AtCheckpoint
from de_jax.files.outputs import write_json
from de_jax.reports import tables
from de_jax.reports.plots import INK, NARROW, WIDE, Picture, colour_of, histogram, new_figure, short

COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "loss, nats": lambda numbers: numbers["loss"],
    "gradient norm of a pair": lambda numbers: numbers["grad_norm"]["per_pair"][WHOLE],
    "median": lambda numbers: numbers["grad_norm"]["median"][WHOLE],
    "of the mean gradient": lambda numbers: numbers["grad_norm"]["of_mean"][WHOLE],
    "mean margin": lambda numbers: numbers["margin"]["mean"],
    "above the positive": lambda numbers: f"{numbers['share_above_positive']:.1%}",
    "in the top": lambda numbers: f"{numbers['overlap']:.1%}",
    "mean rank": lambda numbers: numbers["mean_rank"],
}


def write(
    out_dir: Path,
    title: str,
    about: Mapping[str, Any],
    checkpoints: Sequence[AtCheckpoint],
    *,
    depth: int,
) -> dict[str, Any]:
    """Writes everything into an existing folder; returns the content of analysis.json.

    Args:
        out_dir, title, about: the folder, the page's title, and facts about the analysis, by name.
        checkpoints: at least one, all with the same kinds.
        depth: as of `negative_analysis.analyse`.
    """
    found = [{"step": step, **{kind: measured.numbers for kind, measured in kinds.items()}} for step, kinds in checkpoints]
    report = {**about, "depth": depth, "checkpoints": found}
    write_json(out_dir / "analysis.json", report)
    sections = {"": tables.html_facts({**about, "depth": depth})}
    for step, kinds in checkpoints:
        rows = [[kind, *(value(measured.numbers) for value in COLUMNS.values())] for kind, measured in kinds.items()]
        sections[f"Step {step}"] = tables.html_columns(["negatives", *COLUMNS], rows)
    pictures = draw(checkpoints, out_dir, depth=depth)
    tables.write_page(out_dir / "report.html", title, sections, pictures)
    return report


def draw(checkpoints: Sequence[AtCheckpoint], out_dir: Path, *, depth: int) -> list[Picture]:
    """Draws all pictures into an existing folder."""
    last = checkpoints[-1]
    _gradient_norms(last, out_dir / "gradient_norms.png")
    _by_checkpoint(checkpoints, "loss", out_dir / "loss.png", title="Loss by kind of negative", label="nats")
    title = f"Share of the negatives in the model's top {depth}"
    _by_checkpoint(checkpoints, "overlap", out_dir / "overlap.png", title=title, label="share", top=1.0)
    _margins(last, out_dir / "margins.png")
    return [
        Picture(
            "gradient_norms.png",
            f"At step {last.step}, before clipping: the mean norm of a pair's gradient (bars) and the norm of the mean gradient "
            "(points). Negatives that teach nothing have small bars. A point far below the top of its bar: pairs disagree; "
            "one at the top: they agree, or a few outweigh all others, and the median is far below the mean.",
        ),
        Picture("loss.png", "The loss on the same pairs, each with its own drawn negatives."),
        Picture(
            "overlap.png",
            f"How many of a kind's negatives stand among the first {depth} documents by the checkpoint, the query's positives "
            "left out.",
        ),
        Picture(
            "margins.png",
            f"At step {last.step}: how far a negative scores below its pair's document; left of 0 it scores above.",
        ),
    ]


def _gradient_norms(last: AtCheckpoint, out_png: Path) -> None:
    norms = {kind: measured.numbers["grad_norm"] for kind, measured in last.kinds.items()}
    groups = list(next(iter(norms.values()))["per_pair"])
    width = 0.8 / len(norms)
    with new_figure(out_png, figsize=(min(WIDE, max(NARROW, 1.5 * len(groups))), 4.4)) as figure:
        axis, handles, shown = figure.subplots(), [], []
        for place, (kind, of_kind) in enumerate(norms.items()):
            at = np.arange(len(groups)) + width * (place - (len(norms) - 1) / 2)
            heights = [of_kind["per_pair"][group] for group in groups]
            handles.append(axis.bar(at, heights, 0.92 * width, color=colour_of(place), label=kind))
            means = [of_kind["of_mean"][group] for group in groups]
            shown += heights + means
            points = axis.plot(at, means, "o", ms=4, color=INK, mec="white", mew=0.6, label="of the mean gradient")
        axis.set_yscale("log")
        axis.set_ylim(*_decades(shown))
        axis.set_xticks(range(len(groups)), groups)
        axis.grid(visible=False, axis="x")
        axis.set_title("Gradient norm by layer group and kind of negative")
        axis.set_ylabel("L2 norm (logarithmic)")
        figure.legend(handles=[*handles, *points], loc="outside lower center", ncols=min(6, len(norms) + 1))


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around all values that have a place on a logarithmic axis."""
    logs = np.log10([value for value in values if value > 0] or [1.0])
    return 10.0 ** np.floor(logs.min()), 10.0 ** (np.floor(logs.max()) + 1)


def _by_checkpoint(
    checkpoints: Sequence[AtCheckpoint], number: str, out_png: Path, *, title: str, label: str, top: float | None = None
) -> None:
    """A line a kind over the checkpoints, or bars where there is one checkpoint only."""
    kinds, steps = list(checkpoints[0].kinds), [checkpoint.step for checkpoint in checkpoints]
    with new_figure(out_png, figsize=(NARROW, 4.0)) as figure:
        axis = figure.subplots()
        for place, kind in enumerate(kinds):
            values = [checkpoint.kinds[kind].numbers[number] for checkpoint in checkpoints]
            if len(steps) > 1:
                gaps = (0, (6, 1.2 * place)) if place else "-"  # so that a line drawn upon an equal one leaves it seen
                axis.plot(steps, values, color=colour_of(place), lw=1.8, ls=gaps, label=kind, clip_on=False)
            else:
                axis.bar(place, values[0], 0.62, color=colour_of(place))
                axis.annotate(short(values[0]), (place, values[0]), (0, 3), textcoords="offset points", ha="center", fontsize=9)
        axis.set_title(title if len(steps) > 1 else f"{title}, step {steps[0]}")
        axis.set_ylabel(label)
        axis.set_ylim(0, None if top is None else 1.06 * top)
        if len(steps) > 1:
            axis.set_xlabel("step")
            axis.set_xticks(steps)
            figure.legend(loc="outside lower center", ncols=min(5, len(kinds)), handlelength=4)
        else:
            axis.set_xticks(range(len(kinds)), kinds)
            axis.grid(visible=False, axis="x")


def _margins(last: AtCheckpoint, out_png: Path) -> None:
    """A panel a kind, so that none hides another."""
    every = np.concatenate([measured.margins for measured in last.kinds.values()])
    bins = np.linspace(float(every.min()), float(every.max()) + 1e-6, 61)
    with new_figure(out_png, figsize=(NARROW, 1.5 * len(last.kinds) + 0.6)) as figure:
        axes = figure.subplots(len(last.kinds), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for place, (axis, (kind, measured)) in enumerate(zip(axes, last.kinds.items(), strict=True)):
            histogram(axis, measured.margins, bins, colour_of(place), "")
            axis.axvline(0, color=INK, lw=1, ls="--")
            above = measured.numbers["share_above_positive"]
            axis.set_title(f"{kind}: mean {np.mean(measured.margins):.3f}, {above:.1%} below 0", fontsize=10)
        figure.supylabel("share of negatives", fontsize=10)
        axes[-1].set_xlabel("score of the positive less that of the negative")
