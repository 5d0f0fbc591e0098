"""Runs commands of this library, and others, one after another; each has its own process, which frees its memory at the end."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from de_jax.command import EXIT_STOPPED
from de_jax.types import InputError
from reproduction.verbs import VERBS

RunCommand = Callable[[Sequence[str]], dict[str, Any]]
"""Takes a verb of de-jax, or one of `verbs`, with its flags, and returns the JSON object that it prints."""


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a command with these arguments to its end; the command line and its progress go to stderr. Nothing is downloaded.

    Returns:
        The JSON object that the command prints.

    Raises:
        InputError: the command failed; its own message is on stderr.
        SystemExit: the command was told to stop, and has saved its work.
    """
    own = " ".join(arguments[:2]) in VERBS
    program = ["python", "-m", "reproduction"] if own else ["de-jax"]
    print(shlex.join([*program, *arguments]), file=sys.stderr, flush=True)
    name = f"{' '.join(program)} {arguments[0]}"
    out = _finished([sys.executable, "-m", "reproduction" if own else "de_jax", *arguments], name)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def call(line: str) -> None:
    """Runs a command line to its end, without a shell; its stdout goes to stderr.

    `de-jax` and `python` use this process's interpreter.

    Raises:
        InputError, SystemExit: as `run`.
    """
    print(line, file=sys.stderr, flush=True)
    program, *arguments = shlex.split(line)
    own = {"de-jax": [sys.executable, "-m", "de_jax"], "python": [sys.executable]}
    print(_finished([*own.get(program, [program]), *arguments], program), end="", file=sys.stderr)


def _finished(line: Sequence[str], name: str) -> str:
    """The stdout of a command. SIGTERM is passed on to the command, so that it saves; Ctrl-C reaches it from the terminal."""
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}) as child:
        before = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
        try:
            out, _ = child.communicate()
        except KeyboardInterrupt:
            child.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if child.returncode in (EXIT_STOPPED, -signal.SIGTERM):
        sys.exit(EXIT_STOPPED)
    if child.returncode:
        raise InputError(f"{name} failed, as it says above; mend that, and the same command continues from here.")
    return out


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of `parser`, and the recipe's settings, written --gin.NAME=VALUE, as "NAME=VALUE"."""
    parser.epilog = "--gin.NAME=VALUE sets any setting of the recipe, for example --gin.Optimization.num_steps=100."
    parser.add_argument("--allow_imports", action="store_true", help="let gin files import modules outside de_jax, which is code")
    args, rest = parser.parse_known_args(argv)
    for argument in rest:
        if not argument.startswith("--gin."):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value")
    return args, [argument.removeprefix("--gin.") for argument in rest]
