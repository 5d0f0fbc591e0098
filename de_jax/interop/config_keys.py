"""The settings that configuration files of transformers and sentence-transformers may hold; each is accounted for.

A setting is read, or harmless because no embedding depends on it, or it must say in so many words how a tower works anyway. Any
other is refused by name. There is one table for each kind of file; those of encoders are in
`architectures`.
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
    hints: Mapping[str, str] = {}  # beside another value than those in `fixed`


def account(file: Path, values: Mapping[str, Any], keys: Keys) -> None:
    """Checks that nothing in a file is skipped in silence.

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
            hint = f"; {keys.hints[name]}" if name in keys.hints else ""
            raise InputError(f"{file}: {name} is {reprlib.repr(value)}; the towers here have {allowed}{hint}.")
        if name not in keys.fixed and name not in keys.refused and not known.fullmatch(name):
            raise InputError(
                f"{file}: the setting {name} ({reprlib.repr(value)}) is unknown here; remove it if no embedding depends on it."
            )


TOKENIZER = Keys(
    read="model_max_length max_len added_tokens_decoder .*_token (additional|extra)_special_tokens model_specific_special_tokens "
    "model_input_names do_lower_case strip_accents tokenize_chinese_chars add_prefix_space",
    harmless="""
tokenizer_class processor_class backend name_or_path is_local local_files_only trust_remote_code vocab_size
(special_tokens_map|(full_)?tokenizer|vocab|merges)_file
clean_up_tokenization_spaces max_length stride truncation truncation_strategy padding pad_to_multiple_of pad_token_type_id
do_basic_tokenize never_split wordpieces_prefix errors trim_offsets legacy extra_ids use_fast from_slow chat_template
split_special_tokens use_default_system_prompt add_(bos|eos)_token spaces_between_special_tokens unk_id
""",
    fixed={
        "truncation_side": ("right", "Right"),
        "padding_side": ("right", "Right", "left", "Left"),  # see `huggingface.open_encoder`
        "sp_model_kwargs": ({}, None),
        "init_inputs": ([],),
    },
    refused={"auto_map": OWN_CODE},
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
    hints={"modality_config": "with 'message', every text is put into the chat template, and with 'text' alone none is"},
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
    hints={"truncate_dim": "remove it, and give truncate_dim to de_jax.load, or truncate embeddings later"},
)
