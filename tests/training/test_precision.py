"""The family of a device, from what JAX and Linux say of it, and the precision that follows."""

import types

import jax
import pytest

from de_jax.models import layers
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.mesh import sharding


@pytest.mark.parametrize(
    ("platform", "flags", "family", "dtype"),
    [
        ("cpu", "fpu avx512_bf16 amx_bf16", "amx", "bfloat16"),
        ("cpu", "fpu avx512_bf16", "avx512_bf16", "bfloat16"),
        ("cpu", "fpu avx512f avx512_vnni", "other_cpu", "float32"),
        ("cpu", None, "other_cpu", "float32"),
        ("gpu", "amx_bf16", "gpu", "bfloat16"),
        ("tpu", "amx_bf16", "tpu", "bfloat16"),
    ],
)
def test_texts_are_encoded_in_bfloat16_where_the_device_multiplies_it(monkeypatch, tmp_path, platform, flags, family, dtype):
    described = tmp_path / "cpuinfo"
    if flags:
        described.write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\nflags : fpu\n")
    monkeypatch.setattr(sharding, "Path", lambda name: described)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform=platform)])
    monkeypatch.setattr(layers, "has_bfloat16_units", lambda: True)
    monkeypatch.setattr(sharding, "family", sharding.family.__wrapped__)
    assert (sharding.family(), sharding.fast_dtype()) == (family, dtype)
    model = DualEncoder(*[TowerConfig(T5Config(vocab_size=8, num_layers=0, dtype="float32"))] * 2)
    assert model.with_dtype(sharding.precision("auto")).dtype == dtype
    assert (model.dtype, model.with_dtype(None)) == ("float32", model)
