"""Empty texts and identical ids: every command has the same rule, and its messages name an option that it has."""

import ast
import gzip
import re
import shlex
from pathlib import Path

import pytest
import toy_run
from tiny_run import DOCS, QUERIES

from de_jax import cli
from de_jax.cli import VERBS
from de_jax.data.expansion.generated_queries import DocQueries, ExpansionWriter
from de_jax.data.text import beir
from de_jax.doc2query.generator_run import GeneratorRun
from de_jax.models.generator import Generator
from de_jax.tools import doc2query
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

JUDGED = {
    "test": {"q0": {"d0": 1, "d5": 2, "e1": 1}, "d3": {"d6": 1, "d3": 1}, "q2": {"d2": 1}, "q9": {"d1": 1}},
    "train": {"q2": {"d2": 1, "e2": 1}, "q0": {f"d{number}": 1 for number in range(8)}, "q9": {"d1": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny data set with two empty documents and an empty query, all judged; a query judged with itself; .gz judgements."""
    folder = tmp_path_factory.mktemp("data") / "holes"
    docs = [*DOCS[:2], ("e1", "", ""), *DOCS[2:], ("e2", " ", "  ")]
    beir.write(folder, docs, [*QUERIES, ("q9", " ")], JUDGED)
    for path in sorted((folder / "qrels").glob("*.tsv")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (folder / "answers.jsonl").write_text('{"_id": "q0", "answers": ["fox"]}\n')
    (folder / "predictions.jsonl").write_text('{"_id": "d0", "queries": ["a fox"]}\n')
    writer = ExpansionWriter(folder / "expansion", {})
    writer.append([DocQueries("d0", ["a fox"])])
    writer.finish(num_docs=1)
    msmarco = folder / "msmarco"
    msmarco.mkdir()
    (msmarco / "collection.tsv").write_text("".join(f"{doc_id}\t{title} {text}\n" for doc_id, title, text in docs))
    (msmarco / "queries.dev.small.tsv").write_text("q0\tred fox\n")
    (msmarco / "qrels.dev.small.tsv").write_text("q0\t0\te1\t1\n")
    return folder


class Reached(Exception):
    """A command got past its texts."""


DATA, RUN, OUT = "--dataset_dir={folder}", "--run_dir={run}", "--out_dir={out}"
TINY = " ".join(
    f"--gin.{name}={value}"
    for name, value in {**toy_run.SETTINGS, "T5Config.num_layers": 0, "T5Config.dropout_rate": 0.0}.items()
    if not name.startswith(("beir_pairs", "PairsOptions"))
)
RECIPE = (
    "--gin_file=recipes/{recipe}.gin --run_dir={{out}} --gin.beir_pairs.dataset_dir={{folder}} --gin.PairsOptions.batch_size=8 "
    "--gin.PairsOptions.tokenizer={{spiece}} --gin.PairsOptions.unique_in_batch=False --gin.PairsOptions.dev_split=test "
)
COMMANDS = {
    # name: (verb, its arguments, what it does once its texts are read; "" where it goes to its end)
    "evaluate beir": ("evaluate beir", DATA, ""),
    "evaluate beir a run": ("evaluate beir", f"{DATA} {RUN}", "de_jax.retrieval.corpus_embeddings.cached_docs"),
    "evaluate msmarco": ("evaluate msmarco", "--dataset_dir={folder}/msmarco", ""),
    "evaluate openqa": ("evaluate openqa", DATA, ""),
    "evaluate sentences": ("evaluate sentences", DATA, ""),
    "evaluate nanobeir": ("evaluate nanobeir", f"{DATA} {RUN}", "de_jax.retrieval.corpus_embeddings.cached_docs"),
    "score pairs": ("score pairs", f"{DATA} {OUT} --model={{run}}", "de_jax.mining.teacher.write"),
    "encode guide": ("encode guide", f"{DATA} {OUT} --model={{run}}", "de_jax.mining.guide.write"),
    "evaluate trec": (
        "evaluate trec",
        "--qrels={folder}/qrels/test.tsv.gz --topics={folder}/queries.jsonl --corpus={folder}/corpus.jsonl.gz",
        "",
    ),
    "train": ("train", RECIPE.format(recipe="samtone_query") + TINY, "de_jax.trainer.describe_run"),
    "mine": (
        "mine",
        RECIPE.format(recipe="ance_firstp") + "--gin.MODEL={run} --gin.PairsOptions.doc_tokenizer={spiece}",
        "de_jax.mine._wait_until",
    ),
    "encode corpus": ("encode corpus", f"{DATA} {RUN} {OUT}", "de_jax.retrieval.corpus_embeddings.to_dir"),
    "search": ("search", f"{DATA} {RUN} --query=fox", "de_jax.retrieval.corpus_embeddings.cached_docs"),
    "export index": ("export index", f"{DATA} {RUN} --to=parquet --out={{out}}", "de_jax.retrieval.corpus_embeddings.cached_docs"),
    "mine pairs bm25": ("mine pairs", f"{DATA} --bm25 --negatives_dir={{out}}", ""),
    "mine pairs": ("mine pairs", f"{DATA} {RUN} --negatives_dir={{out}}", "de_jax.tools.negatives.embed"),
    "doc2query train": (
        "doc2query train",
        "--dataset_dirs {folder} --tokenizer={spiece} --batch_size=1 --run_dir={out}",
        "de_jax.tools.doc2query.train_generator",
    ),
    "doc2query generate": ("doc2query generate", f"--model=x {DATA} {OUT}", "de_jax.tools.doc2query.generate_to_dir"),
    "doc2query import": ("doc2query import", f"--predictions {{folder}}/predictions.jsonl {DATA} {OUT}", ""),
    "compare latency": (
        "compare latency",
        f"--runs a={{run}} {DATA}",
        "de_jax.evaluation.latency.measure",
    ),
}


@pytest.fixture
def call(folder, trained, tmp_path, monkeypatch):
    """Calls a command up to the point where its texts are read."""

    def reached(*args, **more):
        raise Reached

    tokenizer = load_run(trained, only_sizes=True).doc.tokenizer
    generator = GeneratorRun(Path(), 0, Generator(doc2query.SIZES["tiny"]), {}, tokenizer, 8, 8)
    monkeypatch.setattr("de_jax.interop.generators.read", lambda *args, **more: generator)

    def run(name, *more):
        verb, arguments, stop = COMMANDS[name]
        if stop:
            monkeypatch.setattr(stop, reached)
        spiece = trained.parent / "spiece.model"
        argv = shlex.split(arguments.format(folder=folder, run=trained, out=tmp_path / "out", spiece=spiece))
        if stop:
            with pytest.raises(Reached):
                cli.call(verb, [*argv, *more])
        else:
            cli.call(verb, [*argv, *more])

    return run


def flag(name, setting):
    """How a command sets what its message names."""
    of_recipe = {
        "skip_empty": "--gin.beir_pairs.skip_empty=True",
        "keep_identical_ids": "--gin.PairsOptions.keep_identical_ids=True",
    }
    return of_recipe[setting] if name in ("train", "mine") else f"--{setting}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_empty_texts_by_an_option_that_it_has(call, name, capsys):
    with pytest.raises(InputError, match=r"line \d+: the text of .* is empty; remove the line, or set skip_empty\."):
        call(name)
    with pytest.warns(UserWarning, match=r"(corpus.jsonl.gz|collection.tsv): empty texts left out: 2 \(e1, e2\)"):
        call(name, flag(name, "skip_empty"))


RANKING = ("evaluate beir", "train", "mine")


@pytest.mark.parametrize("name", RANKING)
def test_dropped_judgements_are_counted_with_an_option_that_keeps_them(call, name, capsys, recwarn):
    skip = flag(name, "skip_empty")
    call(name, skip)
    (said,) = {str(one.message) for one in recwarn if "judgements dropped" in str(one.message)}
    assert ": judgements dropped, as the document has the id of its query: 1 (d3)" in said
    assert "keep_identical_ids ranks them" in said
    recwarn.clear()
    call(name, skip, flag(name, "keep_identical_ids"))
    assert not [one for one in recwarn if "judgements dropped" in str(one.message)]


OTHERS = {
    "quickstart": "builds its data",
    **dict.fromkeys(("fine_tune", "lighten", "tune"), "train as a recipe does; see tests/test_fine_tune.py"),
    "demo": "needs Gradio; see tests/tools/test_demo.py",
    "serve": "opens a corpus as search does; see tests/tools/test_serve.py",
    "analyse data": "counts empty texts; see tests/data/test_data_report.py",
    "import pydocs": "writes no empty text",
    "import openqa": "keeps passages as they are; see tests/tools/test_import_openqa.py",
    "import task": "see tests/data/test_seqio_batches.py",
    "evaluate pairs": "reads what import task wrote; see tests/data/test_pair_store.py",
    "compare runs": "reads rankings and judgements alone; see tests/evaluation/test_trec_conformance.py",
    **dict.fromkeys(("import pairs", "import negatives"), "leave bad rows out; see tests/tools/test_import_pairs.py"),
    **dict.fromkeys(
        (
            "doctor",
            "completion",
            "import model",
            "export model",
            "export hub",
            "analyse run",
            "plan",
            "verify",
            "export negatives",
            "reproduce",
        ),
        "reads no texts",
    ),
}


def test_every_verb_is_here_or_says_why_not():
    assert {verb for verb, *_ in COMMANDS.values()} == VERBS.keys() - OTHERS


NO_RANKING = (
    "encode corpus",
    "encode guide",
    "export index",
    "score pairs",
    "doc2query train",
    "doc2query generate",
    "doc2query import",
    "compare latency",
)
ANY_QUERIES = ("search", "evaluate msmarco", "evaluate trec", "evaluate openqa", "evaluate sentences", "evaluate nanobeir")
"""Ids of queries and documents may be equal by chance, so no document is left out."""


@pytest.mark.parametrize("name", sorted({verb for verb, *_ in COMMANDS.values()} - {"train", "mine"}))
def test_a_command_has_keep_identical_ids_where_it_leaves_such_documents_out(name, capsys):
    with pytest.raises(SystemExit):
        cli.call(name, ["--help"])
    assert ("--keep_identical_ids" in capsys.readouterr().out) == (name not in (*NO_RANKING, *ANY_QUERIES))


COMMANDS_OWN = {
    "de_jax/demo/gradio_page.py",  # demo
    "de_jax/training/mesh/distributed.py",  # train
    "de_jax/interop/hub.py",  # export hub
    "de_jax/mining/imported.py",  # import negatives
    "de_jax/interop/generators.py",  # doc2query
}


def test_sentences_of_the_library_name_no_flag_that_only_some_commands_have():
    root = Path(__file__).resolve().parents[2]
    named = set()
    for path in sorted((root / "de_jax").glob("*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError":
                text = " ".join(
                    part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                text = re.sub(r"de-jax \w+( [a-z]+)?( --\S+)*", "", text)  # another command, with its own flags
                if re.search(r"(?<![\w-])--(?!gin\.)[a-z_]+", text):
                    named.add(str(path.relative_to(root)))
    assert named == COMMANDS_OWN
