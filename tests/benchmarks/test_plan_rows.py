"""docs/results/plans.md has a plan of every row of the papers, as the compiler gave it."""

from pathlib import Path

from benchmarks import plan_rows
from experiments import stand_in_weights

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_row_of_the_papers_has_a_plan_that_fits():
    found = plan_rows.read(DOCS / "row_plans.jsonl")
    assert sorted(found) == stand_in_weights.rows()
    assert [row for row, record in found.items() if not record["fits"]] == []
    for row, record in found.items():
        assert (record["topology"], tuple(record["settings"])) == plan_rows.devices(row)
        assert "planned_as" not in found[record.get("planned_as", row)]
    assert "\n".join(plan_rows.table(found)) in (DOCS / "results" / "plans.md").read_text(encoding="utf-8")
