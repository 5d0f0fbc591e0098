"""The encoder of T5Gemma 2 (Zhang et al. 2025), for texts: Gemma 3's layers in both directions.

config.json keeps its settings in an object within an object. The rest of the model is left out: the decoder, and what reads images.
The token after an image has a vector of its own, which is not scaled as the others are.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from de_jax.interop.architectures import gemma3, kind, rotary, t5gemma
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig
from de_jax.types import InputError

END_OF_IMAGE = 256_000
KEYS = Keys(
    read="model_type pad_token_id encoder dropout_rate attention_dropout",
    harmless=kind.HARMLESS + " decoder classifier_dropout_rate vocab_size (eoi|image)_token_index",  # the encoder's count
    fixed=kind.FIXED,
    refused=kind.REFUSED,
)
ENCODER_KEYS = Keys(
    read="text_config eoi_token_index",
    harmless=kind.HARMLESS + " vision_config mm_tokens_per_image (boi|image)_token_index vocab_size dropout_rate attention_dropout",
    fixed={**kind.FIXED, "model_type": ("t5gemma2_encoder",)},
)
TEXT_KEYS = gemma3.KEYS._replace(
    read=kind.keys(gemma3.TABLE, gemma3.READ + " dropout_rate").read,
    refused={},
    fixed={
        **gemma3.KEYS.fixed,
        "model_type": ("t5gemma2_text",),
        "use_bidirectional_attention": (False, None),  # never read; true would be of another window
    },
)
NO_IMAGES = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "patch_size"), 1),
    "num_hidden_layers": 0,
    "image_size": 16,
    "vision_use_head": False,
}
"""transformers requires a vision tower; this one is as small as can be."""
PREFIX = "model.encoder."


def config_of(settings: Settings) -> RotaryConfig:
    encoder = _part(settings, "encoder", settings.values.get("encoder"), ENCODER_KEYS)
    text = _part(settings, "encoder/text_config", encoder.values.get("text_config"), TEXT_KEYS)
    width, end = text.size("sliding_window", 4096), encoder.size("eoi_token_index", END_OF_IMAGE)
    config = RotaryConfig(
        **gemma3.third_fields(text) | t5gemma.dropout(settings),
        unscaled_token=end,
        window=(width - 1) // 2,
        window_after=width // 2,
    )
    if end >= config.vocab_size or end == settings.values.get("pad_token_id"):
        told = f"it must be less than vocab_size = {config.vocab_size} and not the padding"
        raise InputError(f"{settings.file}: eoi_token_index is {end}; {told}.")
    return config


def _part(settings: Settings, name: str, values: Any, keys: Keys) -> Settings:
    if not isinstance(values, dict):
        raise InputError(f"{settings.file}: {name} is {values!r}; it must be an object, the encoder's own settings.")
    kind.account(settings.file, values, keys)
    return settings._replace(values=values)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own: dict[str, Any] = {"dropout_rate": config.dropout_rate, "sliding_window": sum(config.windows) + 1}
    rope = gemma3.third_rope(config)
    text = gemma3.json_as(config, pad_id, "t5gemma2_text", rope_parameters=rope, **own)
    return {
        "model_type": "t5gemma2",
        "architectures": ["T5Gemma2Model"],
        "is_encoder_decoder": True,
        "dropout_rate": config.dropout_rate,
        "attention_dropout": config.weights_dropout_rate,
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": text,
            "vision_config": NO_IMAGES,
            "eoi_token_index": config.unscaled_token,
        },
        # transformers requires a decoder too; this one has no layers
        "decoder": {**text, "model_type": "t5gemma2_decoder", "num_hidden_layers": 0, "layer_types": []},
        "vocab_size": config.vocab_size,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    end = config.unscaled_token
    if end is None or end == pad_id:
        raise InputError(f"eoi_token_index is {end}, which is the padding of the vocabulary; T5Gemma 2 needs another token there.")
    origins = rotary.llama_origins(config, pad_id, norms=t5gemma.NORMS, added=1.0, prefix=PREFIX)
    table = origins["embedder/embedding"]._replace(own_row=(end, f"{PREFIX}embed_tokens.eoi_embedding"))
    return {**origins, "embedder/embedding": table}


def own_name(name: str) -> str:
    """Parts of the model alone, and transformers' own modules, have more or less before an encoder's names than a file."""
    return re.sub(r"^(model\.)?(encoder\.(text_model\.)?|text_model\.)", PREFIX, name)


KIND = dataclasses.replace(
    rotary.encoder_kind(
        "t5gemma2",
        KEYS,
        config_of,
        json_of,
        origins_of,
        heads=(r"(model\.)?(decoder|lm_head|score|classifier)\..*", r"model\.encoder\.(vision_tower|multi_modal_projector)\..*"),
        is_renamed=True,
    ),
    own_name=own_name,
)
