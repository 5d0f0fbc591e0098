"""Damaged files of every reader give the right value, or one sentence with the file."""

import fuzzing


def test_damaged_files_are_read_right_or_refused_by_name():
    summary = fuzzing.run(2000, seed=0)
    assert not summary["failures"], summary["failures"][:3]
    cases = {name: number + summary["refused"][name] for name, number in summary["accepted"].items()}
    assert min(cases.values()) >= 5, cases
    # Readers that refuse everything would pass.
    assert sum(number > 0 for number in summary["accepted"].values()) > 0.9 * len(cases)
    assert sum(summary["accepted"].values()) > 400
