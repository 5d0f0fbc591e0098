"""`de-jax completion`."""

import argparse
from pathlib import Path
from typing import Literal

import shtab

from de_jax import cli


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Prints a script that completes verbs, options, choices and file names of de-jax on Tab, for bash, zsh or fish.

    de-jax completion bash > ~/.local/share/bash-completion/completions/de-jax
    de-jax completion zsh > ~/.zfunc/_de-jax               # ~/.zfunc is in fpath, before compinit
    de-jax completion fish > ~/.config/fish/completions/de-jax.fish

    Open a new shell afterwards. Repeat the command after an update of de_jax: the script holds the options of this version.

    Args:
        shell: the shell that reads the script.
    """
    print(shtab.complete(parser_of_all_verbs(), shell))


def parser_of_all_verbs() -> argparse.ArgumentParser:
    """One parser with every verb as a sub-command. Arguments without a type are paths, so files complete them."""
    parser = argparse.ArgumentParser("de-jax")
    verbs = parser.add_subparsers(metavar="verb")
    kinds: dict[str, argparse._SubParsersAction] = {}
    for name in sorted(cli.VERBS):
        verb, _, kind = name.partition(" ")
        if kind and verb not in kinds:
            above = verbs.choices.get(verb) or verbs.add_parser(verb, help=", ".join(cli.kinds_of(verb)))
            kinds[verb] = above.add_subparsers(metavar="kind")
        command = cli.command_of(name)
        own = (kinds[verb] if kind else verbs).add_parser(
            kind or verb, help=command.summary, parents=[command.parser], add_help=False
        )
        for action in own._actions:
            if action.nargs != 0 and not action.choices and action.type in (None, Path):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
