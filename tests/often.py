"""Cases of a test: some run each time, and the others in the soak."""

from collections.abc import Iterable

import pytest


def often(names: Iterable, *chosen) -> list:
    """The parameters of a test: the chosen names, the others marked for the soak; each chosen one must be a name."""
    names = list(names)
    assert {*chosen} <= {*names}
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.soak) for name in names]
