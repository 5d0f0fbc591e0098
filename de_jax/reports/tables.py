"""Tables as plain text, for people who watch a command."""

from collections.abc import Sequence

from de_jax.evaluation.report import SYSTEMS, Report


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; the first to the left, the others to the right.

    Example:
        >>> print(text_table(["set", "ndcg@10"], [["scifact", "0.6451"]]))
        set      ndcg@10
        scifact   0.6451
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in [head, *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)


def report_tables(reports: Sequence[Report]) -> str:
    """A table for each measure: one row a report, one column a system, as far as they are there.

    The last column is half the width of the first system's confidence interval, where a report has one.
    """
    systems = [system for system in SYSTEMS if any(system in report for report in reports)]
    has_intervals = any("half_widths" in report for report in reports)
    tables = []
    for measure in reports[0][systems[0]]:
        rows = []
        for report in reports:
            counts = [f"{report[count]:,}" if report.get(count) is not None else "" for count in ("num_docs", "num_queries")]
            scores = [report.get(system, {}).get(measure) for system in systems]
            scores += [report.get("half_widths", {}).get(systems[0], {}).get(measure)] if has_intervals else []
            rows.append([report["dataset"], *counts, *("" if one is None else f"{one:.4f}" for one in scores)])
        tables.append(text_table([measure, "docs", "queries", *systems, *[f"{systems[0]} ±"] * has_intervals], rows))
    return "\n\n".join(tables)
