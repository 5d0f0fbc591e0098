"""Draws the verdict of a run: the scores on held-out queries before and after, beside BM25 and the fusion of both.

python -m experiments.verdict_picture results/verdict_medquad.json docs/images/verdict.png
python -m experiments.verdict_picture runs/qa/verdict.json verdict.png

`results/verdict_medquad.json` is the verdict of experiments.judge_tuning's job fine_tune-medquad-0 at commit 5c96d8f0, on an H100.
"""

import argparse
from pathlib import Path
from typing import Any

from de_jax.files.reading import read_json
from de_jax.reports import plots
from de_jax.settings import map_of

BARS = (("bm25", "BM25"), ("fusion", "model + BM25"), ("before", "before training"), ("after", "after training"))


def draw(verdict: dict[str, Any], out_png: Path) -> None:
    """A bar for each system, with the interval of the gain."""
    shown = [(label, verdict[name]) for name, label in BARS if name in verdict][::-1]
    title = f"{verdict['result']}: {verdict['measure']} on {verdict['num_queries']:,} held-out questions"
    with plots.one_panel(out_png, title, xlabel=verdict["measure"], height=2.6) as axis:
        labels, values = zip(*shown, strict=True)
        colour_of = {"after training": plots.DOC_COLOUR, "before training": plots.QUERY_COLOUR}
        colours = [colour_of.get(label, "#b9bec6") for label in labels]
        axis.barh(labels, values, color=colours, height=0.62)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, min(1.0, max(values) * 1.35))
        for place, value in enumerate(values):
            axis.text(value + 0.008, place, f"{value:.3f}"[1:], va="center")
        if "p" in verdict:
            low, high = verdict["interval"]
            gain = f"      {verdict['difference']:+.3f}, 95 % {low:+.3f} to {high:+.3f}, p {verdict['p']:.4f}"
            axis.text(verdict["after"] + 0.045, labels.index("after training"), gain.replace("0.", "."), va="center", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdict", type=Path)
    parser.add_argument("out_png", type=Path)
    args = parser.parse_args()
    found = read_json(args.verdict, map_of(Any))
    draw(found.get("", found), args.out_png)


if __name__ == "__main__":
    main()
