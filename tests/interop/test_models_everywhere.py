"""A model is one type, whatever it was opened from: every command that takes one takes a run, a folder and adapters alike."""

import functools
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import toy_run
from often import often
from pretrained_folders import TEXTS, write, write_encoder, write_sentence_transformer

import de_jax
from de_jax import cli
from de_jax.models.tower import PARTS
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

SOURCES = ("run", "sentence-transformers", "hugging face", "peft", "safetensors")
VALUE = "base_model.model.encoder.layer.0.attention.self.value"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of models by what they are, and a data set."""
    folder = tmp_path_factory.mktemp("models")
    run, sentence, base, peft, arrays = (folder / name for name in ("run", "sentence", "base", "peft", "arrays"))
    write_sentence_transformer(sentence, "bert", dense=True)
    write_encoder(base, "bert")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "bias": "none", "base_model_name_or_path": str(base)}
    write(peft / "adapter_config.json", config)
    maps = {f"{VALUE}.lora_A.weight": np.ones((2, 32), np.float32), f"{VALUE}.lora_B.weight": np.ones((32, 2), np.float32)}
    safetensors.numpy.save_file(maps, peft / "adapter_model.safetensors")
    cli.call("import model", [f"--from={sentence}", f"--run_dir={run}"])
    cli.call("export model", [f"--run_dir={run}", "--format=safetensors", f"--out_dir={arrays}"])
    data = toy_run.write_dataset(folder / "data")
    return dict(zip(SOURCES, (run, sentence, base, peft, arrays), strict=True)), data


@pytest.mark.parametrize("source", often(SOURCES, "sentence-transformers"))
def test_every_command_takes_a_model_of_every_kind(made, tmp_path, capsys, source):
    model, data = made[0][source], made[1]

    def printed(tool, *flags, run_dir=f"--run_dir={model}"):
        capsys.readouterr()
        cli.call(tool, [*([run_dir] if run_dir else []), *map(str, flags)])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    on = f"--dataset_dir={data}"
    assert len(printed("search", on, "--query=apple", "--k=3")["results"]) == 3
    report = printed("evaluate beir", on, "--split=dev", "--no_bm25")
    assert printed("evaluate sentences", on, "--split=dev", "--no_bm25")["dense"]["mrr"] > 0
    assert printed("encode corpus", on, f"--out_dir={tmp_path / 'embeddings'}")["num_docs"] == 96
    mined = printed("mine pairs", on, f"--negatives_dir={tmp_path / 'negatives'}", "--last_rank=20", "--num_neg_docs=2")
    assert mined["num_pairs"] == 80
    assert printed("export index", on, "--to=parquet", f"--out={tmp_path / 'x.parquet'}")["num_rows"] == 96
    assert printed("analyse run", f"--out_dir={tmp_path / 'shown'}")["num_parameters"]["total"] > 0
    printed("compare latency", f"--runs=a={model}", on, "--split=dev", "--batch_sizes=1", "--num_calls=2", run_dir="")
    exported = printed("export model", "--format=sentence_transformers", f"--out_dir={tmp_path / 'exported'}")
    assert "ndcg_at_10" in (tmp_path / "exported" / "README.md").read_text()
    assert exported["step"] == 0
    ours, again = de_jax.load(model), de_jax.load(tmp_path / "exported")
    np.testing.assert_allclose(again.encode_document(TEXTS), ours.encode_document(TEXTS), atol=1e-5)
    scores = de_jax.evaluate(ours, data, split="dev")
    assert scores["ndcg@10"] == pytest.approx(report["dense"]["ndcg@10"])


@pytest.fixture(scope="module")
def tuned(made, tmp_path_factory):
    """The run of a training that starts from a model of a kind; each is trained once."""

    @functools.cache
    def tuned(source):
        run_dir = tmp_path_factory.mktemp("tuned") / "run"
        settings = {"MODEL": made[0][source], "beir_pairs.dataset_dir": made[1], "make_mesh.data": 1, "Optimization.num_steps": 2}
        settings |= {"PairsOptions.batch_size": 8, "PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 16}
        settings |= {"PairsOptions.unique_in_batch": False}  # to this vocabulary all queries are the same unknown words
        settings |= {"linear.warmup_steps": 0, "pretrained_tower.dropout_rate": 0.0}
        argv = [*(f"--gin.{name}={value}" for name, value in settings.items()), f"--run_dir={run_dir}"]
        cli.call("train", ["--gin_file=recipes/fine_tune.gin", *argv])
        return run_dir

    return tuned


@pytest.mark.parametrize("source", often(SOURCES, "sentence-transformers"))
def test_training_starts_from_a_model_of_every_kind(tuned, source):
    assert load_run(tuned(source)).step == 2


def test_negatives_of_another_librarys_model_go_to_a_folder_that_is_named(made):
    with pytest.raises(InputError, match="--negatives_dir is missing"):
        cli.call("mine pairs", [f"--run_dir={made[0]['hugging face']}", f"--dataset_dir={made[1]}"])


SHARED = {"nothing": "()", "projection": "('projection',)", "all": "('embedder', 'encoder', 'projection')"}


@pytest.mark.soak
@pytest.mark.parametrize("shared", SHARED)
def test_what_a_run_shares_is_shared_in_the_runs_that_start_from_it(made, tmp_path, capsys, shared):
    data = made[1]
    changes = {"PairsOptions__max_query_length": 12, "PairsOptions__max_doc_length": 30, "PairsOptions__dev_split": None}
    changes |= {"train__num_steps": 1, "DualEncoder__shared": SHARED[shared], **toy_run.NO_DROPOUT}
    argv = toy_run.arguments(data, tmp_path / "first", **changes)
    cli.call("train", argv)
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(f"apple {i},river {i} and {i}\n" for i in range(64)))
    settings = {
        "MODEL": tmp_path / "first",
        "table_pairs.path": tmp_path / "qa.csv",
        "make_mesh.data": 1,
        "Optimization.num_steps": 2,
    }
    settings |= {"PairsOptions.batch_size": 8, "linear.warmup_steps": 0, "HardNegatives.mine_every_steps": 1}
    argv = [*(f"--gin.{name}={value}" for name, value in settings.items()), f"--run_dir={tmp_path / 'second'}"]
    cli.call("train", ["--gin_file=recipes/table_mined.gin", *argv])
    first, second = load_run(tmp_path / "first"), load_run(tmp_path / "second")
    assert second.model.shared == first.model.shared
    assert (second.query.max_length, second.doc.max_length) == (first.query.max_length, first.doc.max_length) == (12, 30)
    capsys.readouterr()
    cli.call("search", [f"--run_dir={tmp_path / 'second'}", f"--dataset_dir={data}", "--query=apple", "--k=2"])
    cli.call(
        "export model", [f"--run_dir={tmp_path / 'second'}", "--format=sentence_transformers", f"--out_dir={tmp_path / 'out'}"]
    )
    again, ours = de_jax.load(tmp_path / "out"), de_jax.load(tmp_path / "second")
    np.testing.assert_allclose(again.encode_query(TEXTS), ours.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(again.encode_document(TEXTS), ours.encode_document(TEXTS), atol=1e-5)
    assert again.run.model.shared == (first.model.shared if shared != "all" else PARTS)


def test_what_no_embedding_depends_on_comes_back_in_an_export(made, tuned, tmp_path):
    """Else sentence-transformers would say that the pooler of a BERT is new."""
    source, first = made[0]["sentence-transformers"], tuned("sentence-transformers")
    cli.call("import model", [f"--from={first}", f"--run_dir={tmp_path / 'second'}"])
    expected = safetensors.numpy.load_file(source / "model.safetensors")
    for number, run in enumerate((source, made[0]["run"], first, tmp_path / "second")):
        out = tmp_path / f"exported_{number}"
        cli.call("export model", [f"--run_dir={run}", "--format=sentence_transformers", f"--out_dir={out}"])
        found = safetensors.numpy.load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        for name in ("pooler.dense.weight", "pooler.dense.bias"):
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.soak
def test_a_run_continues_with_its_own_tokenizer_although_its_models_folder_is_read_otherwise_today(made, tmp_path):
    source = shutil.copytree(made[0]["sentence-transformers"], tmp_path / "model")
    settings = {"MODEL": source, "beir_pairs.dataset_dir": made[1], "make_mesh.data": 1, "Logging.save_every_steps": 1}
    settings |= {"PairsOptions.batch_size": 8, "PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 16}
    settings |= {"PairsOptions.unique_in_batch": False}  # to this vocabulary all queries are the same unknown words
    argv = [*(f"--gin.{name}={value}" for name, value in settings.items()), f"--run_dir={tmp_path / 'run'}"]
    argv += ["--gin_file=recipes/fine_tune.gin", "--gin.linear.warmup_steps=0"]
    cli.call("train", [*argv, "--gin.Optimization.num_steps=1"])
    began_with = load_run(tmp_path / "run").query.tokenizer.fingerprint
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    write(source / "tokenizer.json", {**vocabulary, "normalizer": {"type": "NFC"}})
    cli.call("train", [*argv, "--gin.Optimization.num_steps=2"])
    found = load_run(tmp_path / "run")
    assert (found.step, found.query.tokenizer.fingerprint) == (2, began_with)
