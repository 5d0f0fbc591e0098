"""Cases of a test: some run each time, and the others in the soak."""

from collections.abc import Iterable

import pytest


def often(cases: Iterable, *chosen) -> list:
    """The parameters of a test: the chosen cases, the others marked for the soak; each chosen one must be a case."""
    cases = list(cases)
    assert {*chosen} <= {*cases}
    return [case if case in chosen else _in_the_soak(case) for case in cases]


def _in_the_soak(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
