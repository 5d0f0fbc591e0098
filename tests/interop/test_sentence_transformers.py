"""The shapes of published sentence-transformers folders, against torch; what has no place in a tower is refused by name."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import scipy.stats
import tokenizers
import torch
from often import often
from pretrained_folders import TEXTS, WORDS, our_embeddings, unit, write, write_sentence_transformer, write_tokenizer

import de_jax
from de_jax.interop import any_model, sentence_transformers
from de_jax.models.tower import PARTS
from de_jax.types import InputError

SHAPES = {
    "minilm": {"kind": "bert"},
    "bge": {"kind": "bert", "pooling": "cls", "prompts": {"prompts": {"query": "dense retrieval : "}}},
    "e5": {"kind": "bert", "prompts": {"prompts": {"query": "query : ", "passage": "passage : "}}},
    "multilingual e5": {"kind": "roberta", "prompts": {"prompts": {"query": "query : ", "passage": "passage : "}}},
    "gtr": {"kind": "t5", "gated": False, "dense": False},
    "sentence-t5": {"kind": "t5", "gated": False, "dense": False},
    "dense with bias": {"kind": "bert", "dense": True, "normalize": False},
}
PROMPTS = {"bge": ("dense retrieval : ", ""), "e5": ("query : ", "passage : "), "multilingual e5": ("query : ", "passage : ")}


@pytest.mark.parametrize("name", SHAPES)
def test_embeddings_of_queries_and_documents_equal_torch(tmp_path, name):
    embed = write_sentence_transformer(tmp_path / "model", **SHAPES[name])
    pretrained = sentence_transformers.read(tmp_path / "model")
    assert pretrained.model.shared == PARTS
    assert (pretrained.query.max_length, pretrained.doc.max_length) == (16, 16)
    for tower, prompt in zip(("query", "doc"), PROMPTS.get(name, ("", "")), strict=True):
        expected = embed([prompt + text for text in TEXTS])
        np.testing.assert_allclose(our_embeddings(pretrained, TEXTS, tower), expected, atol=1e-5)


@pytest.fixture(scope="module")
def dense_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    write_sentence_transformer(folder, "bert", dense=True)
    return folder


@pytest.mark.parametrize(
    ("values", "prompts"),
    [
        ({}, (None, None)),
        ({"prompts": {"query": "", "document": ""}, "default_prompt_name": None}, (None, None)),
        ({"prompts": {"query": "q: ", "document": "d: ", "passage": "p: "}}, ("q: ", "d: ")),
        ({"prompts": {"all": "a: "}, "default_prompt_name": "all"}, ("a: ", "a: ")),
        ({"prompts": {"all": "a: ", "query": ""}, "default_prompt_name": "all"}, (None, "a: ")),
        ({"prompts": {"clustering": "c: "}}, (None, None)),
    ],
)
def test_prompts_are_chosen_as_sentence_transformers_does(dense_bert, tmp_path, values, prompts):
    folder = shutil.copytree(dense_bert, tmp_path / "model")
    write(folder / "config_sentence_transformers.json", values)
    pretrained = sentence_transformers.read(folder, only_sizes=True)
    found = (getattr(tokenizer, "prompt", None) for tokenizer in (pretrained.query.tokenizer, pretrained.doc.tokenizer))
    assert tuple(found) == prompts


def test_router_gives_each_tower_its_own_modules(tmp_path):
    folder, query = tmp_path / "model", ("Transformer", "Pooling", "Dense")
    embed = {
        route: write_sentence_transformer(tmp_path / route, kind, dense=False, normalize=False, seed=seed)
        for route, kind, seed in (("query", "roberta", 1), ("document", "bert", 2))
    }
    for route in embed:
        shutil.copytree(tmp_path / route, folder / f"{route}_0_Transformer")
        for index, name in ((1, "Pooling"), (2, "Dense")):
            (folder / f"{route}_0_Transformer" / f"{index}_{name}").rename(folder / f"{route}_{index}_{name}")
    names = {route: [f"{route}_{index}_{name}" for index, name in enumerate(query)] for route in embed}
    types = {name: f"sentence_transformers.models.{name.rpartition('_')[2]}" for route in names for name in names[route]}
    write(folder / "router_config.json", {"types": types, "structure": names, "parameters": {}})
    listed = [("", "sentence_transformers.models.Router"), ("1_Normalize", "sentence_transformers.models.Normalize")]
    write(folder / "modules.json", [{"path": path, "type": kind} for path, kind in listed])
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    pretrained = sentence_transformers.read(folder)
    assert pretrained.model.shared == ()
    assert sorted(pretrained.params) == ["doc", "query"]
    expected = {"query": embed["query"](["query : " + text for text in TEXTS]), "doc": embed["document"](TEXTS)}
    for tower, vectors in expected.items():
        np.testing.assert_allclose(our_embeddings(pretrained, TEXTS, tower), unit(vectors), atol=1e-5)


def test_newer_class_names_and_pooling_settings_mean_the_same(dense_bert, tmp_path):
    folder = shutil.copytree(dense_bert, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    base = "sentence_transformers.base.modules"
    write(folder / "modules.json", [{**m, "type": f"{base}.{m['type'].rpartition('.')[2]}"} for m in modules])
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    write(folder / "1_Pooling" / "config.json", pooling)
    write(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    newer, older = (sentence_transformers.read(path, only_sizes=True) for path in (folder, dense_bert))
    assert newer.model == older.model
    assert newer.doc.max_length == 48  # all the positions


ACTIVATIONS = {
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * scipy.stats.norm.cdf(x),
}


@pytest.mark.parametrize(("has_bias", "called"), [(False, None), *((True, name) for name in ACTIVATIONS)])
def test_several_linear_maps_in_a_row_are_one(tmp_path, has_bias, called):
    """EmbeddingGemma's head widens a vector and narrows it again; LaBSE's ends with tanh."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    embed = write_sentence_transformer(folder, "bert", dense=has_bias, normalize=False)
    weight, bias = rng.standard_normal((12, 24)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
    listed = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*listed, {**listed[2], "path": "3_Dense"}])
    settings = json.loads((folder / "2_Dense" / "config.json").read_text())
    activation = {"activation_function": f"torch.nn.modules.activation.{called}"} if called else {}
    write(folder / "3_Dense" / "config.json", {**settings, "in_features": 24, "out_features": 12, "bias": True, **activation})
    file = folder / "3_Dense" / "model.safetensors"
    safetensors.numpy.save_file({"linear.weight": weight, "linear.bias": bias}, file)
    found = sentence_transformers.read(folder)
    assert {name: leaf.shape for name, leaf in found.params["shared"]["projection"].items()} == {"kernel": (32, 12), "bias": (12,)}
    mapped = embed(TEXTS) @ weight.T + bias
    expected = ACTIVATIONS[called](mapped) if called else mapped
    np.testing.assert_allclose(our_embeddings(found, TEXTS), expected, rtol=1e-4, atol=1e-5)
    safetensors.numpy.save_file({"linear.weight": weight[:, :-1], "linear.bias": bias}, file)
    with pytest.raises(InputError, match=r"3_Dense holds \(12, 23\) and \(12,\) numbers that are no linear map of \(24,\)"):
        sentence_transformers.read(folder)
    safetensors.numpy.save_file({"linear.weight": weight, "linear.bias": bias[:1]}, file)  # numpy would repeat it
    with pytest.raises(InputError, match=r"3_Dense holds \(12, 24\) and \(1,\) numbers that are no linear map"):
        sentence_transformers.read(folder)
    safetensors.numpy.save_file({"linear.bias": bias}, file)
    with pytest.raises(InputError, match=r"3_Dense lacks linear\.weight; a Dense module is"):
        sentence_transformers.read(folder)


