"""`de-jax <verb> [kind]`: every command under one name. A verb is a function in `tools`, whose signature makes its flags."""

import functools
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from de_jax import __version__, arguments, command
from de_jax.flags import Command
from de_jax.settings import meant
from de_jax.types import InputError

GROUPS = {
    "Start here": {"quickstart": ["quickstart"], "doctor": ["doctor"], "completion": ["completion"]},
    "Models": {"models": ["import model", "export model", "export hub"], "verify": ["verify"]},
    "Data": {
        "data": ["import pairs", "import task", "import openqa", "import pydocs"],
        "negatives": ["import negatives", "export negatives"],
    },
    "Training": {
        "tune": ["fine_tune", "tune", "lighten"],
        "train": ["train", "plan", "mine"],
        "negatives": ["mine pairs"],
        "encode": ["score pairs", "encode guide"],
        "doc2query": ["doc2query train", "doc2query generate", "doc2query import"],
    },
    "Search": {"encode": ["encode corpus"], "search": ["search", "demo", "export index"], "serve": ["serve"]},
    "Evaluation": {
        "evaluate": [f"evaluate {one}" for one in ("beir", "nanobeir", "msmarco", "trec", "sentences", "openqa", "pairs")],
        "compare": ["compare runs", "compare latency"],
    },
    "Analysis": {"analyse": ["analyse data", "analyse run"]},
}
"""The verbs as `--help` shows them: {group: {module in tools: verbs}}; the function has the verb's name, with _ for the space."""
VERBS = {verb: module for group in GROUPS.values() for module, verbs in group.items() for verb in verbs}
_NEW = {"export hub", "import pydocs", "import task", "mine pairs", "doc2query train", "doc2query generate", "doc2query import"}
ALIASES = {
    **{name.replace(" ", "_"): name for name in VERBS if " " in name and name not in _NEW},
    "build_pydocs": "import pydocs",
    "export_batches": "import task",
    "inspect_data": "analyse data",
    "inspect_run": "analyse run",
    "measure_query_latency": "compare latency",
    "mine_negatives": "mine pairs",
    "plan_run": "plan",
    "push_to_hub": "export hub",
}
"""Old names, which go after 0.2: {old: new}; the flags are the same."""


def main() -> None:
    """Runs the verb that the command line begins with."""
    try:
        command.run(lambda: call(*split(sys.argv[1:])))
    except SystemExit as end:
        if end.code == command.EXIT_INPUT and any(not one.daemon for one in threading.enumerate()[1:]):
            sys.stdout.flush()
            os._exit(end.code)  # after a failed save, threads of Orbax would wait for five minutes
        raise


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
        if shown := [name for own in known.values() for name in own if name in verbs]:
            lines += ["", group, *(f"  {name:<20}{command_of(name).summary}" for name in shown)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
