"""Every command refuses an address in the place of a path, and a number out of its range, in one sentence."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from de_jax import command, configurables
from de_jax.cli import VERBS
from de_jax.settings import Seed, numeric
from de_jax.types import InputError


class Parsed(Exception):
    """Raised when a command got past its arguments."""


@pytest.fixture
def actions_of(monkeypatch):
    """The arguments of a command, by the parser that has them; nothing runs."""

    def of(verb):
        found = []

        def parse(parser, *_):
            found.append(parser)
            raise Parsed

        with monkeypatch.context() as patch:
            patch.setattr(command.Parser, "parse_known_args", parse)
            with pytest.raises(Parsed):
                importlib.import_module(VERBS[verb][0]).main([])
        return found[0]

    return of


def given(action, value):
    """A command line that gives this argument a value."""
    return f"{action.option_strings[-1]}={value}" if action.option_strings else str(value)


def leaves(parser):
    """The parser, or in its place those of its actions."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return (
        list(choices[0].values()) if choices and choices[0] and hasattr(next(iter(choices[0].values())), "parse_args") else [parser]
    )


@pytest.mark.parametrize("verb", VERBS)
def test_no_path_of_any_command_may_be_an_address(verb, actions_of):
    for parser in leaves(actions_of(verb)):
        for action in parser._actions:
            if action.nargs == 0 or action.choices or action.type not in (None, command.Path):
                continue
            for value in ("gs://bucket/run", "s3://bucket/run", "name=gs://bucket/run"):
                with pytest.raises(InputError, match=r"://bucket/run; it must be a path on this machine"):
                    parser.parse_args([given(action, value)])


@pytest.mark.parametrize("verb", VERBS)
def test_every_number_of_every_command_has_a_range(verb, actions_of):
    for parser in leaves(actions_of(verb)):
        for action in parser._actions:
            if action.nargs == 0 or action.choices or action.type in (None, str, command.Path):
                continue
            for value in ("x", "nan", "1e400"):
                with pytest.raises(InputError, match=rf"^{action.option_strings[-1]} is {value}; it must be [\w ,]+\.$"):
                    parser.parse_args([f"{action.option_strings[-1]}={value}"])


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
                verb, *arguments = shlex.split(plain, comments=True)
                yield verb, [argument for argument in arguments if argument != "..."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_have_known_arguments(page, actions_of):
    for verb, arguments in commands_of(page.read_text(encoding="utf-8")):
        flags = {option for parser in leaves(actions_of(verb)) for action in parser._actions for option in action.option_strings}
        given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        assert {flag for flag in given if not flag.startswith("--gin.")} <= flags, (verb, arguments)
        files = [argument.partition("=")[2] for argument in arguments if argument.startswith("--gin_file=")]
        settings = [argument.removeprefix("--gin.") for argument in arguments if argument.startswith("--gin.")]
        configurables.read(files, settings)  # refuses unknown files and names, and values out of their range
