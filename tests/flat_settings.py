"""Sources of pairs called with their options one by one, as gin files set them."""

import dataclasses

from de_jax.data.sources.options import PairsOptions, Share


def flat(source):
    def opened(*args, **values):
        names = [field.name for field in dataclasses.fields(Share) if field.name in values]
        share = Share(**{name: values.pop(name) for name in names})
        own = {field.name: values.pop(field.name) for field in dataclasses.fields(PairsOptions) if field.name in values}
        if own and isinstance(values.get("options", PairsOptions()), PairsOptions):
            values["options"] = dataclasses.replace(values.get("options", PairsOptions()), **own)
        return source(*args, **{"share": share, **values})

    return opened
