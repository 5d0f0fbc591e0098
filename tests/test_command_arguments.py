"""Every path of every command may be in a bucket; other addresses and numbers out of their range are refused in one sentence."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from de_jax import cli, command, configurables
from de_jax.cli import VERBS
from de_jax.settings import Seed, numeric
from de_jax.types import InputError


def parser_of(verb):
    """The arguments of a command; nothing runs."""
    return cli.command_of(verb).parser


def given(action, value):
    """A command line that gives this argument a value."""
    return f"{action.option_strings[-1]}={value}" if action.option_strings else str(value)


@pytest.mark.parametrize("verb", VERBS)
def test_any_path_of_any_command_may_be_in_a_bucket_and_at_no_other_address(verb, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", "/cache")
    parser = parser_of(verb)
    for action in parser._actions:
        if action.nargs == 0 or action.choices or action.type not in (None, command.Path):
            continue
        for value in ("https://host/run", "name=hdfs://host/run"):
            with pytest.raises(InputError, match=r"://host/run; it must be a path, or an address gs:// or s3://"):
                parser.parse_args([given(action, value)])
        assert str(parser._get_value(action, "name=gs://bucket/run")) == "name=/cache/buckets/gs/bucket/run"


@pytest.mark.parametrize("verb", VERBS)
def test_every_number_of_every_command_has_a_range(verb):
    parser = parser_of(verb)
    for action in parser._actions:
        if action.nargs == 0 or action.choices or action.type in (None, str, command.Path):
            continue
        for value in ("x", "nan", "1e400"):
            with pytest.raises(InputError, match=rf"^{action.option_strings[-1]} is {value}; it must be [\w ,]+\.$"):
                parser.parse_args([f"{action.option_strings[-1]}={value}"])


@pytest.mark.parametrize(
    ("verb", "arguments", "sentence"),
    [
        ("import pairs", ["x.csv", "--format=beir", "--out_dir="], "--out_dir is empty; give a path, such as \\. for this folder"),
        ("evaluate beir", ["--dataset_dir="], "--dataset_dir is empty"),
        ("search", ["--dataset_dir=x", "--run_dir=", "--query=fox"], "--run_dir is empty; give a value"),
        ("import pairs", ["x.csv", "--model=m", "--out_dir=o", "--dev_table=y.csv", "--dev_fraction=0.5"],
         "--dev_fraction changes nothing beside --dev_table"),
        ("evaluate beir", ["--dataset_dir=x", "--run_dir=r", "--num_generated=3"],
         "--num_generated changes nothing without --expansion; give both, or leave --num_generated out"),
        ("encode corpus", ["--dataset_dir=x", "--run_dir=r", "--out_dir=o", "--expand_as=typical"],
         "--expand_as changes nothing without --expansion"),
        ("evaluate trec", ["--qrels=x", "--topics=x", "--corpus=x", "--no_bm25"], "--no_bm25 changes nothing without --run_dir"),
        ("evaluate beir", ["--dataset_dir=x", "--run_dir=r", "--no_bm25", "--k1=1"], "--k1 changes nothing beside --no_bm25"),
    ],
)  # fmt: skip
def test_empty_paths_and_flags_without_effect_are_refused(verb, arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("query,doc\na,b\n")
    with pytest.raises(InputError, match=sentence):
        cli.call(verb, arguments)


def test_every_flag_of_a_run_is_refused_without_one():
    parser = parser_of("evaluate beir")
    (of_run,) = [group._group_actions for group in parser._action_groups if group.title == "The run"]
    for action in of_run:
        if action.dest != "run_dir":
            value = action.choices[-1] if action.choices else "3"
            flag = action.option_strings[-1] if action.nargs == 0 else given(action, value)
            with pytest.raises(InputError, match=f"^--{action.dest} changes nothing without --run_dir; give both"):
                cli.call("evaluate beir", ["--dataset_dir=x", flag])


@pytest.mark.parametrize("name", ["n" * 300, "loop/x"])
def test_an_output_that_cannot_be_there_is_a_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("query,doc\na,b\n")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit) as exit_:
        command.run(lambda: cli.call("import pairs", ["x.csv", "--format=beir", f"--out_dir={name}"]))
    assert exit_.value.code == command.EXIT_INPUT
    assert capsys.readouterr().err.startswith("error: ")


def test_a_text_may_hold_an_address_and_a_seed_may_be_0():
    parser = command.Parser()
    parser.add_argument("--query", type=str)
    parser.add_argument("--k", type=int)
    parser.add_argument("--seed", type=numeric(Seed))
    parsed = parser.parse_args(["--query", "see https://example.org", "--k", "3", "--seed", "0"])
    assert (parsed.query, parsed.k, parsed.seed) == ("see https://example.org", 3, 0)
    for argument, sentence in (("--k=0", r"^--k is 0; it must be at least 1\.$"), ("--l=1", "^unrecognized arguments: --l=1")):
        with pytest.raises(InputError, match=sentence):
            parser.parse_args([argument])


ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(text):
    """(verb, arguments) of every `de-jax` command in the shell code of a page; what is left out there is left out here."""
    for code in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in code.replace("\\\n", " ").splitlines():
            for command_line in re.findall(r"(?:^|[\s\"])de-jax +([^&|]*)", line):
                plain = re.sub(r"<[^>]*>|\$\w+", "x", command_line)
                if plain.count('"') % 2:
                    plain = plain.rpartition('"')[0]  # which ends a command for another machine
                yield cli.split([argument for argument in shlex.split(plain, comments=True) if argument != "..."])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_have_known_arguments(page, monkeypatch):
    text = page.read_text(encoding="utf-8")
    monkeypatch.setattr(configurables, "_own", {})
    for code in re.findall(r'^```python title="[^"]*"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL):
        if "configurables.register(" in code:
            exec(code, {})
    for verb, arguments in commands_of(text):
        flags = {option for action in parser_of(verb)._actions for option in action.option_strings}
        given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        assert {flag for flag in given if not flag.startswith("--gin.")} <= flags, (verb, arguments)
        files = [argument.partition("=")[2] for argument in arguments if argument.startswith("--gin_file=")]
        settings = [argument.removeprefix("--gin.") for argument in arguments if argument.startswith("--gin.")]
        configurables.read(files, settings)  # refuses unknown files and names, and values out of their range


def shell_code_of(text):
    """The shell code of a page, a line for each command or setting in its sentences; texts in angle brackets are for the reader."""
    blocks = re.findall(r"^```bash[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    flags = re.findall(r'`("?--gin[.][^`]*|de-jax [^`]*)`', re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return re.sub(r"<[^>\n]*>", "x", "\n".join([*blocks, *(f"de-jax {flag}" for flag in flags)]))


def refusal_of_bash(code):
    return subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_bash_reads_the_shell_code_of_a_page(page):
    assert refusal_of_bash(shell_code_of(page.read_text(encoding="utf-8"))) == ""


def test_bash_refuses_a_setting_without_quotes():
    code = shell_code_of("Use `--gin.HardNegatives.negative_cache=@NegativeCache()` with <model>.")
    assert "unexpected token `('" in refusal_of_bash(code)


def examples_of(text):
    """(verb, arguments) of every command in a command's own help."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.match(r" *(?:\w+=\S+ )?de-jax +(.*)", line):
            command_line, *_ = re.split(r" [&|>]", re.sub(r"<[^>]*>", "x", found[1]))
            yield cli.split([argument for argument in shlex.split(command_line, comments=True) if argument != "..."])


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_help_are_accepted_by_their_commands(verb):
    examples = list(examples_of(parser_of(verb).description))
    assert verb in [shown for shown, _ in examples]
    for shown, arguments in examples:
        cli.command_of(shown).parse(arguments)


