"""docs/results/plans.md holds what the compiler said, as docs/plans.jsonl keeps it."""

from pathlib import Path

from benchmarks import plan_tables

ROOT = Path(__file__).resolve().parents[2]


def test_tables_in_the_docs_are_those_of_the_results(capsys, monkeypatch):
    monkeypatch.setattr(plan_tables, "step_plan", None)  # nothing is left to compile
    monkeypatch.setattr(plan_tables, "loss_plan", None)
    plan_tables.main([f"--results={ROOT / 'docs' / 'plans.jsonl'}"])
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "results" / "plans.md").read_text()
