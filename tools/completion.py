"""Prints a script that completes verbs, options, choices and file names of de-jax on Tab, for bash, zsh or fish.

de-jax completion bash > ~/.local/share/bash-completion/completions/de-jax
de-jax completion zsh > ~/.zfunc/_de-jax               # ~/.zfunc is in fpath, before compinit
de-jax completion fish > ~/.config/fish/completions/de-jax.fish

Open a new shell afterwards. Repeat the command after an update of de_jax: the script holds the options of this version.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import shtab

from de_jax import command
from de_jax.cli import VERBS

SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str] | None = None) -> None:
    """The command; prints the script."""
    shell = _parse_args(argv).shell
    print(shtab.complete(parser_of_all_verbs(), shell))


def parser_of_all_verbs() -> argparse.ArgumentParser:
    """One parser with every verb as a sub-command. Arguments without a type are paths, so files complete them."""
    parser = argparse.ArgumentParser("de-jax")
    verbs = parser.add_subparsers(metavar="verb")
    for verb, (module, summary) in VERBS.items():
        own = command.parser_of(importlib.import_module(module).main)
        _complete_paths(verbs.add_parser(verb, help=summary, parents=[own], add_help=False))
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _complete_paths(part)
        elif action.nargs != 0 and not action.choices and action.type in (None, Path):
            action.complete = shtab.FILE


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("shell", choices=SHELLS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
