"""Folders of sentence-transformers: an encoder, pooling, a linear head and prompts; sentence-transformers is not needed.

modules.json                       Transformer, Pooling, Dense, LayerNorm and Normalize with their folders, in this order
sentence_bert_config.json          the longest text, or query and document (in the Transformer's folder)
config_sentence_transformers.json  prompts for queries and documents
1_Pooling/config.json, 2_Dense/{config.json, model.safetensors}
router_config.json                 which modules are the query's and which the document's, where a Router comes first
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from de_jax.data.files import read_json
from de_jax.data.text import PromptedTokenizer, Tokenizer
from de_jax.interop import huggingface
from de_jax.interop.pretrained import Origin, Pretrained, paired
from de_jax.interop.safetensors_files import stored_arrays
from de_jax.models.tower import TowerConfig
from de_jax.types import InputError

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
ROUTER_FILE = "router_config.json"
ROUTES = {"query": "query", "doc": "document"}
KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
PROMPT_NAMES = {"query": ("query",), "doc": ("document", "passage", "corpus")}
"""Which prompt a text gets, the first that there is; else the default one."""
POOLING = {"mean": "mean", "cls": "first"}
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


def read(folder: str | Path, *, ignored: Sequence[str] = (), only_sizes: bool = False) -> Pretrained:
    """A model of sentence-transformers; its prompts are in the tokenizers.

    It is a symmetric dual encoder, or one that shares nothing where a Router sends queries and documents to modules of their own.

    Args:
        folder: as `SentenceTransformer.save_pretrained` writes it.
        ignored, only_sizes: as of `huggingface.read`.

    Raises:
        InputError: a module that there is no place for, or as of `huggingface.read`.
    """
    folder = Path(folder)
    query, doc = _modules(folder)
    towers = [_read_tower(folder, modules, ignored, only_sizes) for modules in ([query] if query == doc else [query, doc])]
    pretrained = paired(*towers) if len(towers) > 1 else towers[0]
    return pretrained._replace(
        query_tokenizer=_with_prompt(folder / PROMPTS_FILE, pretrained.query_tokenizer, "query"),
        doc_tokenizer=_with_prompt(folder / PROMPTS_FILE, pretrained.doc_tokenizer, "doc"),
    )


def _read_tower(folder: Path, modules: dict[str, Path], ignored: Sequence[str], only_sizes: bool) -> Pretrained:
    """The modules of one route as a symmetric dual encoder."""
    encoder = huggingface.open_encoder(modules["Transformer"])
    if encoder.tokenizer is None:
        raise InputError(
            f"{modules['Transformer']} holds no tokenizer.json; write one with transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    settings: dict[str, Any] = {"projection_dim": None, "projection_norm": "LayerNorm" in modules}
    if "Dense" in modules:
        settings |= _dense_settings(modules["Dense"])
    for folder_of_head in (modules[kind] for kind in ("Dense", "LayerNorm") if kind in modules):
        arrays = {f"{folder_of_head.name}/{name}": read for name, read in stored_arrays(folder_of_head).items()}
        encoder = encoder._replace(stored=encoder.stored | arrays)
    encoder = encoder._replace(origins=encoder.origins | _head_origins(modules, settings))
    pooling = _pooling(modules["Pooling"] / "config.json")
    tower = TowerConfig(encoder.config, pooling=pooling, normalize="Normalize" in modules, **settings)  # type: ignore[arg-type]
    lengths = modules["Transformer"] / LENGTH_FILE
    return huggingface.pretrained(str(folder), encoder, tower, ignored, only_sizes)._replace(
        max_query_length=_max_length(lengths, "query_length", encoder),
        max_doc_length=_max_length(lengths, "document_length", encoder),
    )


def _modules(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """The folders of a query's modules and of a document's, by class."""
    file = folder / MODULES_FILE
    try:
        listed = [(str(module["type"]).rpartition(".")[2], folder / str(module["path"])) for module in read_json(file)]
    except (TypeError, KeyError):
        raise InputError(f"{file} is no list of modules with a type and a path; copy it again.") from None
    if [kind for kind, _ in listed[:1]] == ["Router"]:
        router = listed[0][1]
        query, doc = (_in_order(router / ROUTER_FILE, [*_route(router, route), *listed[1:]]) for route in ROUTES.values())
        return query, doc
    return _in_order(file, listed), _in_order(file, listed)


def _route(router: Path, route: str) -> list[tuple[str, Path]]:
    values = _object(router / ROUTER_FILE)
    try:
        return [(str(values["types"][name]).rpartition(".")[2], router / name) for name in values["structure"][route]]
    except (TypeError, KeyError):
        raise InputError(
            f"{router / ROUTER_FILE} gives no types and structure of the route {route!r}; a model of two towers has the routes "
            f"{' and '.join(map(repr, ROUTES.values()))}."
        ) from None


def _in_order(file: Path, modules: list[tuple[str, Path]]) -> dict[str, Path]:
    kinds = [kind for kind, _ in modules]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"{file}: the module {unknown[0]!r} has no place in a tower; there are {', '.join(KINDS)}.")
    if kinds != [kind for kind in KINDS if kind in kinds] or kinds[:2] != ["Transformer", "Pooling"]:
        raise InputError(
            f"{file} lists {', '.join(kinds) or 'nothing'}; a tower is Transformer, Pooling, at most one of each of the others."
        )
    return dict(modules)


def _pooling(file: Path) -> str:
    values = _object(file)
    flags = [
        name.removeprefix("pooling_mode_") for name, value in values.items() if name.startswith("pooling_mode_") and value is True
    ]
    modes = (
        [values["pooling_mode"]]
        if "pooling_mode" in values
        else [flag.removesuffix("_tokens").removesuffix("_token") for flag in flags]
    )
    if len(modes) != 1 or modes[0] not in POOLING:
        raise InputError(
            f"{file} asks for the pooling {' and '.join(map(str, modes)) or 'none'}; a tower has {' or '.join(POOLING)}."
        )
    if values.get("include_prompt", True) is not True:
        raise InputError(f"{file} leaves the prompt out of the pooling; a tower pools all tokens.")
    return POOLING[modes[0]]


def _dense_settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    values = _object(file)
    activation, dim, bias = values.get("activation_function", TANH), values.get("out_features"), values.get("bias", True)
    if activation != IDENTITY:
        raise InputError(f"{file}: the activation {activation} has no place in a tower, whose projection is linear.")
    if not isinstance(dim, int) or dim < 1 or not isinstance(bias, bool):
        raise InputError(
            f"{file}: out_features is {dim!r} and bias {bias!r}; they must be a positive whole number and true or false."
        )
    return {"projection_dim": dim, "projection_bias": bias}


def _head_origins(modules: dict[str, Path], settings: dict[str, Any]) -> dict[str, Origin]:
    origins = {}
    if "Dense" in modules:
        origins["projection/kernel"] = Origin(f"{modules['Dense'].name}/linear.weight", transposed=True)
    if settings.get("projection_bias"):
        origins["projection/bias"] = Origin(f"{modules['Dense'].name}/linear.bias")
    if "LayerNorm" in modules:
        origins["projection/norm/scale"] = Origin(f"{modules['LayerNorm'].name}/norm.weight")
        origins["projection/norm/bias"] = Origin(f"{modules['LayerNorm'].name}/norm.bias")
    return origins


def _max_length(file: Path, own_name: str, encoder: huggingface.EncoderFolder) -> int:
    values = _object(file) if file.is_file() else {}
    if values.get("do_lower_case") and encoder.tokenizer and not _is_uncased(encoder.tokenizer):
        raise InputError(
            f"{file} asks for lower case, which the vocabulary does not bring about; add it to tokenizer.json's normalizer."
        )
    name = own_name if values.get(own_name) is not None else "max_seq_length"
    length, longest = values.get(name), encoder.config.max_length
    if length is None:
        return encoder.max_length
    if not isinstance(length, int) or length < 1 or (longest is not None and length > longest):
        most = "" if longest is None else f" of at most {longest}, the positions that there are"
        raise InputError(f"{file}: {name} is {length!r}; it must be a positive whole number{most}.")
    return length


def _is_uncased(tokenizer: Tokenizer) -> bool:
    upper, lower = tokenizer.encode(["Abc XYZ", "abc xyz"])
    return upper.tolist() == lower.tolist()


def _with_prompt(file: Path, tokenizer: Tokenizer | None, tower: str) -> Tokenizer | None:
    values = _object(file) if file.is_file() else {}
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise InputError(f"{file}: prompts is {prompts!r}; it must be an object of texts by name.")
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise InputError(
            f"{file}: default_prompt_name is {default!r}, but the prompts are {', '.join(map(repr, prompts)) or 'none'}."
        )
    name = next((name for name in PROMPT_NAMES[tower] if name in prompts), default)
    return PromptedTokenizer(tokenizer, prompts[name]) if tokenizer and name is not None and prompts[name] else tokenizer


def _object(file: Path) -> dict[str, Any]:
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file} is no JSON object; copy it again.")
    return values
