"""Commands that make the papers' figures and comparisons of a run: `python -m reproduction <verb> <kind>`, with flags as de-jax."""

from __future__ import annotations

from collections.abc import Sequence

from de_jax import arguments, cli
from de_jax.flags import Command

VERBS = {
    "analyse embeddings": "analyse",
    "analyse negatives": "analyse",
    "compare expansions": "expansions",
    "encode tokens": "vocabulary",
    "train daft": "daft",
}
"""The verbs, each with its module here; the function has the verb's name, with _ for the space."""


def call(verb: str, argv: Sequence[str]) -> None:
    """Runs a command and prints its report; see `de_jax.cli.call`."""
    cli.report(command_of(verb), argv)


def command_of(verb: str) -> Command:
    """The command of a verb."""
    return Command(f"reproduction.{VERBS[verb]}", verb.replace(" ", "_"), verb, vars(arguments), "python -m reproduction")
