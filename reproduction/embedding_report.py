"""An analysis of embeddings as files: pictures and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax.reports.plots import (
    BOTH_COLOUR,
    DOC_COLOUR,
    INK,
    NARROW,
    PAIR_COLOUR,
    QUERY_COLOUR,
    WIDE,
    embedding_map,
    histogram,
    new_figure,
    one_panel,
)
from reproduction import pages
from reproduction.embedding_analysis import MEASURE, Analysis
from reproduction.pages import Picture

RATIO_RANGE = (-0.5, 2.5)
NUM_CURVES = 10


def write(analysis: Analysis, out_dir: Path, title: str, about: Mapping[str, Any], *, seed: int = 0) -> None:
    """Writes the pictures, and report.html with them, into an existing folder; `about` are facts about the analysis, by name.

    "groups" of the numbers is left to its picture and to analysis.json.
    """
    counts = {name: value for name, value in analysis.numbers.items() if name.startswith("num_")}
    measured = {name: value for name, value in analysis.numbers.items() if name not in (*counts, "groups")}
    sections = {"": pages.html_facts({**about, **counts}), "Measures": pages.html_facts(measured)}
    pages.write_page(out_dir / "report.html", title, sections, draw(analysis, out_dir, seed=seed))


def draw(analysis: Analysis, out_dir: Path, *, seed: int = 0) -> list[Picture]:
    """Draws all pictures into an existing folder."""
    near = "Neighbours stay neighbours; distances across the map mean little."
    far = "Distances as they are, in the two directions of the largest variance."
    for method, title in (("tsne", "Queries and their documents"), ("pca", "Queries and their documents, linearly")):
        embedding_map(*analysis.pairs, out_dir / f"map_{method}.png", title=title, method=method, seed=seed)
    _cosines(analysis, out_dir / "top_cosines.png")
    outside = _ratios(analysis.ratios, out_dir / "ratios.png")
    _distances(analysis.distances, out_dir / "distances.png")
    _scores(analysis, out_dir / "scores_by_rank.png")
    _groups(analysis.numbers["groups"], out_dir / "groups.png")
    return [
        Picture("map_tsne.png", f"Both towers by t-SNE: where they share one space, the colours mix. {near}"),
        Picture("map_pca.png", f"Both towers by PCA. {far}"),
        Picture("top_cosines.png", "How close the best-ranked document is to its query, and how close the relevant one."),
        Picture(
            "ratios.png",
            "Similarity of a query to another query, over that to the other one's document; near 1 where queries and documents "
            f"share one space. {outside:.1%} lie outside the picture, where the divisor is close to 0.",
        ),
        Picture("distances.png", "Cosine distances of all pairs of a sample."),
        Picture(
            "scores_by_rank.png",
            "Scores of all documents, best first; a curve that falls early and then lies flat has a long tail.",
        ),
        Picture(
            "groups.png",
            "Quality in both directions. A text's recall frequency is in how many rankings of the other direction it is found; its "
            "detaching distance is the mean cosine distance to all texts of its kind, in equal thirds.",
        ),
    ]


def _cosines(analysis: Analysis, out_png: Path) -> None:
    both = {"best-ranked document": analysis.top_cosines, "relevant document": analysis.pair_cosines}
    low = float(min(values.min() for values in both.values()))
    bins = np.linspace(np.floor(low * 20) / 20, 1, 41)
    labels: dict[str, Any] = {"xlabel": "cosine", "ylabel": "share of queries", "legend": "upper left"}
    with one_panel(out_png, "Cosine of a query and a document", **labels) as axis:
        for (name, values), colour in zip(both.items(), (DOC_COLOUR, QUERY_COLOUR), strict=True):
            histogram(axis, values, bins, colour, f"{name}, mean {np.mean(values):.3f}")


def _ratios(ratios: Float[np.ndarray, " r"], out_png: Path) -> float:
    """Draws the ratios; gives the share that the picture leaves out."""
    low, high = RATIO_RANGE
    labels: dict[str, Any] = {"xlabel": "ratio", "ylabel": "share of pairs", "legend": "upper left"}
    with one_panel(out_png, "s(q, q') / s(q, p') of random others", **labels) as axis:
        histogram(axis, ratios, np.linspace(low, high, 61), BOTH_COLOUR, "")
        axis.axvline(1, color=INK, lw=1, ls="--")
        axis.axvline(float(np.median(ratios)), color=QUERY_COLOUR, lw=1.4, label=f"median {np.median(ratios):.2f}")
    return float(1 - np.mean((ratios >= low) & (ratios <= high)))


def _distances(distances: Mapping[str, Float[np.ndarray, " p"]], out_png: Path) -> None:
    colours = (QUERY_COLOUR, DOC_COLOUR, BOTH_COLOUR, PAIR_COLOUR)
    low, high = min(d.min() for d in distances.values()), max(d.max() for d in distances.values())
    bins = np.linspace(float(low), float(high), 81)
    with new_figure(out_png, figsize=(NARROW, 6.4)) as figure:
        axes = figure.subplots(len(distances), 1, sharex=True, sharey=True)
        for axis, (kind, values), colour in zip(axes, distances.items(), colours, strict=True):
            histogram(axis, values, bins, colour, "")
            axis.axvline(float(np.mean(values)), color=INK, lw=1, ls="--")
            axis.set_title(f"{kind}: mean {np.mean(values):.3f}, variance {np.var(values):.2g}", fontsize=10)
        figure.supylabel("share of pairs", fontsize=10)
        axes[-1].set_xlabel("cosine distance (dashed: mean)")


def _scores(analysis: Analysis, out_png: Path) -> None:
    ranks, scores = analysis.ranks, analysis.scores
    labels: dict[str, Any] = {"xlabel": "rank (logarithmic)", "ylabel": "score", "legend": "upper right"}
    with one_panel(out_png, f"Score by rank, of {ranks[-1]:,} documents", **labels) as axis:
        axis.plot(ranks, scores[:NUM_CURVES].T, color=DOC_COLOUR, lw=0.8, alpha=0.4)
        axis.plot([], [], color=DOC_COLOUR, lw=0.8, alpha=0.6, label=f"{min(NUM_CURVES, len(scores))} random queries")
        axis.plot(ranks, scores.mean(axis=0), color=INK, lw=2, label=f"mean of {len(scores)} queries")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda rank, _: f"{rank:,.0f}")


def _groups(groups: Mapping[str, Any], out_png: Path) -> None:
    with new_figure(out_png, figsize=(WIDE, 6.6)) as figure:
        axes = figure.subplots(2, 2, sharey=True)
        for row, (direction, by) in zip(axes, groups.items(), strict=True):
            searcher = direction.split()[0]
            colour = QUERY_COLOUR if searcher == "query" else DOC_COLOUR
            for axis, grouping in zip(row, ("recall_frequency", "detaching_distance"), strict=True):
                _bars(axis, by[grouping], colour)
                axis.set_title(f"{direction.capitalize()}, by the {searcher}'s\n{grouping.replace('_', ' ')}", fontsize=10)
                top = by["depth_of_recall"]
                axis.set_xlabel(f"found in the top {top}" if grouping == "recall_frequency" else "third of the distances")
            row[0].set_ylabel("nDCG@10")


def _bars(axis: Any, groups: Mapping[str, Any], colour: str) -> None:
    heights = [group[MEASURE] or 0 for group in groups.values()]
    axis.bar(range(len(groups)), heights, color=colour, width=0.62)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.grid(visible=False, axis="x")
    axis.set_ylim(0, 1.2)  # room for the text above a bar
    axis.set_yticks(np.linspace(0, 1, 6))
    for place, (group, height) in enumerate(zip(groups.values(), heights, strict=True)):
        label = f"{height:.3f}\n{group['number']:,} texts" if group[MEASURE] is not None else "no text"
        axis.annotate(label, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
