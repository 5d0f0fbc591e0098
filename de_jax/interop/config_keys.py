"""The settings that configuration files of transformers and sentence-transformers may hold; each is accounted for.

A setting is read, or harmless because no embedding depends on it, or it must say in so many words how a tower works anyway. Any
other is refused by name. There is one table for each kind of file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.types import InputError

OWN_CODE = "asks for code of the model's own, which is never run"


class Keys(NamedTuple):
    """The settings of one kind of file; names in `read` and `harmless` are regular expressions parted by blanks."""

    read: str = ""  # by the importer, which checks the values
    harmless: str = ""
    fixed: Mapping[str, tuple[Any, ...]] = {}  # the values that change nothing
    refused: Mapping[str, str] = {}  # with the reason


def account(file: Path, values: Mapping[str, Any], keys: Keys) -> None:
    """Checks that nothing in a file is passed over in silence.

    Args:
        file: for messages.
        values: its JSON object, or a part of it.
        keys: the table of this kind of file.

    Raises:
        InputError: a setting that has no place here, by name.
    """
    known = re.compile("|".join([*keys.read.split(), *keys.harmless.split()]))
    for name, value in values.items():
        if name in keys.refused and value:
            raise InputError(f"{file}: {name} {keys.refused[name]}.")
        if name in keys.fixed and value not in keys.fixed[name]:
            allowed = " or ".join(map(repr, keys.fixed[name]))
            raise InputError(f"{file}: {name} is {reprlib.repr(value)}; the towers here have {allowed}.")
        if name not in keys.fixed and name not in keys.refused and not known.fullmatch(name):
            raise InputError(
                f"{file}: the setting {name} ({reprlib.repr(value)}) is unknown here; remove it if no embedding depends on it."
            )


# What any config.json of transformers may hold: notes on its making, output options, heads, and the settings of `generate`.
_ENCODER_READ = "model_type vocab_size pad_token_id"
_ENCODER_HARMLESS = """
architectures transformers_version _?name_or_path _commit_hash torch_dtype dtype language license tokenizer_class
use_cache return_dict output_hidden_states output_attentions output_past torchscript use_bfloat16 tf_legacy_loss xla_device
chunk_size_feed_forward gradient_checkpointing _?attn_implementation(_autoset|_internal)? initializer_(range|factor)
is_encoder_decoder tie_encoder_decoder tie_word_embeddings cross_attention_hidden_size
id2label label2id _?num_labels problem_type classifier_dropout finetuning_task task_specific_params prefix
(bos|eos|sep|cls|mask|unk|decoder_start|forced_bos|forced_eos)_token_id
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
repetition_penalty length_penalty (encoder_)?no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
return_dict_in_generate remove_invalid_values exponential_decay_length_penalty (begin_)?suppress_tokens
transformers\\.js_config matryoshka_dimensions add_pooling_layer sentence_transformers
"""
_ENCODER_FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_REFUSED = {"auto_map": OWN_CODE}

BERT = Keys(
    read=_ENCODER_READ
    + """ hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings type_vocab_size layer_norm_eps
hidden_dropout_prob attention_probs_dropout_prob""",
    harmless=_ENCODER_HARMLESS + " directionality pooler_.*",
    fixed={**_ENCODER_FIXED, "hidden_act": ("gelu",), "position_embedding_type": ("absolute",)},
    refused=_REFUSED,
)
T5 = Keys(
    read=_ENCODER_READ
    + """ d_model num_layers num_heads d_kv d_ff relative_attention_num_buckets relative_attention_max_distance feed_forward_proj
dense_act_fn is_gated_act dropout_rate""",
    harmless=_ENCODER_HARMLESS + " num_decoder_layers scale_decoder_outputs scalable_attention n_positions",
    fixed={**_ENCODER_FIXED, "layer_norm_epsilon": (1e-6,)},
    refused=_REFUSED,
)
TOKENIZER = Keys(
    read="model_max_length max_len added_tokens_decoder .*_token (additional|extra)_special_tokens model_specific_special_tokens "
    "model_input_names do_lower_case strip_accents tokenize_chinese_chars add_prefix_space",
    harmless="""
tokenizer_class processor_class backend name_or_path is_local local_files_only trust_remote_code vocab_size
(special_tokens_map|(full_)?tokenizer|vocab|merges)_file
clean_up_tokenization_spaces max_length stride truncation truncation_strategy padding pad_to_multiple_of pad_token_type_id
do_basic_tokenize never_split wordpieces_prefix errors trim_offsets legacy extra_ids use_fast from_slow chat_template
split_special_tokens add_(bos|eos)_token spaces_between_special_tokens
""",
    fixed={
        "truncation_side": ("right", "Right"),
        "padding_side": ("right", "Right"),
        "sp_model_kwargs": ({}, None),
        "init_inputs": ([],),
    },
    refused=_REFUSED,
)

# sentence-transformers
MODULE = Keys(read="type path", harmless="idx name kwargs")
TRANSFORMER = Keys(
    read="max_seq_length do_lower_case (query|document)_length model_(args|kwargs)",
    harmless="unpad_inputs",
    fixed={
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
        "module_output_name": ("token_embeddings",),
        "processing_kwargs": ({}, None),
        "query_expansion": (None,),
        **dict.fromkeys(("tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"), ({}, None)),
    },
)
TRANSFORMER_ARGUMENTS = Keys(
    harmless="attn_implementation (torch_)?dtype add_pooling_layer low_cpu_mem_usage use_safetensors trust_remote_code device_map"
)
POOLING = Keys(
    read="pooling_mode pooling_mode_(cls_token|lasttoken|(max|mean|mean_sqrt_len|weightedmean)_tokens)",
    harmless="(word_)?embedding_dimension",
    fixed={"include_prompt": (True,)},
)
_ON_EMBEDDINGS: Mapping[str, tuple[Any, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
}
DENSE = Keys(
    read="out_features bias activation_function",
    harmless="in_features",
    fixed={**_ON_EMBEDDINGS, "use_residual": (False,)},
)
LAYER_NORM = Keys(harmless="dimension")
NORMALIZE = Keys(fixed=_ON_EMBEDDINGS)
ROUTER = Keys(read="types structure parameters")
ROUTER_PARAMETERS = Keys(harmless="default_route allow_empty_key", fixed={"route_mappings": ({}, None)})
MODEL = Keys(
    read="prompts default_prompt_name",
    harmless="__version__ requirements",
    fixed={
        "model_type": ("SentenceTransformer",),
        "similarity_fn_name": ("cosine", "dot", None),
        "truncate_dim": (None,),
    },
)
