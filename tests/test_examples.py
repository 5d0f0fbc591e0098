"""The examples in docstrings give what they say, and the code of the pages runs: Python, gin settings and error messages."""

import ast
import csv
import dataclasses
import doctest
import functools
import importlib
import re
import shutil
from pathlib import Path

import jax
import made_of_code
import numpy as np
import pytest
import toy_run
from random_params import random_params

import de_jax
from de_jax import cli, configurables, mine, recipe_checks, trainer
from de_jax.data.text.tokenizing import Side, load_tokenizer
from de_jax.losses import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.training.optim.optimizer import linear
from de_jax.training.run.run_folder import write_run

ROOT = Path(__file__).resolve().parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*(ROOT / "de_jax").rglob("*.py"), *(ROOT / "reproduction").rglob("*.py")])
    if "    >>> " in path.read_text(encoding="utf-8")
]
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]  # the README: test_python_api.py
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = [f"{topic} {number}" for number, topic in enumerate(toy_run.TOPICS)]
OURS = {"de_jax", "functools", "jax", "numpy"}
EDITS = {
    "IVF4096,SQ8": "IVF1,SQ8",
    'faiss_device="all_gpus", faiss_gpu_mode="shard", faiss_float16=True': "",
    "batch_size=64": "batch_size=8",
}
"""For more documents, pairs and GPUs than a test has, and what runs in its place."""
SLOW = ("docs/coming_from/sentence_transformers.md", "docs/guides/fine_tune.md", "docs/guides/own_data.md", "docs/recipes.md")
SLOW += tuple(page for page in PAGES if page.startswith("docs/concepts/"))
"""Pages that compile for seconds."""
MIN_LETTERS = 20
"""Outside the gaps of a message that counts as quoted: a pattern of fewer matches almost any sentence."""
MARKS = made_of_code.MARK.findall("\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES))


def blocks(page, *languages):
    """The code of a page in some languages; what has a title is another library's."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [code for language, about, code in found if language in languages and "title=" not in about]


def python_of(page):
    return [code for code in blocks(page, "python") if not code.startswith("include ")]  # gin, coloured as Python


def in_one_program(loss):
    """The loss, compiled as one program in the time of a few of its operations."""
    return lambda e, **settings: jax.jit(functools.partial(loss, **settings))(e)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name):
    module = importlib.import_module(name)
    compiled = {loss.__name__: in_one_program(loss) for loss in configurables.LOSSES if loss.__module__ == name}
    failed, tried = doctest.testmod(module, extraglobs=compiled)
    assert tried
    assert not failed


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the pages name: a model, runs, a data set, a table, embeddings; all tiny."""
    root = tmp_path_factory.mktemp("pages")
    data = toy_run.write_dataset(root / "data" / "scifact")
    shutil.copy(data / "qrels" / "dev.tsv", data / "qrels" / "test.tsv")
    shutil.copy(data / "spiece.model", root / "data" / "spiece.model")
    side = Side(load_tokenizer(root / "data"), 16)
    encoder = T5Config(vocab_size=160, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=8)
    model = DualEncoder(tower, tower)
    write_run(root / "runs" / "minilm", random_params(model.init), model=model, query=side, doc=side)
    shutil.copytree(root / "runs" / "minilm", root / "runs" / "tuned")
    de_jax.load(root / "runs" / "minilm", devices=1).save(root / "all-MiniLM-L6-v2", format="sentence_transformers")
    with open(root / "qa.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *((text, f"the {text}") for text in TEXTS)])
    writer = EmbeddingWriter(root / "embeddings" / "msmarco", {"num_texts": len(TEXTS), "model": "", "texts": ""}, {})
    writer.append(np.eye(len(TEXTS), dtype=np.float32))
    writer.finish(TEXTS)
    return root


@pytest.fixture(scope="module")
def load(workplace):
    """`de_jax.load` by one device, which opens a model once for all pages."""
    return functools.cache(functools.partial(de_jax.load, devices=1))


@pytest.fixture
def reader(workplace, load, tmp_path, monkeypatch):
    """Where a page's code runs, with a model that is opened once, and without a second process that mines."""
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DE_JAX_CACHE", str(workplace / "cache"))
    monkeypatch.setattr(de_jax, "load", load)
    monkeypatch.setattr(mine, "mine", lambda recipe, run_dir: iter(()))


def check_and_pretend(recipe, run_dir):
    """In the place of `de_jax.train`: refuses what shows before data, and leaves a run."""
    recipe_checks.check_before_data(recipe, recipe.devices.mesh(), recipe.model.shapes(), is_fresh=True)
    shutil.copytree("runs/minilm", run_dir, dirs_exist_ok=True)


def train_two_steps(recipe, run_dir):
    optimization = dataclasses.replace(recipe.optimization, num_steps=2, schedule=linear)
    shutil.rmtree(run_dir, ignore_errors=True)
    summary = trainer.train(dataclasses.replace(recipe, optimization=optimization), run_dir)
    assert summary["step"] == 2


def is_ours(code):
    """Whether the code needs this library alone."""
    nodes = [*ast.walk(ast.parse(code))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in modules} <= OURS and "transformers." not in code


WITH_PYTHON = [page for page in PAGES if python_of(page)]
WITH_TRAINING = [page for page in WITH_PYTHON if any("de_jax.train(" in code for code in python_of(page))]


@pytest.mark.parametrize(
    ("page", "train"),
    [
        *(pytest.param(page, check_and_pretend, marks=[pytest.mark.soak] * (page in SLOW)) for page in WITH_PYTHON),
        *(pytest.param(page, train_two_steps, marks=pytest.mark.soak) for page in WITH_TRAINING),
    ],
)
def test_python_of_a_page_runs(page, train, reader, load, monkeypatch):
    """Code that needs other libraries is compiled alone; their own tests are in the folder of its topic."""
    monkeypatch.setattr(de_jax, "train", train)
    names = {"numpy": np, "texts": TEXTS, "queries": load("runs/minilm").encode_query(TEXTS)}
    for code in python_of(page):
        for there, instead in EDITS.items():
            code = code.replace(there, instead)
        program = compile(code, page, "exec")
        if is_ours(code):
            exec(program, names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "gin")])
