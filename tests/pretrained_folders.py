"""Folders as transformers and sentence-transformers write them, of tiny random models, and what torch makes of texts."""

import functools
import json

import jax
import numpy as np
import tokenizers
import torch
import transformers

WORDS = ("hello", "world", "a", "dense", "retrieval", "of", "texts", "query", "passage", ":")
TEXTS = ["hello world", "a dense retrieval of texts " * 7, "a", "passage of of of unknown dense"]
T5_KINDS = ("t5", "mt5", "umt5")
MAX_LENGTH = 16  # tokens, of what sentence-transformers embeds
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPECIALS = {  # in the order of their ids: padding is 0 in BERT and T5 and 1 in RoBERTa
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>"),
    "t5": ("<pad>", "</s>", "<unk>"),
}
TEMPLATES = {"bert": "[CLS] $A [SEP]", "roberta": "<s> $A </s>", "t5": "$A </s>"}


def write_tokenizer(folder, kind, pad_id=None):
    """pad_id: where padding stands in the vocabulary; by default where the kind has it."""
    specials = SPECIALS[kind]
    pad = next(piece for piece in specials if "pad" in piece.lower())
    pieces = [piece for piece in (*specials, *WORDS) if piece != pad]
    pieces.insert(specials.index(pad) if pad_id is None else pad_id, pad)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    unknown = next(piece for piece in specials if "unk" in piece.lower())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=unknown))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(specials))
    named = [(piece, index) for piece, index in vocab.items() if piece in TEMPLATES[kind].split()]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=TEMPLATES[kind], special_tokens=named)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "unk_token": unknown}  # no other reads a WordLevel
    write(folder / "tokenizer_config.json", config)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown)


def torch_model(kind, *, gated=True, whole=False, seed=0, pad_id=None):
    torch.manual_seed(seed)
    vocab_size = len(SPECIALS["t5" if kind in T5_KINDS else kind]) + len(WORDS) + 3  # tables are often larger than vocabularies
    if kind in T5_KINDS:
        sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48, "vocab_size": vocab_size}
        config_of, model_of, whole_of = {
            "t5": (transformers.T5Config, transformers.T5EncoderModel, transformers.T5ForConditionalGeneration),
            "umt5": (transformers.UMT5Config, transformers.UMT5EncoderModel, transformers.UMT5ForConditionalGeneration),
            "mt5": (transformers.MT5Config, transformers.MT5EncoderModel, transformers.MT5ForConditionalGeneration),
        }[kind]
        sizes["pad_token_id"] = pad_id or 0
        config = config_of(**sizes, feed_forward_proj="gated-gelu" if gated else "relu", decoder_start_token_id=0)
        model = (whole_of if whole else model_of)(config)
    elif kind == "bert":
        config = transformers.BertConfig(**SIZES, vocab_size=vocab_size, max_position_embeddings=48)
        model = (transformers.BertForPreTraining if whole else transformers.BertModel)(config)
    else:
        config = transformers.RobertaConfig(**SIZES, vocab_size=vocab_size, max_position_embeddings=50)
        config.pad_token_id = 1 if pad_id is None else pad_id
        model = (transformers.RobertaForMaskedLM if whole else transformers.RobertaModel)(config)
    with torch.no_grad():  # norms of ones and biases of zeros would hide a missing one
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model.eval()


def write_encoder(folder, kind, *, max_shard_size="1GB", pad_id=None, **options):
    """Writes a folder as transformers does; gives a function from texts and a length to hidden vectors and the mask."""
    folder.mkdir(parents=True, exist_ok=True)
    model = torch_model(kind, pad_id=pad_id, **options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = write_tokenizer(folder, "t5" if kind in T5_KINDS else kind, pad_id)
    encoder = model.get_encoder() if kind in T5_KINDS else getattr(model, kind, model)

    def hidden(texts, max_length):
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            states = encoder(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
        return states.numpy(), tokens["attention_mask"].numpy().astype(bool)

    return hidden


def mean_of(hidden, mask):
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def write_sentence_transformer(folder, kind, *, pooling="mean", dense=None, normalize=True, prompts=None, **options):
    """Writes a folder as sentence-transformers does; gives a function from texts to embeddings.

    dense: None, or whether the linear head has a bias.
    """
    hidden = write_encoder(folder, kind, **options)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense is not None else []), *(["Normalize"] if normalize else [])]
    paths = ["", *(f"{index}_{name}" for index, name in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(folder / "modules.json", modules)
    write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    scored = {} if normalize else {"similarity_fn_name": "dot"}
    write(folder / "config_sentence_transformers.json", {"__version__": {}, **scored, **(prompts or {})})
    flags = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")}
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **flags})
    head = torch.nn.Linear(32, 24, bias=bool(dense))
    if dense is not None:
        activation = "torch.nn.modules.linear.Identity"
        settings = {"in_features": 32, "out_features": 24, "bias": dense, "activation_function": activation}
        write(folder / "2_Dense" / "config.json", settings)
        import safetensors.torch

        weights = {f"linear.{name}": value.detach() for name, value in head.state_dict().items()}
        safetensors.torch.save_file(weights, str(folder / "2_Dense" / "model.safetensors"))

    def embed(texts):
        states, mask = hidden(texts, MAX_LENGTH)
        vectors = states[:, 0] if pooling == "cls" else mean_of(states, mask)
        if dense is not None:
            vectors = head(torch.tensor(vectors, dtype=torch.float32)).detach().numpy()
        return unit(vectors) if normalize else vectors

    return embed


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def our_embeddings(pretrained, texts, tower="doc"):
    """Through the model itself: tokenized, cut to its length and padded."""
    side = pretrained.side(tower)
    tokenizer, max_length = side.tokenizer, side.max_length
    room = max_length - len(tokenizer.prefix_ids) - len(tokenizer.suffix_ids)
    tokens = np.zeros((len(texts), max_length), np.int32)
    for row, ids in zip(tokens, tokenizer.encode(texts), strict=True):
        whole = [*tokenizer.prefix_ids, *ids[:room], *tokenizer.suffix_ids]
        row[: len(whole)] = whole
    return np.asarray(_encode(pretrained.model, tower, pretrained.params, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(model, tower, params, tokens):
    return getattr(model, f"encode_{tower}")(params, tokens)
