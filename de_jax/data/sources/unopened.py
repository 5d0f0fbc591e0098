"""A source of pairs before it is opened: its parts, its options, and the texts that come with a pair."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import TrainingSet
from de_jax.settings import bound, name_of

Source = Callable[..., TrainingSet]


def parts_of(source: Source) -> tuple[Source, ...]:
    """The sources of a mixture; of any other source itself."""
    with contextlib.suppress(KeyError):
        if isinstance(found := bound(source, "sources"), Mapping) and found:
            return tuple(found.values())
    return (source,)


def options_of(source: Source) -> PairsOptions | None:
    """The settings of a source of pairs, where it has such."""
    with contextlib.suppress(KeyError):
        found = bound(source, "options")
        return found if isinstance(found, PairsOptions) else None
    return None


def texts_of_a_pair(options: PairsOptions | None) -> dict[str, int]:
    """The texts in the settings, for `plan.batch_shapes`."""
    if options is None:
        return {}
    mined = ("num_neg_docs", "num_neg_queries") if options.negatives_dir else ()
    found = {name: getattr(options, name) for name in ("max_passages", *mined)}
    given = {"has_scores": options.teacher_scores, "has_guide": options.guide_dir}
    return found | {name: True for name, is_given in given.items() if is_given}


def most_texts_of_a_pair(source: Source, *, has_cache: bool) -> dict[str, int]:
    """`texts_of_a_pair`, with additions of a source that are known only when it is open; a negative cache takes their place."""
    options = options_of(source)
    found = texts_of_a_pair(options)
    if name_of(source) == "beir_pairs" or options is None:
        return found
    mined = {} if has_cache else {name: getattr(options, name) for name in ("num_neg_docs", "num_neg_queries")}
    return {**mined, **found, "has_scores": True}