def in_json(name, **values):
    return lambda folder: write(folder / name, {**json.loads((folder / name).read_text()), **values})


def modules(*kinds):
    return lambda folder: write(
        folder / "modules.json", [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    )


def modules_with_tanh_first(folder):
    listed = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*listed[:3], {**listed[2], "path": "3_Dense"}])
    shutil.copytree(folder / "2_Dense", folder / "3_Dense")
    in_json("2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh")(folder)


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_json(POOLING, pooling_mode="median"), "pooling median; a tower has mean or"),
        (in_json(POOLING, pooling_mode_max_tokens=True), "pooling mean and max"),
        (in_json(POOLING, pooling_mode_cls_token=True), "pooling cls and mean"),
        (in_json(POOLING, pooling_mode=["weightedmean", "cls"]), "pooling weightedmean and cls"),
        (in_json(POOLING, pooling_mode_mean_tokens=False), "pooling none"),
        (in_json(POOLING, include_prompt="no"), "include_prompt is 'no'; it must be true or false"),
        (in_json(DENSE, activation_function="torch.nn.modules.activation.SiLU"), "the activation .*SiLU has no place"),
        (in_json(DENSE, activation_function="my.Tanh"), "the activation my.Tanh has no place"),
        (modules_with_tanh_first, r"3_Dense follows a Dense with tanh; a tower has one linear map"),
        (in_json(DENSE, out_features=25), "2_Dense/linear.bias gives .* in the place of|2_Dense/linear.weight gives"),
        (in_json(DENSE, out_features=None), "out_features is None"),
        (in_json(DENSE, bias=False), "no place for: 2_Dense/linear.bias"),
        (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "2_Dense holds neither model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no vocabulary; copy it there"),
        (lambda folder: (folder / POOLING).unlink(), "1_Pooling/config.json does not exist"),
        (in_json("sentence_bert_config.json", max_seq_length=49), "max_seq_length is 49; .* at most 48"),
        (in_json("sentence_bert_config.json", max_seq_length="all"), "max_seq_length is 'all'"),
        (in_json("sentence_bert_config.json", max_seq_length=True), "max_seq_length is True"),
        (in_json("sentence_bert_config.json", max_seq_length=2), "max_seq_length is 2, which leaves no room beside the 2 special"),
        (in_json("config_sentence_transformers.json", default_prompt_name="web"), "default_prompt_name is 'web'"),
        (in_json("config_sentence_transformers.json", prompts=["query: "]), "prompts is .* it must be an object"),
        (modules("Transformer", "Pooling", "LSTM"), "the module 'LSTM' has no place in a tower"),
        (modules("Transformer"), "lists Transformer; a tower is"),
        (modules("StaticEmbedding", "Pooling"), "lists StaticEmbedding, Pooling; a tower is Transformer and Pooling, or Static"),
        (modules("Transformer", "Pooling", "StaticEmbedding"), "lists Transformer, Pooling, StaticEmbedding"),
        (modules("Router"), "router_config.json does not exist"),
        (lambda f: (modules("Router")(f), write(f / "router_config.json", {})), r"router_config\.json: types is absent"),
        (modules("Transformer", "Normalize", "Pooling"), "lists Transformer, Normalize, Pooling"),
        (modules("Transformer", "Pooling", "Dense", "LayerNorm", "Dense"), "lists Transformer, Pooling, Dense, LayerNorm, Dense"),
        (modules("Transformer", "Pooling", "Normalize", "Dense"), "lists Transformer, Pooling, Normalize, Dense"),
        (lambda folder: write(folder / "modules.json", {"0": "Transformer"}), r"modules\.json: found .*, expected a list"),
        (lambda folder: write(folder / "modules.json", [{"type": "T", "path": "../other"}]), "0/path is '../other'"),
        (lambda folder: write(folder / "modules.json", [{"type": "T", "path": "/etc"}]), "0/path is '/etc'"),
    ],
)  # fmt: skip
def test_what_has_no_place_or_is_missing_is_refused(dense_bert, tmp_path, change, message):
    folder = shutil.copytree(dense_bert, tmp_path / "broken")
    change(folder)
    with pytest.raises(InputError, match=message):
        sentence_transformers.read(folder)


