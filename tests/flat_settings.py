"""Sources of pairs called with their options one by one, as gin files set them."""

import dataclasses

from de_jax import configurables
from de_jax.data.sources.options import Share


def flat(source):
    def opened(*args, **values):
        names = [field.name for field in dataclasses.fields(Share) if field.name in values]
        share = Share(**{name: values.pop(name) for name in names})
        return source(*args, **{"share": share} | configurables.nested(source, values))

    return opened
