"""The command on a toy data set: trained, killed and continued, generated, imported."""

import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_run

from de_jax import cli, gin_configs
from de_jax.data.expansion.generated_queries import read_expansion
from de_jax.data.text import beir
from de_jax.doc2query.generator_run import held_out_pairs, load_generator, mean_loss
from de_jax.models.t5 import T5Config
from de_jax.tools import doc2query
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.run import loop, run_log
from de_jax.training.run.checkpoint import SaveCheckpoints
from de_jax.types import InputError

SMALLEST = T5Config(model_dim=32, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32)


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return toy_run.write_dataset(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def smallest(monkeypatch):
    monkeypatch.setitem(doc2query.SIZES, "tiny", SMALLEST)


def train(dataset_dir, run_dir, **changes):
    settings = {
        "dataset_dirs": dataset_dir, "tokenizer": dataset_dir / "spiece.model", "run_dir": run_dir, "num_steps": 6, "batch_size": 8,
        "max_query_length": 8, "max_doc_length": 32, "length_multiple": 32, "learning_rate": 0.01, "dtype": "float32",
        "optimizer": "adamw", "log_every_steps": 2, "save_every_steps": 2, **changes,
    }  # fmt: skip
    cli.call("doc2query train", [*(f"--{name}={value}" for name, value in settings.items())])


def generate(dataset_dir, model, out_dir, **changes):
    settings = {"dataset_dir": dataset_dir, "model": model, "out_dir": out_dir, "num_queries": 3, "max_length": 8,
                "docs_per_batch": 2, "docs_per_part": 40, **changes}  # fmt: skip
    cli.call("doc2query generate", [*(f"--{name}={value}" for name, value in settings.items())])


@contextlib.contextmanager
def a_folder(tmp_path_factory):
    """For a run that tests of the module share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(doc2query.SIZES, "tiny", SMALLEST)
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield tmp_path_factory.mktemp("runs") / "trained"


@pytest.fixture(scope="module")
def run_dir(dataset_dir, tmp_path_factory):
    with a_folder(tmp_path_factory) as folder:
        train(dataset_dir, folder)
    return folder


@pytest.fixture(scope="module")
def stopped(dataset_dir, tmp_path_factory):
    """A run that its loss on held-out pairs ended, and its report."""
    changes = {"dev_split": "dev", "evaluate_every_steps": 2, "early_stopping_patience": 1, "num_steps": 40, "learning_rate": 0.3}
    with a_folder(tmp_path_factory) as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        train(dataset_dir, folder, **changes)
    return folder, json.loads(printed.getvalue())


def params_of(run_dir):
    return jax.tree.map(np.asarray, load_generator(run_dir).params)


@pytest.mark.soak
def test_a_stopped_training_continues_to_the_same_bits(dataset_dir, run_dir, tmp_path, monkeypatch, capsys):
    save = SaveCheckpoints.__call__

    def stopping(self, step, state, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(self, step, state, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(SaveCheckpoints, "__call__", stopping)
        with pytest.raises(SystemExit, match="75"):
            train(dataset_dir, tmp_path / "run")
    assert load_generator(tmp_path / "run").step == 3
    train(dataset_dir, tmp_path / "run")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["step"], report["num_pairs"]) == (6, 80)
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path / "run"), params_of(run_dir))
    losses = [[(line["step"], line["loss"]) for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
              for folder in (run_dir, tmp_path / "run")]  # fmt: skip
    assert losses[0] == losses[1]
    assert losses[0][-1][1] < losses[0][0][1]
    with pytest.raises(InputError, match="the run is at step 6 already, past --num_steps = 5; raise it"):
        train(dataset_dir, tmp_path / "run", num_steps=5)


def test_the_loss_on_held_out_pairs_chooses_a_checkpoint_and_ends_the_training(dataset_dir, stopped, tmp_path):
    run_dir, report = stopped
    assert report["stopped"].startswith("1 evaluations on dev in a row were no better than the best, ")
    lines = run_log.read_metrics(run_dir / run_log.METRICS_FILE)
    losses = {line["step"]: line["dev/loss"] for line in lines if "dev/loss" in line}
    assert list(losses) == list(range(2, report["step"] + 1, 2))
    best = load_generator(run_dir, "best")
    assert best.step == min(losses, key=losses.__getitem__) == report["step"] - 2
    sizes = {"max_query_length": 8, "max_doc_length": 32}
    (whole,) = held_out_pairs([dataset_dir], best.tokenizer, split="dev", max_pairs=99, batch_size=16, **sizes).batches
    assert losses[best.step] == pytest.approx(float(jax.jit(best.model.loss)(best.params, whole)[0]), rel=1e-5)
    parts = held_out_pairs([dataset_dir], best.tokenizer, split="dev", max_pairs=99, batch_size=12, **sizes)
    assert [int((batch.query_id >= 0).sum()) for batch in parts.batches] == [12, 4]
    assert mean_loss(best.model, parts.batches, make_mesh(1), best.params) == pytest.approx(losses[best.step], rel=1e-5)
    with pytest.raises(InputError, match="--size changes nothing beside --init_from"):
        train(dataset_dir, tmp_path / "other", size="small", init_from=run_dir)
    for flag in ("early_stopping_patience", "dev_max_pairs", "evaluate_every_steps"):
        with pytest.raises(InputError, match=f"--{flag} changes nothing without --dev_split"):
            train(dataset_dir, tmp_path / "other", **{flag: 1})


@pytest.mark.soak
def test_a_run_starts_from_another_and_refuses_to_continue_as_another(dataset_dir, run_dir, tmp_path):
    train(dataset_dir, tmp_path / "tuned", init_from=run_dir, num_steps=1, learning_rate=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params_of(tmp_path / "tuned"), params_of(run_dir))
    with pytest.raises(InputError, match="was begun with max_doc_length 32, not 16; use the options it was started with"):
        train(dataset_dir, run_dir, max_doc_length=16)


@pytest.mark.soak
def test_faults_name_the_pairs_and_the_flags(dataset_dir, run_dir, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="step 2 is not a finite number; its batch holds: ") as caught:
        train(dataset_dir, tmp_path / "far", init_from=run_dir, learning_rate=1e30)
    assert re.search(
        r": \(query 'q\d+', document 'd\d+'\), .* no checkpoint is there yet: .* lower --learning_rate\.$", str(caught.value)
    )

    def no_room(step_fn, state, batches, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.")

    monkeypatch.setattr(loop, "fit", no_room)
    flags = r"lower --batch_size \(now 8\), lower --max_doc_length \(now 32\), set --remat \(now none\) to "
    with pytest.raises(
        InputError, match=rf"GiB of it by the compiler's count: {flags}.*, or take more devices \(the mesh is data="
    ):
        train(dataset_dir, tmp_path / "large")


@pytest.mark.soak
def test_an_expansion_has_a_line_for_every_document_and_is_the_same_after_a_kill(dataset_dir, run_dir, tmp_path):
    generate(dataset_dir, run_dir, tmp_path / "whole")
    generate(dataset_dir, run_dir, tmp_path / "cut")
    found = list(read_expansion(tmp_path / "whole"))
    assert [doc.doc_id for doc in found] == [doc_id for doc_id, _ in beir.iter_docs(dataset_dir / "corpus.jsonl.gz")]
    assert {len(doc.queries) for doc in found} == {3}
    for name in ("manifest.json", "part-00002.jsonl.gz", "part-00001.jsonl.gz"):
        (tmp_path / "cut" / name).unlink()
    (tmp_path / "cut" / ".part-00001.jsonl.gz.0123abcd.tmp").write_bytes(b"half")
    generate(dataset_dir, run_dir, tmp_path / "cut")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "cut")]
    assert files[0] == files[1]
    with pytest.raises(InputError, match="was begun with seed 0, not 1"):
        generate(dataset_dir, run_dir, tmp_path / "cut", seed=1)


@pytest.mark.soak
@pytest.mark.short_soak
def test_jobs_that_share_the_documents_write_what_one_job_writes(dataset_dir, run_dir, tmp_path, capsys):
    def files(name):
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    def job(shard, **changes):
        generate(dataset_dir, run_dir, tmp_path / "shared", step=6, shard=shard, **changes)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    generate(dataset_dir, run_dir, tmp_path / "whole")
    assert [job(f"{number}/3") for number in (2, 0, 0, 1)] == [{"shard": f"{number}/3"} for number in (2, 0, 0, 1)]
    file = tmp_path / "shared.parts" / "2_of_3" / "part-00000.jsonl.gz"
    intact = file.read_bytes()
    file.write_bytes(intact[:-9])
    with pytest.raises(InputError, match=r"shared.parts/2_of_3/part-00000.jsonl.gz .*copy the expansion again"):
        generate(dataset_dir, run_dir, tmp_path / "shared")
    file.write_bytes(intact)
    generate(dataset_dir, run_dir, tmp_path / "shared")
    assert files("shared") == files("whole")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["shared", "whole"]
    job("0/3")  # started again by a scheduler
    assert files("shared") == files("whole")
    with pytest.raises(InputError, match="--shard needs the number of a checkpoint in --step"):
        generate(dataset_dir, run_dir, tmp_path / "other", shard="0/3")


@pytest.mark.soak
def test_jobs_of_another_seed_are_not_joined(dataset_dir, run_dir, tmp_path):
    generate(dataset_dir, run_dir, tmp_path / "shared", step=6, shard="0/2")
    generate(dataset_dir, run_dir, tmp_path / "shared", step=6, shard="1/2", seed=1)
    with pytest.raises(InputError, match=r"shared.parts/1_of_2 was begun with seed 1, not 0"):
        generate(dataset_dir, run_dir, tmp_path / "shared")


@pytest.mark.soak
def test_another_batch_size_writes_the_same_queries(dataset_dir, run_dir, tmp_path):
    generate(dataset_dir, run_dir, tmp_path / "two")
    generate(dataset_dir, run_dir, tmp_path / "five", docs_per_batch=5, docs_per_part=17)
    assert list(read_expansion(tmp_path / "two")) == list(read_expansion(tmp_path / "five"))


@pytest.mark.soak
def test_repeated_queries_are_replaced_where_a_document_has_too_few(dataset_dir, run_dir, tmp_path):
    narrow = {"num_queries": 12, "top_k": 3, "temperature": 0.4, "max_length": 6}
    written = {}
    for name, more in {"drawn": {}, "more": {"min_distinct": 9}, "again": {"min_distinct": 9, "docs_per_batch": 3}}.items():
        generate(dataset_dir, run_dir, tmp_path / name, **narrow, **more)
        written[name] = {one.doc_id: one.queries for one in read_expansion(tmp_path / name)}
    number = {name: {doc_id: len(set(own) - {""}) for doc_id, own in docs.items()} for name, docs in written.items()}
    assert min(number["drawn"].values()) < 9 <= min(number["more"].values())
    assert written["again"] == written["more"]
    for doc_id, own in written["drawn"].items():
        assert len(written["more"][doc_id]) == 12
        is_kept = [number["drawn"][doc_id] >= 9 or (query and query not in own[:place]) for place, query in enumerate(own)]
        assert [query for query, kept in zip(own, is_kept, strict=True) if kept] == [
            query for query, kept in zip(written["more"][doc_id], is_kept, strict=True) if kept
        ]
    with pytest.warns(UserWarning, match=r"\d+ documents have fewer than 12 different queries after 20 more draws of each"):
        generate(dataset_dir, run_dir, tmp_path / "few", **narrow | {"max_length": 2, "temperature": 0.01}, min_distinct=12)
    for wrong in ({"min_distinct": 13}, {"min_distinct": 1, "method": "beam", "num_queries": 1}):
        with pytest.raises(InputError, match=r"min_distinct is \d+, but \w+ writes \d+ queries of a document"):
            generate(dataset_dir, run_dir, tmp_path / "wrong", **{"num_queries": 12, "max_length": 6} | wrong)
    for unread, method in {"top_k": "beam", "temperature": "greedy"}.items():
        with pytest.raises(InputError, match=f"--{unread} changes nothing without --method=sample"):
            generate(dataset_dir, run_dir, tmp_path / "wrong", **{"num_queries": 1, "method": method, unread: 3})
    with pytest.raises(InputError, match="--num_beams changes nothing without --method=beam"):
        generate(dataset_dir, run_dir, tmp_path / "wrong", num_beams=3)


def test_a_damaged_tokenizer_of_a_generator_is_refused(stopped, tmp_path):
    copied = toy_run.with_another_tokenizer(stopped[0], tmp_path / "run")
    with pytest.raises(InputError, match=toy_run.DAMAGED_TOKENIZER):
        load_generator(copied)


def test_released_predictions_become_an_expansion(dataset_dir, tmp_path):
    ids = [doc_id for doc_id, _ in beir.iter_docs(dataset_dir / "corpus.jsonl.gz")]
    for sample in range(2):
        for piece, own in enumerate((ids[:50], ids[50:])):
            path = tmp_path / f"predicted_sample{sample}.txt00{piece}-1004000"
            path.write_text("".join(f"query {sample} of {doc_id}\n" for doc_id in own))
    predictions = [str(path) for path in tmp_path.glob("predicted_*")]
    arguments = ["--dataset_dir", str(dataset_dir), "--out_dir", str(tmp_path / "out"), "--docs_per_part", "40"]
    cli.call("doc2query import", ["--predictions", *predictions, *arguments])
    found = list(read_expansion(tmp_path / "out"))
    assert [doc.doc_id for doc in found] == ids
    assert found[60].queries == [f"query 0 of {ids[60]}", f"query 1 of {ids[60]}"]


def test_sizes_are_those_of_the_recipes(monkeypatch):
    monkeypatch.undo()
    for name, config in doc2query.SIZES.items():
        lines = (Path(gin_configs.__file__).parent / "models" / f"t5_1_1_{name}.gin").read_text().splitlines()
        sizes = {
            key.removeprefix("T5Config."): value for key, _, value in (line.partition(" = ") for line in lines) if "T5C" in key
        }
        assert sizes == {key: json.dumps(getattr(config, key)) for key in sizes} | {"activation": '"gated_gelu"'}


def test_a_model_that_begins_anew_needs_a_vocabulary(dataset_dir, tmp_path):
    with pytest.raises(InputError, match="--tokenizer is missing"):
        cli.call("doc2query train", [f"--dataset_dirs={dataset_dir}", f"--run_dir={tmp_path / 'run'}"])
