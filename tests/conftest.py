"""Eight simulated devices for every test, and shapes checked as they are annotated."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("de_jax", "beartype.beartype").__enter__()
