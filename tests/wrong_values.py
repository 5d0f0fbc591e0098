"""Which values each setting refuses, as a table: one line a setting, by the annotations of all that gin can set.

python tests/wrong_values.py > tests/golden/refused_values.txt
"""

import inspect
import math

from de_jax import configurables, settings
from de_jax.types import InputError

ANYTHING = (0, 1, -1, 0.5, 2, 1e30, 2**40, math.nan, math.inf, True, None, "x", "ftp://x/y", (), ("x",), (0,), {}, {"x": -1}, len)


def refused(configurable, name):
    """The values that are refused."""
    found = []
    for value in ANYTHING:
        try:
            settings.check(configurable, {name: value})
        except InputError:
            found.append(settings.shown(value))
    return found


def table():
    """The lines of the table."""
    parts = [part for name, part in configurables.known().items() if name not in configurables._own]
    for part in parts:
        for name in inspect.signature(part).parameters:
            if name in settings.hints(part):
                yield f"{part.__name__}.{name}: {' '.join(refused(part, name)) or 'none'}"


if __name__ == "__main__":
    print("\n".join(table()))
