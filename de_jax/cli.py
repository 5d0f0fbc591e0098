"""`de-jax <verb> [kind]`: every command under one name. A verb is a function in `tools`, whose signature makes its flags."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from de_jax import __version__, arguments, command
from de_jax.flags import Command
from de_jax.settings import meant
from de_jax.types import InputError

GROUPS = {
    "Start here": {"quickstart": "quickstart", "doctor": "doctor", "completion": "completion"},
    "Models": {
        "import model": "models",
        "export model": "models",
        "export hub": "models",
        "verify": "verify",
    },
    "Data": {
        "import pairs": "data",
        "import task": "data",
        "import openqa": "data",
        "import pydocs": "data",
        "import negatives": "negatives",
        "export negatives": "negatives",
    },
    "Training": {
        "fine_tune": "tune",
        "tune": "tune",
        "lighten": "tune",
        "train": "train",
        "plan": "train",
        "mine": "train",
        "mine pairs": "negatives",
        "score pairs": "encode",
        "encode guide": "encode",
        "doc2query train": "doc2query",
        "doc2query generate": "doc2query",
        "doc2query import": "doc2query",
    },
    "Search": {"encode corpus": "encode", "search": "search", "demo": "search", "serve": "serve", "export index": "search"},
    "Evaluation": {
        "evaluate beir": "evaluate",
        "evaluate nanobeir": "evaluate",
        "evaluate msmarco": "evaluate",
        "evaluate trec": "evaluate",
        "evaluate sentences": "evaluate",
        "evaluate openqa": "evaluate",
        "evaluate pairs": "evaluate",
        "compare runs": "compare",
        "compare latency": "compare",
    },
    "Analysis": {"analyse data": "analyse", "analyse run": "analyse"},
}
"""The verbs as `--help` shows them: {group: {verb: module in tools}}; the function has the verb's name, with _ for the space."""
VERBS = {verb: module for group in GROUPS.values() for verb, module in group.items()}
ALIASES = {
    **{name.replace(" ", "_"): name for name in VERBS if " " in name and name.split()[0] in ("analyse", "compare", "evaluate")},
    "build_pydocs": "import pydocs",
    "encode_corpus": "encode corpus",
    "encode_guide": "encode guide",
    "export_batches": "import task",
    "export_index": "export index",
    "export_model": "export model",
    "export_negatives": "export negatives",
    "import_model": "import model",
    "import_negatives": "import negatives",
    "import_openqa": "import openqa",
    "import_pairs": "import pairs",
    "inspect_data": "analyse data",
    "inspect_run": "analyse run",
    "measure_query_latency": "compare latency",
    "mine_negatives": "mine pairs",
    "plan_run": "plan",
    "push_to_hub": "export hub",
    "score_pairs": "score pairs",
}
"""Old names, which go after 0.2: {old: new}; the flags are the same."""


def main() -> None:
    """Runs the verb that the command line begins with."""
    command.run(_main)


def _main() -> None:
    call(*split(sys.argv[1:]))


def call(verb: str, argv: Sequence[str]) -> None:
    """Runs a command and prints its reports, a JSON object a line.

    Raises:
        InputError: flags or inputs that cannot be used.
        SystemExit: after --help, or when the command was stopped.
    """
    report(command_of(verb), argv)


def report(of: Command, argv: Sequence[str]) -> None:
    """As `call`, for a command that need not be a verb."""
    found = of.call(argv, ready=command.keep_compiled)
    for one in found if isinstance(found, Iterator | list) else [found]:
        if one is not None:
            print(json.dumps(one), flush=True)


@functools.cache
def command_of(verb: str) -> Command:
    """The command of a verb; reads one file, and imports no JAX."""
    return Command(f"de_jax.tools.{VERBS[verb]}", verb.replace(" ", "_"), verb, vars(arguments))


def kinds_of(verb: str) -> list[str]:
    """The kinds of a verb, such as "beir" of "evaluate"."""
    return [name.partition(" ")[2] for name in VERBS if name.startswith(f"{verb} ")]


def split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The verb, and the rest of a command line."""
    first, second = (*argv, "", "")[:2]
    if first in ("", "--help", "-h"):
        _exit(_usage(VERBS))
    if first == "--version":
        _exit(f"de_jax {__version__}")
    if first in ALIASES:
        print(f"de-jax {first} is now de-jax {ALIASES[first]}; the old name goes with the next release.", file=sys.stderr)
        return ALIASES[first], argv[1:]
    if f"{first} {second}" in VERBS:
        return f"{first} {second}", argv[2:]
    kinds = kinds_of(first)
    if first in VERBS and (second.startswith("-") or not kinds or not second):
        return first, argv[1:]
    if not kinds:
        verbs = dict.fromkeys([*(name.split()[0] for name in VERBS), *ALIASES])
        raise InputError(f"'{first}' is not a verb of de-jax{meant(first, verbs)}; de-jax --help lists them.")
    if second in ("--help", "-h"):
        _exit(_usage([name for name in VERBS if name.split()[0] == first]))
    if not second or second.startswith("-"):
        raise InputError(f"de-jax {first} needs a kind: {', '.join(kinds)}.")
    raise InputError(f"'{second}' is not a kind of de-jax {first}{meant(second, kinds)}; there are {', '.join(kinds)}.")


def _exit(text: str) -> None:
    print(text)
    sys.exit()


def _usage(verbs: Any) -> str:
    """The verbs by group, each with the first sentence of its help."""
    lines = ["usage: de-jax <verb> [<kind>] [--help] ..."]
    for group, known in GROUPS.items():
        if shown := [name for name in known if name in verbs]:
            lines += ["", group, *(f"  {name:<20}{command_of(name).summary}" for name in shown)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
