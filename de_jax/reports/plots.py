"""Pictures of the course of a run and of its embeddings. Written as PNG files, without a display."""

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax.files import outputs
from de_jax.settings import needs
from de_jax.training.run.run_log import read_metrics
from de_jax.types import InputError

QUERY_COLOUR, DOC_COLOUR, INK, GRID = "#c8553d", "#2f6690", "#2b2d33", "#e4e6ea"
BOTH_COLOUR, PAIR_COLOUR = "#5b8e7d", "#8d6a9f"
COLOURS = (DOC_COLOUR, QUERY_COLOUR, BOTH_COLOUR, PAIR_COLOUR, "#b8860b", "#22a7c4", "#e08bb5", "#8a8d94", "#7b4a2e", "#9cb53c")
PANELS = (
    ("Loss", "nats", "(dev/)?loss"),
    ("Development set", "score", "dev/(?!loss).*"),
    ("Learning rate", "", "learning_rate"),
    ("Speed", "pairs/s", "pairs_per_second"),
    ("Gradient norm", "before clipping", "grad_norm/.*"),
    ("Alignment of the towers", "", "alignment/.*"),
    ("Spread of the embeddings", "mean cosine; variance", "(query|doc)_(mean_cosine|variance)"),
)
"""Title, unit and series of each panel, as a pattern over their names."""
NARROW, WIDE = 7.2, 10.0
"""Inches: the width of a picture of one panel, and of several. A wider one has small text on a slide."""
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
}


def require() -> None:
    """Raises InputError if what draws pictures is not installed; commands call it before their work."""
    with needs("reports", "drawing"):
        for package in ("matplotlib", "PIL", "sklearn", "threadpoolctl"):
            importlib.import_module(package)


