"""The model hash stands in folders that people keep, so other versions must compute the same."""

import hashlib

import jax.numpy as jnp
import numpy as np

from de_jax.training.run.run_folder import model_hash


def test_the_hash_is_of_the_description_and_of_each_arrays_path_type_shape_and_bytes():
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    params = {"shared": {"kernel": kernel}, "doc": {"scale": jnp.asarray([1, 2], jnp.bfloat16)}}
    digest = hashlib.sha256(b"doc Model()")
    digest.update(b"['doc']['scale'] bfloat16 (2,)" + b"\x80\x3f\x00\x40")
    digest.update(b"['shared']['kernel'] float32 (2, 3)" + kernel.tobytes())
    assert model_hash("doc Model()", params) == digest.hexdigest()
