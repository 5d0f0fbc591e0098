"""`de-jax` as a user meets it: the help of every verb, wrong verbs and flags, old names, and what a refusal costs."""

import importlib
import json
import os
import re
import subprocess
import sys
import typing
import warnings

import pytest

import de_jax
from de_jax import cli, command, gin_settings, settings
from de_jax.data.text import msmarco
from de_jax.interop import export, huggingface
from de_jax.retrieval import corpus_embeddings
from de_jax.tools import doc2query
from de_jax.types import InputError

FIRST_WORDS = sorted({verb.split()[0] for verb in cli.VERBS})


def printed(monkeypatch, capsys, *argv):
    """(exit status, stdout, stderr) of `de-jax` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["de-jax", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_shows_an_example_that_an_installation_can_run(verb, monkeypatch, capsys):
    code, out, _ = printed(monkeypatch, capsys, *verb.split(), "--help")
    assert not code
    assert re.search(rf"^ *(\w+=\w+ )?de-jax {verb}( +\S|$)", out, re.MULTILINE), out
    assert "python -m" not in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_flag_has_a_help(verb):
    without = [flag.name for flag in cli.command_of(verb).flags if not flag.help and not flag.is_bindings]
    assert without == []


def test_help_lists_every_verb_and_that_of_a_verb_its_kinds(monkeypatch, capsys):
    code, out, _ = printed(monkeypatch, capsys, "--help")
    assert not code
    assert re.findall(r"^  (\w+(?: \w+)?)  ", out, re.MULTILINE) == list(cli.VERBS)
    assert re.findall(r"^(?!usage)\S.*$", out, re.MULTILINE) == list(cli.GROUPS)
    code, out, _ = printed(monkeypatch, capsys, "compare", "--help")
    assert not code
    assert re.findall(r"^  (\w+ \w+)  ", out, re.MULTILINE) == ["compare runs", "compare latency"]


def test_verbs_are_few():
    assert len(FIRST_WORDS) <= 21


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("serach", "'serach' is not a verb of de-jax (did you mean search?); de-jax --help lists them."),
        ("evaluate", "de-jax evaluate needs a kind: beir, nanobeir, msmarco, trec, sentences, openqa, pairs."),
        ("compare run", "'run' is not a kind of de-jax compare (did you mean runs?); there are runs, latency."),
        ("mine pair", "'pair' is not a kind of de-jax mine (did you mean pairs?); there are pairs."),
        ("search --dataset_dri=x",
         "--dataset_dri is not a flag of de-jax search (did you mean --dataset_dir?); its --help lists them."),
        ("evaluate beir --run_dir=x --dataset_dir=y --query=z",
         "--query is not a flag of de-jax evaluate beir (did you mean --query_prompt?); its --help lists them."),
        ("search --run_dir=x", "--dataset_dir is missing; give a BEIR folder or a table."),
        ("search --run_dir", "--run_dir has no value; give the model: a run, a folder with a model, or a hub name."),
        ("search --run_dir=x --dataset_dir=y --k=0", "--k is 0; it must be at least 1."),
        ("search --run_dir=x --dataset_dir=y z", "'z' is left over; write --flag=value, and several values --flag a b."),
        ("search --run_dir=x --dataset_dir=y --skip_empty=1", "--skip_empty takes no value; leave =1 out."),
        ("export index --run_dir=x --dataset_dir=y --to=parquett",
         "--to is parquett; it must be parquet or milvus (did you mean parquet?)."),
        ("evaluate beir --run_dir=x", "--dataset_dir or --dataset_dirs is missing; give one."),
        ("evaluate beir --dataset_dir=x --dataset_dirs y", "--dataset_dir and --dataset_dirs exclude each other; give one."),
        ("train --gin_file=recipes/fine_tun.gin --run_dir=x",
         "the gin file recipes/fine_tun.gin does not exist (did you mean recipes/fine_tune.gin?); the recipes are in "
         f"{gin_settings.RECIPES_DIR / 'recipes'}."),
        ("compare runs --qrels=x --systems a b", "--systems has 'a'; give each name once, as name=value."),
        ("plan --topology=cpu:8", "--gin_file is missing; give one."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(line, sentence, monkeypatch, capsys):
    code, out, err = printed(monkeypatch, capsys, *line.split())
    assert (code, out, err) == (2, "", f"error: {sentence}\n")


REFUSED = """
import sys
from de_jax import cli
for verb in [*cli.VERBS, "absent_verb", "evaluate absent_kind"]:
    sys.argv = ["de-jax", *verb.split(), "--absent_flag=1"]
    try:
        cli.main()
    except SystemExit as stop:
        assert stop.code == 2, stop.code