def test_a_folder_that_lost_its_modules_is_no_encoder_alone(dense_bert, tmp_path):
    folder = shutil.copytree(dense_bert, tmp_path / "model")
    (folder / "modules.json").unlink()
    with pytest.raises(InputError, match=r"model holds config_sentence_transformers\.json but not modules\.json"):
        any_model.read(folder)
    assert any_model.read(folder, pooling="mean", only_sizes=True).model.doc.pooling == "mean"
    (folder / "modules.json").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"modules\.json does not exist"):
        any_model.read(folder)


def test_lower_case_comes_first_where_the_folder_asks_for_it(dense_bert, tmp_path):
    folder = shutil.copytree(dense_bert, tmp_path / "cased")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write(folder / "tokenizer.json", {**tokenizer, "normalizer": None})
    upper, lower = [text.title() for text in TEXTS], TEXTS
    in_json("sentence_bert_config.json", do_lower_case=False)(folder)
    cased = sentence_transformers.read(folder)
    assert not np.allclose(our_embeddings(cased, upper), our_embeddings(cased, lower))
    in_json("sentence_bert_config.json", do_lower_case=True)(folder)
    found = sentence_transformers.read(folder)
    np.testing.assert_array_equal(our_embeddings(found, upper), our_embeddings(cased, lower))


