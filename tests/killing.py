"""Runs a command again and again, each time in a process of its own that is killed at a random moment, until it was killed often
enough and came to its end. A program, so that nothing but imports has happened before the processes fork from it:

    python tests/killing.py <<< '{"verb": "train", "argv": [[...], [...]], "watch": ["...", ""], "kills": 50, "seed": 0}'

The first argument list of `argv` runs undisturbed. Of the others the next is taken whenever one came to its end; they must be
enough. Every second kill falls shortly after the files of the glob pattern in `watch` change, that is, while something is written.
A command that refuses an output which is there has come to its end, although it was killed, once the path in `made` is there.
Prints, as JSON, how many lists came to their end, and when the kills fell, in seconds after the start of each process.
"""

import contextlib
import functools
import glob
import json
import os
import random
import signal
import sys
import time
import traceback

from de_jax import cli, command


def start(main, argv):
    """The id of a new process that runs the command."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(2, 1)  # what is printed here is the result of all
    code = 1
    try:
        command.run(lambda: main(argv))
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid):
    """Whether the process has ended, by itself and well."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if found and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the command ended with code {os.waitstatus_to_exitcode(status)}")
    return bool(found)


def wait(pid, seconds, until=lambda: False):
    """Waits for a time, an end or a condition; whether the process has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        if ended(pid):
            return True
        time.sleep(0.001)
    return False


def listing(pattern):
    found = []
    for path in glob.glob(pattern):
        with contextlib.suppress(OSError):  # gone again
            found.append((path, os.stat(path).st_mtime_ns))
    return sorted(found)


def run_killed(main, argv, pattern, rng, longest):
    """The second at which the process was killed, or None where it had ended before."""
    begin, before = time.monotonic(), listing(pattern)
    pid = start(main, argv)
    if rng.random() < 0.5:
        has_ended = wait(pid, rng.uniform(0, longest))
    else:
        has_ended = wait(pid, 600, lambda: listing(pattern) != before) or wait(pid, rng.uniform(0, 0.2))
    if has_ended:
        return None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return round(time.monotonic() - begin, 2)


def main():
    job = json.load(sys.stdin)
    rng = random.Random(job["seed"])
    run = functools.partial(cli.call, job["verb"])
    begin = time.monotonic()
    assert wait(start(run, job["argv"][0]), 600)
    longest, finished, moments = time.monotonic() - begin, 1, []
    while len(moments) < job["kills"]:
        moment = run_killed(run, job["argv"][finished], job["watch"][finished], rng, longest)
        moments += [] if moment is None else [moment]
        finished += moment is None or ("made" in job and os.path.exists(job["made"][finished]))
    assert wait(start(run, job["argv"][finished]), 600)
    json.dump({"finished": finished + 1, "kills": moments}, sys.stdout)


if __name__ == "__main__":
    main()
