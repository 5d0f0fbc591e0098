"""This library's commands as experiments call them: printed, so that any of them can be repeated by hand."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from de_jax import cli, command

Run = Callable[[Sequence[str]], dict[str, Any]]
"""From the arguments of `python -m` to the JSON object that the command prints."""


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs `python -m` with these arguments to its end; returns the JSON object that it prints. The command line goes to stderr.

    Raises:
        subprocess.CalledProcessError: the command failed; its own message is on stderr.
    """
    found: dict[str, Any] = json.loads(subprocess.run(_told(arguments), check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def run_here(arguments: Sequence[str]) -> dict[str, Any]:
    """Does the same in this process: nothing is imported or compiled again, which takes longer than a short run.

    Raises:
        InputError: as the command does.
    """
    _told(arguments)
    module, *flags = arguments
    command.keep_compiled()  # the first command may have imported JAX
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if module == "de_jax":
            cli.call(*cli.split(flags))
        else:
            importlib.import_module(module).main(flags)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def _told(arguments: Sequence[str]) -> list[str]:
    line = [sys.executable, "-m", *arguments]
    print(shlex.join(line), file=sys.stderr, flush=True)
    return line
