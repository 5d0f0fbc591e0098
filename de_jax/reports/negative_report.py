"""An analysis of negatives as files: pictures, analysis.json, efficiency.md and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.evaluation.negative_analysis import WHOLE, AtCheckpoint
from de_jax.files.outputs import write_json
from de_jax.mining import efficiency
from de_jax.reports import html_report, negative_plots

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
    costs: efficiency.Costs,
    *,
    depth: int,
) -> dict[str, Any]:
    """Writes everything into an existing folder; returns the content of analysis.json.

    Args:
        out_dir: gets the files.
        title: of the page.
        about: facts about the analysis, by name.
        checkpoints: at least one.
        costs: of the negatives.
        depth: as of `negative_analysis.analyse`.
    """
    found = [{"step": step, **{kind: measured.numbers for kind, measured in kinds.items()}} for step, kinds in checkpoints]
    report = {**about, "depth": depth, "checkpoints": found, "efficiency": costs._asdict()}
    write_json(out_dir / "analysis.json", report)
    (out_dir / "efficiency.md").write_text(efficiency.markdown(costs))
    sections = {"": html_report.facts({**about, "depth": depth})}
    for step, kinds in checkpoints:
        rows = [[kind, *(value(measured.numbers) for value in COLUMNS.values())] for kind, measured in kinds.items()]
        sections[f"Step {step}"] = html_report.columns(["negatives", *COLUMNS], rows)
    if costs.generations:
        head, *rows = efficiency.table(costs)
        sections["Cost"] = html_report.columns(head, rows)
    pictures = negative_plots.draw(checkpoints, out_dir, depth=depth)
    html_report.write(out_dir / "report.html", title, sections, pictures)
    return report