def test_gin_settings_of_a_page_are_known(page, tmp_path, monkeypatch):
    monkeypatch.setitem(configurables._own, "my_loss", in_batch_softmax)
    for number, code in enumerate(blocks(page, "gin")):
        (tmp_path / f"{number}.gin").write_text(code, encoding="utf-8")
        configurables.read([str(tmp_path / f"{number}.gin")])


def test_messages_that_a_page_quotes_are_those_of_the_code():
    texts = [message.text for message in made_of_code.all_messages() if message.num_letters >= MIN_LETTERS]
    known = re.compile("error: (?:" + "|".join(re.escape(text).replace(made_of_code.GAP, ".*") for text in texts) + ")")
    quoted = [line for code in blocks("docs/troubleshooting.md", "console") for line in code.splitlines()]
    assert len(quoted) > 10
    assert [line for line in quoted if not known.fullmatch(line)] == []
    others = ["error: this sentence is of another program.", "error: runs/qa is wrong (line 3); mend or remove it."]
    assert [line for line in [*others, quoted[0].replace("; ", "; do ")] if known.fullmatch(line)] == []


@pytest.mark.parametrize("name", made_of_code.MAKERS)
def test_what_is_made_of_code_names_all_of_it(name):
    page = "\n".join(made_of_code.MAKERS[name]())
    counts = {
        "recipes": (len(re.findall(r"^\| \[", page, re.MULTILINE)), len([*(ROOT / "gin_configs" / "recipes").glob("*.gin")])),
        "exit_codes": (re.findall(r"^\| (\d+)", page, re.MULTILINE), ["0", "2", "75", "76", "130", "141"]),
        "messages": (page.count("\n- `") > 400, True),
        "commands": (re.findall(r"^### (.+)", page, re.MULTILINE), [*cli.VERBS]),
        "old_commands": (page.count("\n| `"), len(cli.ALIASES)),
    }
    found, expected = counts[name]
    assert found == expected
    assert MARKS.count(name) == 1
