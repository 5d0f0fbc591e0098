"""Batches of pairs without a source: their settings one by one."""

import dataclasses

from de_jax.data.batches.pair_batches import PairBatches, TrainingPairs
from de_jax.data.batches.window_batches import window_batches
from de_jax.data.sources.options import PairsOptions, Share

_PARTS = ("negatives", "doc_texts", "scores", "guide")


def pair_batches(query_store, doc_store, pairs, *, epoch_order=None, **settings):
    parts = {name: settings.pop(name) for name in _PARTS if settings.get(name) is not None}
    settings = {name: value for name, value in settings.items() if name not in _PARTS}
    return PairBatches(TrainingPairs("toy", query_store, doc_store, pairs, epoch_order=epoch_order), *_split(settings), **parts)


def windows(shards, tokenizers, *, window, **settings):
    return window_batches(shards, tokenizers, window, *_split(settings))


def _split(settings):
    of_share = {field.name for field in dataclasses.fields(Share)} & settings.keys()
    options = PairsOptions(**{name: value for name, value in settings.items() if name not in of_share})
    return options, Share(**{name: settings[name] for name in of_share})