TAB = """
source ./de-jax.bash
offers() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    _shtab_de_jax "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[@]}"
}
"""
"""What bash does when a person presses Tab after the words of `offers`."""


def test_tab_completes_verbs_options_choices_and_files(tmp_path, capsys):
    cli.call("completion", ["bash"])
    (tmp_path / "de-jax.bash").write_text(capsys.readouterr().out)
    (tmp_path / "runs").mkdir()
    asked = [
        "quick",
        "evaluate be",
        "evaluate beir --dataset_d",
        "evaluate beir --faiss_device ''",
        "verify ru",
        "doc2query train --ru",
    ]
    code = TAB + "".join(f"offers de-jax {words}\n" for words in asked)
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    offered = ["quickstart", "beir", "--dataset_dir --dataset_dirs", "cpu gpu all_gpus", "runs", "--run_dir"]
    assert done.stdout.splitlines() == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_know_every_verb(shell, capsys):
    cli.call("completion", [shell])
    script = capsys.readouterr().out
    assert not [word for verb in VERBS for word in verb.split() if word not in script]
    assert "faiss_device" in script


class _Full(io.StringIO):
    """A log on a full disk, or one that nobody reads."""

    def __init__(self, number):
        super().__init__()
        self._number = number

    def write(self, text):
        raise OSError(self._number, os.strerror(self._number))


def test_a_log_on_a_full_disk_or_none_at_all_ends_nothing(monkeypatch):
    done = []
    for stream in (_Full(errno.ENOSPC), None):
        monkeypatch.setattr(sys, "stderr", stream)
        command.run(lambda: done.append(print("a line", file=sys.stderr, flush=True)))
        assert sys.stderr is stream
    assert len(done) == 2
    monkeypatch.setattr(sys, "stderr", _Full(errno.EPIPE))
    with pytest.raises(SystemExit) as end:
        command.run(lambda: print("a line", file=sys.stderr))
    assert end.value.code == command.EXIT_PIPE


def test_a_locale_without_a_letter_shows_its_number(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    command.run(lambda: print("Hà Nội"))
    out.flush()
    assert out.buffer.getvalue() == b"H\xe0 N\\u1ed9i\n"


def test_a_sentence_with_unicodes_line_ends_is_told_whole(capsys):
    def main():
        raise InputError("the id a\u2028b\x85c is there twice.\n  where gin passed through")

    with pytest.raises(SystemExit):
        command.run(main)
    assert capsys.readouterr().err.endswith("error: the id a\u2028b\x85c is there twice.\n")


def test_a_share_of_a_gpus_memory_takes_the_place_of_another_under_any_name(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5")
    command.use_memory_fraction(0.25)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.25
    with pytest.raises(InputError, match="--memory_fraction is 2; give a share"):
        command.use_memory_fraction(2)
