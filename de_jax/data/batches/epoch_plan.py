"""The plan of an epoch by its name in scripts of users; it stands in `pair_batches`, where it is used."""

from de_jax.data.batches.pair_batches import EpochPlan as EpochPlan
