"""ONNX files as other programs open them, and models that encode by them here."""

import contextlib
import json
import re
import shutil

import numpy as np
import pytest
import toy_run
from interop.test_export import PROMPTS, TEXTS, embeddings, make_run, vocabularies  # noqa: F401

import de_jax
from de_jax import cli
from de_jax.evaluation import latency
from de_jax.interop import export
from de_jax.models import onnx_graph
from de_jax.reports import model_card
from de_jax.training.run.run_folder import write_run
from de_jax.types import InputError

onnxruntime = pytest.importorskip("onnxruntime")
tokenizers = pytest.importorskip("tokenizers")
KINDS = ("t5", "umt5", "bert", "roberta", "bert_and_t5")


@pytest.fixture(params=KINDS)
def exported(request, tmp_path, vocabularies):  # noqa: F811
    run = make_run(tmp_path, vocabularies, request.param, prompts=PROMPTS)
    export.export(run, tmp_path / "out", "onnx")
    return run, tmp_path / "out"


def folders_of(run, out):
    return {"query": out / "query", "doc": out / "document"} if set(run.params) != {"shared"} else {"query": out, "doc": out}


def by_onnxruntime(folder, texts, max_length, file="model.onnx"):
    """With the files alone, in one batch of mixed lengths."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length)
    pad = json.loads((folder / "tokenizer_config.json").read_text())["pad_token"]
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(pad), pad_token=pad)
    encoded = tokenizer.encode_batch(texts)
    feeds = {"input_ids": [one.ids for one in encoded], "attention_mask": [one.attention_mask for one in encoded]}
    session = onnxruntime.InferenceSession(folder / "onnx" / file, providers=["CPUExecutionProvider"])
    return session.run(["sentence_embedding"], {name: np.array(array) for name, array in feeds.items()})[0]


def assert_near(found, expected, atol=1e-5):
    np.testing.assert_allclose(found / np.abs(expected).max(), expected / np.abs(expected).max(), atol=atol)


def test_the_files_alone_give_the_embeddings_of_both_towers(exported, tmp_path):
    run, out = exported
    for (tower, folder), prompt in zip(folders_of(run, out).items(), PROMPTS, strict=True):
        texts, expected = [prompt + text for text in TEXTS], embeddings(run, tower, tmp_path)
        assert_near(by_onnxruntime(folder, texts, run.side(tower).max_length), expected)
        assert_near(by_onnxruntime(folder, texts, run.side(tower).max_length, "model_fp16.onnx"), expected, atol=0.02)
        assert_near(by_onnxruntime(folder, texts, run.side(tower).max_length, "model_quantized.onnx"), expected, atol=0.2)
    assert len({file.stat().st_mode for file in out.rglob("*") if file.is_file()}) == 1  # whoever reads one reads all


def test_the_folder_is_a_model_here_too(exported):
    out = exported[1]
    opened = de_jax.load(out, dtype="float32")
    for backend in ("onnx", "onnx-int8"):
        other = de_jax.load(out, backend=backend)
        assert f"backend='{backend}'" in repr(other)
        for encode in ("encode_query", "encode_document"):
            close = 1e-5 if backend == "onnx" else 0.2
            assert_near(getattr(other, encode)(TEXTS), getattr(opened, encode)(TEXTS), atol=close)


def test_openvino_opens_the_file_as_it_is(exported):
    openvino = pytest.importorskip("openvino")
    run, out = exported
    opened, other = de_jax.load(out, dtype="float32"), de_jax.load(out, dtype="float32", backend="openvino")
    assert_near(other.encode_query(TEXTS), opened.encode_query(TEXTS))
    assert_near(other.encode_document(TEXTS), opened.encode_document(TEXTS))
    file = folders_of(run, out)["doc"] / "onnx" / "model.onnx"
    assert openvino.Core().read_model(file).output(0).any_name == "sentence_embedding"


def test_fastembed_opens_the_folder(tmp_path, vocabularies):  # noqa: F811
    fastembed = pytest.importorskip("fastembed")
    from fastembed.common.model_description import ModelSource, PoolingType

    run = make_run(tmp_path, vocabularies, "bert")
    export.export(run, tmp_path / "out", "onnx")
    source = ModelSource(hf="nobody/nothing")
    fastembed.TextEmbedding.add_custom_model(
        "ours", pooling=PoolingType.DISABLED, normalization=False, sources=source, dim=12, model_file="onnx/model.onnx"
    )
    model = fastembed.TextEmbedding("ours", specific_model_path=str(tmp_path / "out"))
    assert_near(np.array(list(model.embed(TEXTS))), embeddings(run, "doc", tmp_path))


def test_a_model_of_one_folder_keeps_its_passages_with_a_backend(tmp_path, vocabularies):  # noqa: F811
    run = make_run(tmp_path, vocabularies, "bert")
    run = run._replace(doc=run.doc._replace(max_length=8, max_passages=3))
    write_run(tmp_path / "maxp", run.params, model=run.model, query=run.query, doc=run.doc, origin=[])
    jax, onnx = (de_jax.load(tmp_path / "maxp", backend=backend, dtype="float32") for backend in ("jax", "onnx"))
    assert_near(onnx.encode_document(TEXTS), jax.encode_document(TEXTS))
    assert [hit.row for hit in onnx.search("river", TEXTS, k=3)] == [hit.row for hit in jax.search("river", TEXTS, k=3)]
    notes = export.export(run, tmp_path / "out", "onnx")
    assert any("passages" in note for note in notes)


def test_arrays_of_a_large_model_stand_in_a_file_beside_it(tmp_path, vocabularies, monkeypatch):  # noqa: F811
    monkeypatch.setattr(onnx_graph, "MAX_BYTES", 1000)
    run = make_run(tmp_path, vocabularies, "t5")
    export.export(run, tmp_path / "out", "onnx")
    assert (tmp_path / "out" / "onnx" / "model.onnx_data").stat().st_size > 1000
    assert_near(by_onnxruntime(tmp_path / "out", TEXTS, 40), embeddings(run, "doc", tmp_path))
    opened = (de_jax.load(tmp_path / "out", backend=backend, dtype="float32") for backend in ("jax", "onnx"))
    np.testing.assert_allclose(*(model.encode_query(TEXTS) for model in opened), atol=1e-5)


def test_the_card_and_the_metadata_name_the_licence(tmp_path, vocabularies):  # noqa: F811
    import onnx

    run = make_run(tmp_path, vocabularies, "bert", prompts=PROMPTS)
    model_card.export(run, tmp_path / "out", "onnx", license="mit")
    known = {entry.key: entry.value for entry in onnx.load(tmp_path / "out/onnx/model_quantized.onnx").metadata_props}
    assert known == {
        "precision": "int8", "license": "mit", "step": "7", "tower": "query and document", "max_length": "40",
        "query_prompt": PROMPTS[0], "document_prompt": PROMPTS[1],
    }  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    shown = next(part for part in card.split("```python\n")[1:] if "onnxruntime" in part).split("```")[0]
    variables, model = {}, de_jax.load(tmp_path / "out", dtype="float32")
    padding = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))  # as some models bring it
    padding.enable_padding(length=64)
    padding.enable_truncation(3)
    padding.save(str(tmp_path / "out/tokenizer.json"))
    with contextlib.chdir(tmp_path):
        exec(shown, variables)
    np.testing.assert_allclose(variables["documents"], model.encode_document(["Mont Blanc is 4,806 metres high."]), atol=1e-5)


def test_commands_take_a_backend_and_keep_its_embeddings_apart(tmp_path, capsys):
    data, run = toy_run.write_dataset(tmp_path / "data"), tmp_path / "run"
    cli.call("train", toy_run.arguments(data, run, train__num_steps=1))
    found = {}
    for backend in ("jax", "onnx", "onnx-int8"):
        flags = [f"--run_dir={run}", f"--dataset_dir={data}", "--dtype=float32", f"--backend={backend}"]
        capsys.readouterr()
        cli.call("encode corpus", [*flags, f"--out_dir={tmp_path / backend}"])
        cli.call("search", [*flags, "--query=apple", "--k=3", f"--embeddings_dir={tmp_path / backend}"])
        found[backend] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    arrays = [np.load(tmp_path / backend / "embeddings.npy") for backend in found]
    np.testing.assert_allclose(arrays[1], arrays[0], atol=1e-5)
    assert len({json.loads((tmp_path / backend / "manifest.json").read_text())["model"] for backend in found}) == 3
    assert [hit["id"] for hit in found["onnx"]] == [hit["id"] for hit in found["jax"]]
    with pytest.raises(InputError):
        cli.call("encode corpus", [*flags[:-1], "--backend=onnx", f"--out_dir={tmp_path / 'jax'}"])
    refused = r"^dtype is 'bfloat16', but onnxruntime encodes in float32; leave it out, or take another backend\.$"
    with pytest.raises(InputError, match=refused):
        cli.call(
            "search", [f"--run_dir={run}", f"--dataset_dir={data}", "--query=apple", "--dtype=bfloat16", "--backend=onnx-int8"]
        )
    with pytest.raises(InputError, match=refused):
        de_jax.load(run, dtype="bfloat16", backend="onnx")


def test_the_card_says_what_int8_loses_and_gains_on_a_data_set(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(latency, "LITTLE", -1.0)
    data, run = toy_run.write_dataset(tmp_path / "data"), tmp_path / "run"
    shutil.copy(data / "qrels" / "dev.tsv", data / "qrels" / "test.tsv")
    cli.call("train", toy_run.arguments(data, run, train__num_steps=1))
    capsys.readouterr()
    flags = [f"--run_dir={run}", f"--dataset_dir={data}", f"--out_dir={tmp_path / 'out'}"]
    cli.call("export model", [*flags, "--format=onnx"])
    card, notes = (tmp_path / "out" / "README.md").read_text(), json.loads(capsys.readouterr().out)["notes"]
    assert {"backend onnx", "backend onnx-int8"} <= {*re.findall(r"backend [\w-]+", card)}
    (values,) = re.findall(r"on data, .* of (\S+), and model.onnx \(float32\) (\S+), a loss of more than", notes[0])
    reports = [json.loads(path.read_text()) for path in sorted(run.glob("evaluations/*/result.json"))]
    scores = {report["settings"]["backend"]: f"{report['dense']['ndcg@10']:.4f}" for report in reports}
    assert scores == dict(zip(("onnx-int8", "onnx"), values, strict=True))
    assert f"Note: {notes[0]}." in card
    with pytest.raises(InputError, match="--dataset_dir changes nothing without --format=onnx"):
        cli.call("export model", [*flags, "--format=safetensors"])


def test_a_missing_package_is_named(tmp_path, vocabularies, monkeypatch):  # noqa: F811
    import sys

    run = make_run(tmp_path, vocabularies, "t5")
    for package, extra, backend in (
        ("onnx", "onnx", "onnx"),
        ("onnxruntime", "onnx", "onnx"),
        ("openvino", "openvino", "openvino"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(InputError, match=rf"needs the package {package}; run pip install 'de-jax-retrieval\[{extra}\]'"):
                de_jax.model.Model(run._replace(backend=backend)).encode_query(["river"])


def test_names_of_files_are_those_that_transformers_js_opens():
    assert list(export.ONNX_FILES) == ["model.onnx", "model_fp16.onnx", "model_quantized.onnx"]
