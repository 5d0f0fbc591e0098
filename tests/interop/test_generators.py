"""T5 with a decoder against transformers: names, logits and losses of the same folder."""

import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from pretrained_folders import SPECIALS, WORDS, write_tokenizer

from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.interop import generators
from de_jax.interop.architectures.t5 import generator_origins
from de_jax.interop.pretrained import assemble
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.types import Batch, InputError

VOCAB_SIZE = len(SPECIALS["t5"]) + len(WORDS) + 3
KINDS = {"1.0": ("relu", True), "1.1": ("gated-gelu", False)}


def write_generator(folder, kind, seed=0):
    """Writes a folder as transformers does; gives the torch model."""
    activation, is_tied = KINDS[kind]
    torch.manual_seed(seed)
    config = transformers.T5Config(
        d_model=32,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        d_kv=8,
        d_ff=48,
        vocab_size=VOCAB_SIZE,
        feed_forward_proj=activation,
        decoder_start_token_id=0,
        tie_word_embeddings=is_tied,
    )
    model = transformers.T5ForConditionalGeneration(config)
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, 32))
    with torch.no_grad():  # norms of ones would hide a missing one
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    folder.mkdir(parents=True)
    if not is_tied:
        model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    write_tokenizer(folder, "t5")
    return model.eval()


def random_tokens(lengths, longest, seed):
    rng = np.random.default_rng(seed)
    rows = np.zeros((len(lengths), longest), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = [*rng.integers(3, VOCAB_SIZE, length - 1), 1]
    return rows


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generators") / request.param
    return folder, write_generator(folder, request.param)


def torch_outputs(model, docs, queries):
    labels = torch.tensor(np.where(queries == 0, -100, queries), dtype=torch.long)
    with torch.no_grad():
        return model(input_ids=torch.tensor(docs), attention_mask=torch.tensor(docs != 0), labels=labels)


def test_logits_and_loss_are_those_of_transformers(pair):
    folder, theirs = pair
    model, params, _, _ = generators.read_transformers(folder)
    docs, queries = random_tokens([40, 7, 20], 40, 0), random_tokens([12, 3, 7], 12, 1)
    expected = torch_outputs(theirs, docs, queries)
    mask = queries != 0
    actual = np.asarray(jax.jit(model.logits)(params, docs, queries))
    scale = np.abs(expected.logits.numpy()[mask]).max()
    np.testing.assert_allclose(actual[mask] / scale, expected.logits.numpy()[mask] / scale, atol=1e-5)
    batch = Batch(query=queries, doc=docs, query_id=np.arange(3), doc_id=np.arange(3))
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch)[0], float(expected.loss), rtol=1e-4)


@pytest.mark.soak
def test_logits_with_a_position_bias_of_each_layer_are_those_of_umt5():
    torch.manual_seed(0)
    sizes = {
        "d_model": 32,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 48,
        "vocab_size": VOCAB_SIZE,
    }
    theirs = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**sizes, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    config = T5Config(VOCAB_SIZE, 32, 2, 4, 8, 48, bias_per_layer=True, dtype="float32")
    model = Generator(config, 3, tied_logits=True)
    weights = {name: functools.partial(np.asarray, value) for name, value in theirs.state_dict().items()}
    weights = {name: read for name, read in weights.items() if "embed_tokens" not in name and name != "lm_head.weight"}
    like = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    params = assemble("torch", weights, generator_origins(model), like)
    docs, queries = random_tokens([40, 7, 20], 40, 0), random_tokens([32, 3, 7], 32, 1)
    expected, mask = torch_outputs(theirs, docs, queries).logits.numpy(), queries != 0
    actual, scale = np.asarray(jax.jit(model.logits)(params, docs, queries)), np.abs(expected[mask]).max()
    np.testing.assert_allclose(actual[mask] / scale, expected[mask] / scale, atol=1e-5)


def rewritten(folder, out, change=lambda weights: weights, **config):
    out.mkdir()
    weights = change(safetensors.numpy.load_file(folder / "model.safetensors"))
    safetensors.numpy.save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**values, **config}))
    return out


QUERY = "decoder.block.1.layer.1.EncDecAttention.q.weight"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda w: {n: a for n, a in w.items() if n != QUERY}, {}, f"lacks 1 arrays that the model needs: {QUERY}"),
        (lambda w: {**w, "decoder.extra": np.ones(2, np.float32)}, {}, "no place for: decoder.extra"),
        (lambda w: {n: a for n, a in w.items() if n != "shared.weight"}, {}, "needs: shared.weight"),
        (
            lambda w: {**w, "decoder.embed_tokens.weight": w["shared.weight"] + 1},
            {},
            "embed_tokens.weight differs from shared.weight",
        ),
        (lambda w: w, {"model_type": "umt5"}, "model_type 'umt5' is no generator here"),
        (lambda w: w, {"num_decoder_layers": 4}, "lacks 14 arrays|lacks 13 arrays"),
        (lambda w: w, {"num_decoder_layers": "two"}, "num_decoder_layers is 'two'"),
    ],
)
def test_folder_that_does_not_fit_is_refused(pair, tmp_path, change, config, message):
    with pytest.raises(InputError, match=message):
        generators.read_transformers(rewritten(pair[0], tmp_path / "changed", change, **config))


def test_a_step_of_what_is_no_run_is_refused(pair):
    with pytest.raises(InputError, match=r"step is 'best', but .* is no run and has one set of weights"):
        generators.read(pair[0], step="best")


def test_copies_that_older_folders_hold_are_left_out(pair, tmp_path):
    def older(weights):
        table = weights["shared.weight"]
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        copies = {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table, unused: np.ones((32, 4), np.float32)}
        return {"lm_head.weight": table, **copies, **weights}

    expected = generators.read_transformers(pair[0])
    assert generators.read_transformers(rewritten(pair[0], tmp_path / "older", older))[0] == expected[0]


def test_a_folder_is_a_generator_with_its_own_vocabulary(pair, tmp_path):
    found = generators.read(pair[0])
    assert found.model == generators.read_transformers(pair[0])[0]
    assert found.tokenizer.vocab_size == load_tokenizer(pair[0]).vocab_size
    bare = rewritten(pair[0], tmp_path / "bare")
    with pytest.raises(InputError, match="holds no vocabulary; give --tokenizer"):
        generators.read(bare)
    assert generators.read(bare, tokenizer=found.tokenizer).max_query_length == 64
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other", "bert")
    with pytest.raises(InputError, match=r"the tokenizer of --tokenizer makes other tokens of .* than the model that the weights"):
        generators.read(pair[0], tokenizer=load_tokenizer(tmp_path / "other" / "tokenizer.json"))
    assert generators.read(pair[0], tokenizer=found.tokenizer).tokenizer == found.tokenizer
    with pytest.raises(InputError, match=r"holds no generator: neither generator\.json"):
        generators.read(tmp_path)
