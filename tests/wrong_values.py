"""Which values each setting refuses, beside the table of the time when there were four checkers, `golden/refused_values.txt`.

python tests/wrong_values.py > tests/golden/refused_values.txt
"""

import inspect
import math

from de_jax import configurables, settings
from de_jax.types import InputError

ANYTHING = (0, 1, -1, 0.5, 2, 1e30, 2**40, math.nan, math.inf, True, None, "x", "ftp://x/y", (), ("x",), (0,), {}, {"x": -1}, len)


def refused(configurable, name):
    """The values that are refused, as messages show them."""
    found = []
    for value in ANYTHING:
        try:
            settings.check(configurable, {name: value})
        except InputError:
            found.append(settings.shown(value))
    return " ".join(found)


def table():
    """The refused values by setting."""
    parts = [part for name, part in configurables.known().items() if name not in configurables._own]
    names = [(part, name) for part in parts for name in inspect.signature(part).parameters if name in settings.hints(part)]
    return {f"{part.__name__}.{name}": refused(part, name) for part, name in names}


def read(path):
    """The refused values by setting, of a kept table."""
    return dict(line.split(": ", 1) for line in path.read_text().splitlines())


if __name__ == "__main__":
    print("\n".join(f"{name}: {values}" for name, values in table().items()))