heavy = {"jax", "flax", "optax", "orbax", "scipy", "transformers", "tensorflow", "matplotlib", "faiss", "huggingface_hub", "torch"}
print(len(sys.modules), *sorted(heavy & sys.modules.keys()))
"""
MOST_MODULES = 330


def test_a_refused_flag_of_any_verb_imports_nothing_heavy():
    """0.3 CPU seconds, 4 where JAX was imported; modules are counted, as a busy machine measures no time."""
    number, *heavy = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True).stdout.split()
    assert heavy == []
    assert int(number) < MOST_MODULES


def test_old_names_are_aliases_that_say_so(monkeypatch, capsys):
    assert set(cli.ALIASES.values()) <= set(cli.VERBS)
    assert not cli.ALIASES.keys() & set(FIRST_WORDS)
    code, _, err = printed(monkeypatch, capsys, "evaluate_beir", "--run_dir=x")
    assert code == 2
    said, error = err.splitlines()
    assert said == "de-jax evaluate_beir is now de-jax evaluate beir; the old name goes with the next release."
    assert error == "error: --dataset_dir or --dataset_dirs is missing; give one."


def test_a_warning_of_a_command_is_its_sentence_alone(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    printed(monkeypatch, capsys, "--version")
    assert warnings.formatwarning("rows left out: 1.", UserWarning, "outputs.py", 368) == "rows left out: 1.\n"


def test_the_version_is_the_packages(monkeypatch, capsys):
    assert printed(monkeypatch, capsys, "--version") == (None, f"de_jax {de_jax.__version__}\n", "")


@pytest.mark.parametrize("module", ["de_jax", "de_jax.cli"])
def test_python_m_is_the_same_command(module):
    done = subprocess.run([sys.executable, "-m", module, "serach"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: 'serach' is not a verb of de-jax (did you mean search?); de-jax --help lists them.\n"


def test_choices_of_flags_are_those_of_the_library():
    """They are written twice, as flags are checked before the library is imported."""

    def choices(verb, name):
        hint = next(flag.hint for flag in cli.command_of(verb).flags if flag.name == name)
        return typing.get_args(next((one for one in typing.get_args(hint) if typing.get_origin(one) is typing.Literal), hint))

    assert set(choices("export model", "format")) == set(export.FORMATS)
    assert choices("import model", "pooling") == tuple(huggingface.POOLING)
    assert choices("evaluate msmarco", "kind") == msmarco.KINDS
    assert choices("doc2query train", "size") == tuple(doc2query.SIZES)
    for verb in ("encode corpus", "mine", "mine pairs"):
        (texts_per_shard,) = [flag.default for flag in cli.command_of(verb).flags if flag.name == "texts_per_shard"]
        assert texts_per_shard == corpus_embeddings.TEXTS_PER_SHARD


@pytest.mark.parametrize("verb", ["fine_tune", "tune", "lighten", "plan", "doc2query train", "doc2query generate"])
def test_flags_that_are_read_from_a_function_of_the_library_are_its_parameters(verb):
    """They are read from its source, without an import."""
    found = cli.command_of(verb)
    place = getattr(importlib.import_module(found.module), found.name).flags_like[0]
    module, _, name = place.rpartition(".")
    real = settings.settings_of(getattr(importlib.import_module(module), name))
    given = [flag for flag in found.flags if not flag.group and flag.name in real and flag.name not in ("model", "run_dir")]
    assert len(given) >= 5
    for flag in given:
        assert (flag.default, flag.help != "") == (real[flag.name].value, True), flag.name


def test_a_command_prints_an_object_a_line(monkeypatch, capsys):
    class Found:
        def __init__(self, found):
            self.call = lambda argv, ready: found

    for found, lines in (
        ({"a": 1}, [{"a": 1}]),
        (None, []),
        ([{"a": 1}, {"b": 2}], [{"a": 1}, {"b": 2}]),
        (iter([{"a": 1}]), [{"a": 1}]),
    ):
        monkeypatch.setattr(cli, "command_of", lambda verb, found=found: Found(found))
        cli.call("search", [])
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines


def test_fields_of_a_dataclass_are_named_by_their_flags(tmp_path):
    with pytest.raises(InputError, match=r"^--num_beams is 4; it must be at least num_queries = 10\.$"):
        cli.call("doc2query generate", ["--model=x", "--dataset_dir=x", f"--out_dir={tmp_path}", "--method=beam"])


def test_libtpu_is_answered_where_there_is_no_tpu(tmp_path, monkeypatch):
    for variable in command.LIBTPU_ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tpu" / "vfio").mkdir(parents=True)
    (tmp_path / "tpu" / "vfio" / "0").touch()
    command.answer_libtpu(tmp_path / "tpu")
    assert not command.LIBTPU_ENVIRONMENT.keys() & os.environ.keys()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    command.answer_libtpu(tmp_path)
    assert {name: os.environ[name] for name in command.LIBTPU_ENVIRONMENT} == {
        **command.LIBTPU_ENVIRONMENT,
        "TPU_WORKER_HOSTNAMES": "mine",
    }
    for variable in command.LIBTPU_ENVIRONMENT:
        monkeypatch.delenv(variable)
