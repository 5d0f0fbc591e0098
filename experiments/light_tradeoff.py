"""Draws quality against latency of light query towers from the tables of results/light_towers.yaml, without any run.

python -m experiments.light_tradeoff --out_png=docs/images/light_tradeoff.png
"""

from __future__ import annotations

from pathlib import Path

from de_jax import command
from experiments import light_towers
from experiments.render_results import ROOT
from reproduction.result_files import Entry, entries_of, expected, read_all

SETS = ("SciFact", "NFCorpus", "MedQuAD")
COLUMNS = {"daft": "DAFT", "one_stage": "at once"}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = command.Parser(description=__doc__)
    parser.add_argument("--out_png", type=Path, default=ROOT / "docs" / "images" / "light_tradeoff.png")
    args = parser.parse_args(argv)
    entries = entries_of(read_all(ROOT / "results"))
    scores = {dataset: _scores(dataset, entries["light_towers"]) for dataset in SETS}
    light_towers.draw(scores, _milliseconds(entries["query_latency"]), args.out_png)


def _scores(dataset: str, entry: Entry) -> dict[str, light_towers.MeanAndDeviation]:
    """By system, from the table of the set, and from the table of the whole models."""
    (of_set,) = (table for table in entry.tables if table.caption.startswith(dataset))
    whole = entry.tables[-1]
    cells = {
        light_towers.BEFORE: whole.cell(dataset, "the original model"),
        light_towers.WHOLE: whole.cell(dataset, "the whole model"),
    }
    for way, column in COLUMNS.items():
        cells |= {f"{way}_{row[0]}": of_set.cell(row[0], column) for row in of_set.rows[1:]}
    numbers = {system: expected(cell) for system, cell in cells.items()}
    return {system: (mean, deviation or 0.0) for system, (mean, deviation) in numbers.items()}


def _milliseconds(entry: Entry) -> dict[str, float]:
    """Of the original model, and by the number of layers of the query tower."""
    _, model, *towers = ((row[0].split()[0], row[1]) for row in entry.tables[0].rows)
    return {light_towers.BEFORE: float(model[1]), **{layers: float(cell) for layers, cell in towers}}


if __name__ == "__main__":
    command.run(main)
