"""A gate of published folders: their settings, with small weights and vocabularies, give sentence-transformers' embeddings.

`published_models.yaml` has the facts. What has no place here is refused with its name.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
import yaml
from interop.test_foreign_tokenizers import save
from often import often
from pretrained_folders import TEXTS, our_embeddings, write, write_tokenizer

from de_jax.interop import any_model
from de_jax.types import InputError

TABLE = yaml.safe_load((Path(__file__).parent / "published_models.yaml").read_text())
MODELS = TABLE["models"]
EQUAL = [name for name, row in MODELS.items() if "refused" not in row]
REFUSED = [name for name, row in MODELS.items() if "refused" in row]
LIKE_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
LIKE_LLAMA = {**LIKE_BERT, "num_key_value_heads": 2}
SIZES = {
    "distilbert": {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
    "t5": {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48},
    **dict.fromkeys(("mistral", "qwen2"), LIKE_LLAMA),
    "qwen3": {**LIKE_LLAMA, "head_dim": 8},
    "gemma3_text": {**LIKE_LLAMA, "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
PLACE = "sentence_transformers.models."


def write_modules(folder, kinds):
    listed = [(kind, kind if "." in kind else f"{PLACE}{kind}") for kind in kinds]
    paths = ["", *(f"{index}_{kind}" for index, (kind, _) in enumerate(listed) if index)]
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": called}
            for index, ((_, called), path) in enumerate(zip(listed, paths, strict=True))
        ],
    )
    return paths


def config_of(row):
    values = TABLE["families"][row["family"]] | row.get("config", {})
    return values | SIZES.get(values["model_type"], LIKE_BERT)


def write_encoder(folder, row):
    """The vocabulary, config.json as it is published but for its sizes, and one layer of weights."""
    if row.get("tokenizer") in ("MPNet", "Roberta"):
        write_tokenizer(folder, "roberta")  # padding is their token 1, unlike that of a trained vocabulary
    else:
        save(folder, row.get("tokenizer", "Bert"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", settings | row.get("settings", {}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    values = config_of(row) | {"vocab_size": len(tokenizer) + 2}
    ids = {name: value for name, value in values.items() if name.endswith("token_id") and isinstance(value, int)}
    values |= {name: tokenizer.pad_token_id for name, value in ids.items() if value > len(tokenizer)}
    write(folder / "config.json", values)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = (transformers.T5EncoderModel if values["model_type"] == "t5" else transformers.AutoModel.from_config)(config).float()
    with torch.no_grad():  # norms of ones and biases of zeros would hide a missing one
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    model.save_pretrained(folder)
    write(folder / "config.json", values | ({"torch_dtype": "float32"} if "torch_dtype" in values else {}))


def write_heads(folder, row):
    kinds = [next(iter(one)) if isinstance(one, dict) else one for one in row.get("then", [])]
    begin = ["StaticEmbedding"] if "static" in row else ["Transformer", "Pooling"]
    paths, width, rng = write_modules(folder, [*begin, *kinds]), 32, np.random.default_rng(0)
    for kind, module, path in zip(kinds, row.get("then", []), paths[len(begin) :], strict=True):
        if kind == "Dense":
            told, dim = module["Dense"], width + 8
            settings = {"in_features": width, "out_features": dim, "bias": told["bias"]}
            write(folder / path / "config.json", settings | {"activation_function": f"torch.nn.modules.{told['activation']}"})
            arrays = {"linear.weight": rng.normal(size=(dim, width)) / 6, "linear.bias": rng.normal(size=dim)}
            width = dim
        elif kind == "LayerNorm":
            write(folder / path / "config.json", {"dimension": width})
            arrays = {"norm.weight": rng.normal(size=width), "norm.bias": rng.normal(size=width)}
        else:
            continue
        kept = {name: array.astype(np.float32) for name, array in arrays.items() if name != "linear.bias" or told["bias"]}
        safetensors.numpy.save_file(kept, folder / path / "model.safetensors")


def write_published(folder, row):
    folder.mkdir()
    if "modules" in row:
        write_modules(folder, row["modules"])
        return
    if "static" in row:
        place = folder / row["path"]
        place.mkdir(exist_ok=True)
        write_tokenizer(place, "bert")
        (place / "tokenizer_config.json").unlink()
        size = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab_size()
        table = np.random.default_rng(0).normal(size=(size, 32)).astype(np.float32)
        safetensors.numpy.save_file({row["static"]: table}, place / "model.safetensors")
    elif "refused" in row:
        save(folder, "Bert")
        write(folder / "config.json", config_of(row) | {"vocab_size": 99})
    else:
        write_encoder(folder, row)
        write(folder / "sentence_bert_config.json", {"max_seq_length": row.get("length"), "do_lower_case": False})
        flags = {f"pooling_mode_{name}": name.startswith(row["pooled"]) for name in ("cls_token", "mean_tokens", "lasttoken")}
        told = {"word_embedding_dimension": 32, **flags, "include_prompt": row.get("include_prompt", True)}
        write(folder / "1_Pooling" / "config.json", told)
    write_heads(folder, row)
    if "static" in row:
        modules = json.loads((folder / "modules.json").read_text())
        write(folder / "modules.json", [modules[0] | {"path": row["path"]}, *modules[1:]])
    values = {"prompts": row.get("prompts", {}), "default_prompt_name": None, "similarity_fn_name": row.get("score", "cosine")}
    write(folder / "config_sentence_transformers.json", values)


OFTEN = (
    "paraphrase-multilingual-MiniLM-L12-v2",
    "hkunlp/instructor-large",
    "minishlab/potion-base-8M",
    "moka-ai/m3e-small",
)


@pytest.mark.parametrize("name", often(EQUAL, *OFTEN))
def test_a_published_model_gives_the_embeddings_of_sentence_transformers(tmp_path, name):
    library = pytest.importorskip("sentence_transformers")
    write_published(tmp_path / "model", MODELS[name])
    peer = library.SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    ours = any_model.read(tmp_path / "model")
    options = {"normalize_embeddings": ours.model.doc.normalize}  # also without such a module, where scores are cosines
    for tower, encode in (("query", peer.encode_query), ("doc", peer.encode_document)):
        side = getattr(ours, tower)
        ours = ours._replace(**{tower: side._replace(max_length=min(side.max_length, 256))})  # as long as the texts
        np.testing.assert_allclose(our_embeddings(ours, TEXTS, tower), encode(TEXTS, **options), atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_model_without_a_place_is_refused_by_name(tmp_path, name):
    write_published(tmp_path / "model", MODELS[name])
    with pytest.raises(InputError, match=MODELS[name]["refused"]) as error:
        any_model.read(tmp_path / "model", only_sizes=True)
    assert str(tmp_path / "model") in str(error.value)


def test_the_facts_are_of_sixty_models_and_say_where_they_are_from():
    assert len(MODELS) >= 60
    assert {row["source"] for row in MODELS.values()} == {"files", "card"}
