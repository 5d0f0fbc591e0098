"""The settings that configuration files of transformers and sentence-transformers may hold; each is accounted for.

A setting is read, or harmless because no embedding depends on it, or it must say in so many words how a tower works anyway. Any
other is refused by name. There is one table for each kind of file; those of encoders are in
`architectures`.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.types import InputError

_READ_BY_ALL = ("configuration_utils.py", "modeling_utils.py", "masking_utils.py", "modeling_rope_utils.py")
"""Code of transformers that models of all types may use."""
OWN_CODE = "asks for code of the model's own, which is never run"


class Keys(NamedTuple):
    """The settings of one kind of file; names in `read` and `harmless` are regular expressions parted by blanks."""

    read: str = ""  # by the importer, which checks the values
    harmless: str = ""
    fixed: Mapping[str, tuple[Any, ...]] = {}  # the values that change nothing
    refused: Mapping[str, str] = {}  # with the reason
    hints: Mapping[str, str] = {}  # beside another value than those in `fixed`


def account(file: Path, values: Mapping[str, Any], keys: Keys, *, model_type: str | None = None) -> tuple[str, ...]:
    """Checks that nothing in a file is skipped in silence; returns sentences about what transformers skips as well.

    Args:
        file: for messages.
        values: its JSON object, or a part of it.
        keys: the table of this kind of file.
        model_type: of a config.json; a setting that is unknown here is left out if transformers ignores it for this type.

    Raises:
        InputError: a setting that has no place here, by name.
    """
    known = re.compile("|".join([*keys.read.split(), *keys.harmless.split()]))
    ignored = []
    for name, value in values.items():
        if name in keys.refused and value:
            raise InputError(f"{file}: {name} {keys.refused[name]}.")
        if name in keys.fixed and value not in keys.fixed[name]:
            allowed = " or ".join(map(repr, keys.fixed[name]))
            hint = f"; {keys.hints[name]}" if name in keys.hints else ""
            raise InputError(f"{file}: {name} is {reprlib.repr(value)}; the towers here have {allowed}{hint}.")
        if name not in keys.fixed and name not in keys.refused and not known.fullmatch(name):
            if model_type is None or _is_read(model_type, name, value):
                raise InputError(
                    f"{file}: the setting {name} ({reprlib.repr(value)}) is unknown here; remove it if no embedding depends on it."
                )
            ignored.append(name)
    return (f"{file}: {', '.join(ignored)} left out, as transformers ignores it for {model_type}",) if ignored else ()


def _is_read(model_type: str, name: str, value: Any) -> bool:
    """Whether transformers' model of a type depends on a setting: not if it has the default value, or no code there names it."""
    try:
        import transformers
    except ImportError:
        return True
    if model_type not in transformers.CONFIG_MAPPING:
        return True
    default = transformers.CONFIG_MAPPING[model_type]()
    if hasattr(default, name):
        return bool(getattr(default, name) != value)
    of_all = Path(transformers.__file__).parent
    files = [*Path(inspect.getfile(type(default))).parent.glob("*.py"), *(of_all / name for name in _READ_BY_ALL)]
    return any(re.search(rf"\b{re.escape(name)}\b", file.read_text(encoding="utf-8")) for file in files if file.is_file())


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