def training_curves(metrics_jsonl: str | Path, out_png: str | Path, *, title: str = "") -> None:
    """Draws loss, development scores, learning rate, speed and gradient norms by group over the steps of a run.

    `metrics_jsonl` has one JSON object a line, with "step" and scalars; see `read_metrics` for damaged lines. Raises InputError for
    no file, or nothing to draw.
    """
    series = _read_series(Path(metrics_jsonl))
    found = ((name, unit, [one for one in sorted(series) if re.fullmatch(pattern, one)]) for name, unit, pattern in PANELS)
    panels = [(name, unit, {one: series[one] for one in names}) for name, unit, names in found if names]
    if not panels:
        raise InputError(f"{metrics_jsonl} holds no loss, dev/ score, learning_rate or pairs_per_second; it is not a training log.")
    with new_figure(out_png, figsize=(WIDE, 3.1 * ((len(panels) + 1) // 2) + 0.3), title=title) as figure:
        num_columns = min(2, len(panels))
        axes = figure.subplots((len(panels) + 1) // 2, num_columns, squeeze=False).flatten()
        for axis, (name, unit, drawn) in zip(axes, panels, strict=False):
            _draw_panel(axis, name, unit, drawn)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()


def embedding_map(
    query_embeddings: Float[np.ndarray, "n D"],
    doc_embeddings: Float[np.ndarray, "m E"],
    out_png: str | Path,
    *,
    title: str,
    method: str = "tsne",
    seed: int = 0,
    max_pairs: int = 400,
) -> None:
    """Draws both towers in one plane: queries and documents have a colour each, a line joins each query with its document.

    Dong et al. (2022) read from such a picture whether two towers share one space: if they do, the colours mix and
    the lines are short.
    """
    if query_embeddings.shape != doc_embeddings.shape:
        raise InputError(f"queries {query_embeddings.shape} and documents {doc_embeddings.shape} differ; row i is pair i.")
    if method not in ("tsne", "pca"):
        raise InputError(f"method {method!r} is unknown; give 'tsne' or 'pca'.")
    if (num_pairs := min(len(query_embeddings), max_pairs)) < 3:
        raise InputError(f"{num_pairs} pairs are too few for a map; give at least 3.")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(query_embeddings))[:num_pairs])
    both = np.concatenate([query_embeddings[chosen], doc_embeddings[chosen]]).astype(np.float32)
    if not np.isfinite(both).all():
        raise InputError("an embedding has a value that is not finite, so it cannot be drawn; the model diverged.")
    places, note = _project(both, method, seed)
    with new_figure(out_png, figsize=(NARROW, NARROW)) as figure:
        _draw_map(figure, places[:num_pairs], places[num_pairs:], title, f"{num_pairs} pairs, {note}")


def lengths(found: Mapping[str, np.ndarray], out_png: str | Path, *, title: str, unit: str) -> None:
    """Draws how long texts are: shares of "queries" and "documents", up to the length of 99.5 %."""
    most = max((float(np.quantile(values, 0.995)) for values in found.values() if len(values)), default=1.0)
    with one_panel(out_png, title, xlabel=f"{unit} of a text", ylabel="share of the texts", legend="upper right") as axis:
        for colour, (name, values) in zip((QUERY_COLOUR, DOC_COLOUR), found.items(), strict=True):
            if len(values):
                histogram(axis, values, np.linspace(0, max(most, 1), 41), colour, f"{len(values):,} {name}")


def query_differences(differences: Mapping[str, Float[np.ndarray, " q"]], out_png: str | Path, *, title: str) -> None:
    """Draws each system's gain or loss over a baseline, query by query, from the largest gain to the largest loss.

    `differences` are of the scores of the same queries, system minus baseline, by the system's name; none is an InputError.
    """
    if not differences or not all(len(values) for values in differences.values()):
        raise InputError("there is no difference to draw; give at least one system and one query.")
    with new_figure(out_png, figsize=(NARROW, 2.3 * len(differences) + 0.5), title=title) as figure:
        axes = figure.subplots(len(differences), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, (name, values) in zip(axes, differences.items(), strict=True):
            falling, edges = np.sort(values)[::-1], np.arange(len(values) + 1)
            falling = np.append(falling, falling[-1])  # a bar reaches to the next edge
            for colour, part in ((DOC_COLOUR, np.maximum(falling, 0)), (QUERY_COLOUR, np.minimum(falling, 0))):
                axis.fill_between(edges, part, step="post", color=colour, linewidth=0)
            axis.axhline(float(np.mean(values)), color=INK, linewidth=1, linestyle="--")
            axis.set_title(f"{name}: mean {np.mean(values):+.4f}")
        axes[-1].set_xlabel("queries, by their gain; dashed: the mean")


def _read_series(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """(steps, values) of each scalar, by name."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for line in read_metrics(path):
        step = line.pop("step")
        for name, value in line.items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return series


def _draw_panel(axis: Any, name: str, unit: str, series: Mapping[str, tuple[list[float], list[float]]]) -> None:
    for index, (label, (steps, values)) in enumerate(series.items()):
        colour = colour_of(index)
        is_noisy = name in ("Loss", "Speed", "Gradient norm") and len(steps) > 30
        line = _smooth(values) if is_noisy else values
        if is_noisy:
            axis.plot(steps, values, color=colour, lw=0.8, alpha=0.3)
        marker = "o" if len(steps) <= 30 else None
        axis.plot(steps, line, color=colour, lw=1.8, marker=marker, ms=3.5, label=label.rpartition("/")[2])
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axis.annotate(short(line[-1]), (steps[-1], line[-1]), color=colour, fontsize=9, **place)
    axis.set_title(f"{name} ({unit})" if unit else name)
    axis.set_xlabel("step")
    axis.margins(x=0.02)
    if name == "Speed":
        axis.set_ylim(bottom=0)
    if len(series) > 1 or name == "Development set":
        axis.legend(loc="best", fontsize=9)


def _smooth(values: Sequence[float]) -> np.ndarray:
    """A running mean over a fiftieth of the points, narrower at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    centres, half = np.arange(len(values)), max(1, len(values) // 100)
    first, last = np.maximum(centres - half, 0), np.minimum(centres + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _project(points: Float[np.ndarray, "p D"], method: str, seed: int) -> tuple[Float[np.ndarray, "p 2"], str]:
    """Places in the plane, and how they were found, in words."""
    if method == "pca" or not np.ptp(points, axis=0).any():  # t-SNE cannot place points that are all equal
        places, share = place_by_pca(points)
        return places, f"PCA, {share:.0%} of the variance"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", metric="cosine", random_state=seed)
    with threadpool_limits(1):  # its threads spin: on a busy machine two take thirty times as long as one
        return tsne.fit_transform(points).astype(np.float32), f"t-SNE of cosines, perplexity {perplexity:.0f}"


def place_by_pca(points: Float[np.ndarray, "p D"]) -> tuple[Float[np.ndarray, "p 2"], float]:
    """Places in the plane of the largest variance, and the share of all variance that lies in it."""
    centred = points - points.mean(axis=0, keepdims=True)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    places = np.zeros((len(points), 2), np.float32)
    places[:, : min(2, len(values))] = left[:, :2] * values[:2]
    return places, float(np.sum(values[:2] ** 2) / max(np.sum(values**2), 1e-30))


def _draw_map(figure: Any, queries: np.ndarray, docs: np.ndarray, title: str, note: str) -> None:
    from matplotlib.collections import LineCollection

    axis = figure.subplots()
    axis.add_collection(
        LineCollection(list(np.stack([queries, docs], axis=1)), colors="#7d828a", linewidths=0.6, alpha=0.45, zorder=1)
    )
    # Documents are wide and pale, queries small and full, so that a pair that falls together still shows both.
    axis.scatter(*docs.T, s=46, color=DOC_COLOUR, alpha=0.5, linewidths=0, label="documents", zorder=2)
    axis.scatter(*queries.T, s=13, color=QUERY_COLOUR, linewidths=0.3, edgecolors="white", label="queries", zorder=3)
    axis.set_aspect("equal", adjustable="datalim")
    axis.autoscale_view()
    axis.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_title(title, fontsize=13, pad=24)
    axis.text(0, 1.012, note, transform=axis.transAxes, fontsize=9, color="#6a6f77")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, fontsize=10, handletextpad=0.3)


def histogram(axis: Any, values: Float[np.ndarray, " v"], bins: Float[np.ndarray, " b"], colour: str, label: str) -> None:
    """Shares of all values, also of those outside the bins."""
    counts, _ = np.histogram(values, bins)
    axis.stairs(counts / len(values), bins, fill=True, color=colour, alpha=0.25)
    axis.stairs(counts / len(values), bins, color=colour, lw=1.4, label=label or None)


def short(value: float) -> str:
    """A number for a label, of three digits and without an exponent if it is large.

    Example:
        >>> short(0.61234), short(2134.5)
        ('0.612', '2,134')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def colour_of(place: int) -> str:
    """The colour of the line or bar in this place, counted from 0."""
    return COLOURS[place % len(COLOURS)]


@contextlib.contextmanager
def one_panel(
    out_png: str | Path, title: str, *, xlabel: str = "", ylabel: str = "", legend: str = "", height: float = 4.0
) -> Iterator[Any]:
    """The axis of a picture of one panel, saved when the block ends; `legend` is its place, "" for none."""
    with new_figure(out_png, figsize=(NARROW, height)) as figure:
        axis = figure.subplots()
        axis.set_title(title)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        yield axis
        if legend:
            axis.legend(loc=legend)


@contextlib.contextmanager
def new_figure(out_png: str | Path, *, figsize: tuple[float, float], title: str = "") -> Iterator[Any]:
    """A figure in our style, saved when the block ends; needs neither a display nor pyplot's global state.

    `out_png` appears by rename, with 256 colours: a third of the bytes. Of `figsize`, in inches, the width is `NARROW` or at most
    `WIDE`.
    """
    require()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=figsize)
        canvas = FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        yield figure
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        with outputs.atomic_file(out_png) as temporary:
            image.quantize(256, dither=Image.Dither.NONE).save(temporary, format="PNG", optimize=True)