@pytest.mark.parametrize("mode", ["max", "mean_sqrt_len_tokens", "weightedmean", "cls", "lasttoken"])
@pytest.mark.parametrize("is_saved_now", [True, False])
def test_every_pooling_is_read_and_written_as_the_library_has_it(tmp_path, mode, is_saved_now):
    """Beside a Dropout and a second Normalize, which change no embedding; `pooling_mode` is how versions of 2026 save it."""
    library = pytest.importorskip("sentence_transformers")
    write_sentence_transformer(tmp_path / "model", "bert")
    pooling = {"embedding_dimension": 32, "pooling_mode": mode}
    if not is_saved_now:
        key = {"cls": "cls_token", "lasttoken": "lasttoken"}.get(mode, f"{mode.removesuffix('_tokens')}_tokens")
        pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, f"pooling_mode_{key}": True}
    write(tmp_path / "model" / POOLING, pooling)
    write(tmp_path / "model" / "3_Dropout" / "config.json", {"dropout": 0.2})
    listed = json.loads((tmp_path / "model" / "modules.json").read_text())
    more = [{**listed[-1], "idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"}]
    write(tmp_path / "model" / "modules.json", [*listed[:2], *more, *listed[2:], {**listed[-1], "idx": 4, "name": "4"}])
    expected = library.SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True).encode(TEXTS)
    model = de_jax.load(tmp_path / "model", dtype="float32")
    np.testing.assert_allclose(our_embeddings(sentence_transformers.read(tmp_path / "model"), TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(model.encode_document(TEXTS), expected, atol=1e-5)  # several in a row
    model.save(tmp_path / "out", format="sentence_transformers")
    again = library.SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True).encode(TEXTS)
    np.testing.assert_allclose(again, expected, atol=1e-5)


def peer_of(folder):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A tokenizer.json whose words are of texts, and which puts [CLS] and [SEP] around them."""
    folder = tmp_path_factory.mktemp("vocabulary")
    write_tokenizer(folder, "bert")
    return folder / "tokenizer.json"


def static_folder(folder, vocabulary, *heads):
    """A model of a table of 24 numbers a token, and of modules after it, as the library saves it."""
    peer, modules = pytest.importorskip("sentence_transformers"), pytest.importorskip("sentence_transformers.models")
    torch.manual_seed(0)
    table = modules.StaticEmbedding(tokenizers.Tokenizer.from_file(str(vocabulary)), embedding_dim=24)
    for parameter in (one for head in heads for one in head.parameters() if one.ndim == 1):
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model = peer.SentenceTransformer(modules=[table, *heads], device="cpu", similarity_fn_name="dot")
    model.save(str(folder), create_model_card=False)
    return folder


def dense(width, dim, activation, *, residual=True, **options):
    from sentence_transformers.models import Dense

    return Dense(width, dim, activation_function=activation, use_residual=residual, **options)


def layer_norm(dim):
    from sentence_transformers.models import LayerNorm

    return LayerNorm(dim)


HEADS = {
    "nothing": list,
    "a residual": lambda: [dense(24, 24, torch.nn.GELU())],
    "a residual of another size": lambda: [dense(24, 12, torch.nn.Tanh(), bias=False)],
    "a residual of a linear map": lambda: [dense(24, 16, None)],
    "a LayerNorm alone": lambda: [layer_norm(24)],
    "a residual and a LayerNorm": lambda: [dense(24, 8, torch.nn.ReLU()), layer_norm(8)],
}


@pytest.mark.parametrize("name", HEADS)
def test_static_models_and_heads_are_read_and_written_as_the_library_has_them(tmp_path, vocabulary, name):
    expected = peer_of(static_folder(tmp_path / "model", vocabulary, *HEADS[name]())).encode(TEXTS)
    model = de_jax.load(tmp_path / "model", dtype="float32")
    np.testing.assert_allclose(model.encode_document(TEXTS), expected, atol=1e-5)
    model.save(tmp_path / "out", format="sentence_transformers")
    np.testing.assert_allclose(peer_of(tmp_path / "out").encode(TEXTS), expected, atol=1e-5)
    again = sentence_transformers.read(tmp_path / "out")
    np.testing.assert_allclose(our_embeddings(again, TEXTS), expected, atol=1e-5)


def test_a_static_model_of_model2vec_shares_rows_and_weighs_tokens(tmp_path, vocabulary):
    folder, rng = static_folder(tmp_path / "model", vocabulary), np.random.default_rng(0)
    arrays = {
        "embeddings": rng.standard_normal((5, 24)).astype(np.float32),
        "mapping": rng.integers(0, 5, 14),
        "weights": rng.uniform(0.1, 1, 14).astype(np.float32),
    }
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    expected = peer_of(folder).encode(TEXTS)
    np.testing.assert_allclose(our_embeddings(sentence_transformers.read(folder), TEXTS), expected, atol=1e-5)
    safetensors.numpy.save_file({**arrays, "mapping": arrays["mapping"] + 9}, folder / "model.safetensors")
    with pytest.raises(InputError, match="embeddings, mapping and weights do not fit"):
        sentence_transformers.read(folder)


def test_a_static_query_tower_stands_beside_an_encoder_of_documents(tmp_path, vocabulary):
    """Texts that spell special tokens out or are longer than the length are embedded alike on both sides."""
    library = pytest.importorskip("sentence_transformers")
    texts = [*TEXTS, "hello [SEP] world [PAD]"]
    query = static_folder(tmp_path / "query", vocabulary, dense(24, 32, None, residual=False))
    write_sentence_transformer(tmp_path / "doc", "bert", normalize=False)
    routes = [[*library.SentenceTransformer(str(one), device="cpu")] for one in (query, tmp_path / "doc")]
    router = library.sentence_transformer.modules.Router.for_query_document(*routes)
    both = library.SentenceTransformer(modules=[router], device="cpu", similarity_fn_name="dot")
    both.save(str(tmp_path / "both"), create_model_card=False)
    peer, ours = peer_of(tmp_path / "both"), de_jax.load(tmp_path / "both", dtype="float32")
    np.testing.assert_allclose(ours.encode_query(TEXTS), peer.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(ours.encode_document(TEXTS), peer.encode_document(TEXTS), atol=1e-5)
    ours.save(tmp_path / "out", format="sentence_transformers")
    np.testing.assert_allclose(peer_of(tmp_path / "out").encode_query(texts), ours.encode_query(texts), atol=1e-5)


@pytest.mark.parametrize("beside", often(["itself", "an encoder"], "itself"))
def test_a_static_model_is_trained_and_exported(tmp_path, vocabulary, beside):
    """Alone, and as a query tower that has no attention."""
    library = pytest.importorskip("sentence_transformers")
    static_folder(tmp_path / "model", vocabulary, dense(24, 32, None, residual=False))
    if beside == "an encoder":
        write_sentence_transformer(tmp_path / "doc", "bert", normalize=False)
        routes = [[*library.SentenceTransformer(str(tmp_path / one), device="cpu")] for one in ("model", "doc")]
        router = library.sentence_transformer.modules.Router.for_query_document(*routes)
        both = library.SentenceTransformer(modules=[router], device="cpu", similarity_fn_name="dot")
        both.save(str(tmp_path / "both"), create_model_card=False)
    start = tmp_path / ("both" if beside == "an encoder" else "model")
    pairs = [(f"{first} {second}", f"a {second} of {first}") for first in WORDS for second in WORDS if first != second]
    sizes = {"num_steps": 4, "batch_size": 8, "max_query_length": 16, "max_doc_length": 16, "learning_rate": 0.01}
    de_jax.fine_tune(str(start), pairs, run_dir=tmp_path / "run", **sizes)
    trained = de_jax.load(tmp_path / "run", dtype="float32")
    before = de_jax.load(start, dtype="float32").encode_query(TEXTS)
    assert np.abs(trained.encode_query(TEXTS) - before).max() > 1e-3
    trained.save(tmp_path / "out", format="sentence_transformers")
    peer = peer_of(tmp_path / "out")
    np.testing.assert_allclose(peer.encode_query(TEXTS), trained.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(peer.encode_document(TEXTS), trained.encode_document(TEXTS), atol=1e-5)


@pytest.mark.parametrize("mode", often(["mean", "max", "weightedmean", "cls", "lasttoken"], "weightedmean"))
def test_prompts_that_are_not_pooled_are_read_and_written_as_the_library_has_them(tmp_path, mode):
    write_sentence_transformer(tmp_path / "model", "bert", prompts={"prompts": {"query": "query : ", "document": "a passage : "}})
    write(tmp_path / "model" / POOLING, {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": False})
    in_json("tokenizer_config.json", sep_token="[SEP]")(tmp_path / "model")  # the library counts a prompt's tokens up to it
    peer, ours = peer_of(tmp_path / "model"), de_jax.load(tmp_path / "model", dtype="float32")
    expected = peer.encode_query(TEXTS), peer.encode_document(TEXTS)
    np.testing.assert_allclose(ours.encode_query(TEXTS), expected[0], atol=1e-5)
    np.testing.assert_allclose(ours.encode_document(TEXTS), expected[1], atol=1e-5)
    with pytest.raises(InputError, match=r"pools no prompt: 3 tokens are left out, but the prompt 'a ' has 2"):
        ours.encode_query(TEXTS, prompt="a ")
    ours.save(tmp_path / "out", format="sentence_transformers")
    assert "include_prompt" in (tmp_path / "out" / POOLING).read_text()
    again = peer_of(tmp_path / "out")
    np.testing.assert_allclose(again.encode_query(TEXTS), expected[0], atol=1e-5)
    np.testing.assert_allclose(again.encode_document(TEXTS), expected[1], atol=1e-5)
