"""Opens any model: a run of this library, or a checkpoint of another library, recognised by the files in the folder.

run.json            a run of this library
generator.json      a T5 of this library, pretrained or trained as a generator of queries
language_model.json a BERT that this library pretrained
modules.json        sentence-transformers
config.json         Hugging Face's transformers
adapter_config.json peft's LoRA, merged into the model that it names
model.json          `export_model --format=safetensors`
checkpoint, state/  T5X
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from de_jax.files import buckets, mirrors, outputs
from de_jax.files.reading import is_there
from de_jax.interop import (
    foreign_tokenizers,
    hub,
    huggingface,
    language_models,
    peft_adapters,
    safetensors_model,
    sentence_transformers,
    t5x,
)
from de_jax.interop.foreign_tokenizers import SpecialTokens
from de_jax.interop.pretrained import Pretrained, PretrainedSide
from de_jax.training.run.run_folder import RUN, load_run
from de_jax.types import InputError

HUB_FILES = ("*.safetensors", "*.json", *(name for name in foreign_tokenizers.VOCABULARY_FILES if not name.endswith(".json")))
HUB_FILES_LEFT_OUT = ("onnx/*", "openvino/*")
ORGANIZATION = "sentence-transformers"
"""Whose a model of the hub is that is named without one."""
WITHOUT_ORGANIZATION = (
    r"bert-(base|large)-(un)?cased|bert-base-(chinese|multilingual-(un)?cased)|distilbert-base-((un|multilingual-)?cased)"
    r"|distilroberta-base|(xlm-)?roberta-(base|large)|camembert-base|t5-(small|base|large|3b|11b)"
)
"""Models of the hub that have none; those of architectures that can be read."""


def read(
    source: str | Path,
    *,
    ignored: Sequence[str] = (),
    only_sizes: bool = False,
    pooling: str | None = None,
    special_tokens: SpecialTokens = "text",
) -> Pretrained:
    """The model in a folder, or under a name of the Hugging Face hub such as "google/t5-v1_1-base".

    Args:
        source: a folder as above; a name that is no folder is fetched, where there is a network.
        ignored: regular expressions of arrays that may be left over; not for runs, which have none.
        only_sizes: `params` are shapes; weights are read only where nothing else tells the sizes (T5X).
        pooling: "mean", "cls" or "lasttoken", for an encoder of Hugging Face or a language model; the other formats say it.
        special_tokens: of a tokenizer of Hugging Face or sentence-transformers, see `foreign_tokenizers.read`.

    Raises:
        InputError: an unknown format, or the errors of the format's own `read`.
    """
    folder = folder_of(source)
    if peft_adapters.is_in(folder):
        base_folder = folder_of(peft_adapters.base_of(folder))
        if not is_there(base_folder / huggingface.CONFIG_FILE):
            raise InputError(f"{folder} is for {base_folder}, which holds no {huggingface.CONFIG_FILE} of transformers.")
        base = read(base_folder, ignored=ignored, only_sizes=only_sizes, pooling=pooling, special_tokens=special_tokens)
        return peft_adapters.merged(folder, base_folder, base, huggingface.open_encoder(base_folder), only_sizes=only_sizes)
    if _is_bare_encoder(folder):
        if pooling is None and is_there(folder / sentence_transformers.PROMPTS_FILE):
            raise InputError(
                f"{folder} holds {sentence_transformers.PROMPTS_FILE} but not {sentence_transformers.MODULES_FILE}, which says how "
                "texts are embedded; copy it again."
            )
        return huggingface.read(folder, ignored=ignored, only_sizes=only_sizes, pooling=pooling, special_tokens=special_tokens)
    if language_models.recognises(folder):
        return language_models.read(folder, only_sizes=only_sizes, pooling=pooling)
    if pooling is not None:
        raise InputError(f"{source} specifies its own pooling; leave pooling={pooling} out.")
    if is_run(folder):
        run = load_run(folder, only_sizes=only_sizes)
        query, doc = (
            PretrainedSide(side.tokenizer, side.max_length, max_passages=side.max_passages) for side in (run.query, run.doc)
        )
        return Pretrained(run.model, run.params, query, doc)
    if is_there(folder / sentence_transformers.MODULES_FILE):
        return sentence_transformers.read(folder, ignored=ignored, only_sizes=only_sizes, special_tokens=special_tokens)
    if is_there(folder / safetensors_model.MODEL_FOLDER.file):
        return safetensors_model.read(folder, ignored=ignored, only_sizes=only_sizes)
    if t5x.recognises(folder):
        return t5x.read(folder, ignored=ignored)
    raise InputError(
        f"{folder} holds no known model: neither {RUN.file} (a run), {language_models.GENERATOR_RUN.file} or "
        f"{language_models.MASKED_LM_RUN.file} (a language model), {sentence_transformers.MODULES_FILE} "
        f"(sentence-transformers), {huggingface.CONFIG_FILE} (Hugging Face), {peft_adapters.CONFIG_FILE} (peft), "
        f"{safetensors_model.MODEL_FOLDER.file} nor a checkpoint of T5X."
    )


def _is_bare_encoder(folder: Path) -> bool:
    told_by_others = (RUN.file, sentence_transformers.MODULES_FILE)
    return is_there(folder / huggingface.CONFIG_FILE) and not any(is_there(folder / name) for name in told_by_others)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of this library."""
    return is_there(folder / RUN.file)


def folder_of(source: str | Path) -> Path:
    """The folder itself, or where the hub's files of that name lie after they were fetched.

    A name without a slash is one of sentence-transformers' own models, as it is there, or one of `WITHOUT_ORGANIZATION`.

    Raises:
        InputError: neither.
    """
    source = mirrors.local(source) if buckets.is_bucket(source) or outputs.is_in_home(source) else source
    if Path(source).is_dir():
        return Path(source)
    name = hub_name(source)
    if Path(source).exists() or name is None:
        raise InputError(f"{source} is not a folder; give a run, a folder with a model, or a name of the Hugging Face hub.")
    try:
        import huggingface_hub

        fetched = huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_FILES_LEFT_OUT))
    except Exception as error:  # the package's own errors, httpx's and the system's have no common base
        raise InputError(
            f"{source} is not a folder here, and the Hugging Face hub does not give {name} ({hub.reason(error)}); give a "
            "folder with the model."
        ) from None
    return Path(fetched)


def hub_name(source: str | Path) -> str | None:
    """The whole name on the hub that a source which is no folder stands for; None for a path.

    Example:
        >>> hub_name("all-MiniLM-L6-v2"), hub_name("bert-base-uncased"), hub_name("models/minilm/best")
        ('sentence-transformers/all-MiniLM-L6-v2', 'bert-base-uncased', None)
    """
    name = str(source)
    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name):
        return None
    return name if "/" in name or re.fullmatch(WITHOUT_ORGANIZATION, name) else f"{ORGANIZATION}/{name}"
