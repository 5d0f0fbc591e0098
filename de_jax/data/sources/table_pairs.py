"""`table_pairs` by its name in scripts of users; it stands in `pair_store`, whose folders it writes."""

from de_jax.data.sources.pair_store import table_pairs as table_pairs
