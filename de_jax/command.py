"""How every command of the project ends: exit 0 when its output is complete, else one sentence on stderr."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
from collections.abc import Callable

from de_jax.types import InputError

EXIT_INPUT = 2
EXIT_STOPPED = 75  # sysexits.h: try again; saved on SIGTERM, the same command continues
EXIT_INTERRUPTED = 130

# glibc's mallopt parameters (malloc.h): none of them has a name in Python.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def run(main: Callable[[], None]) -> None:
    """Runs a command's `main`; what a user can mend becomes `error: <sentence>` and a non-zero exit, our own faults raise."""
    keep_freed_memory()
    try:
        main()
    except InputError as error:
        # gin adds lines to an error to say where it passed through.
        sys.exit(_fail(f"error: {str(error).splitlines()[0]}", EXIT_INPUT))
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted; the same command continues.", EXIT_INTERRUPTED))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        where = f" at {error.filename}" if error.filename else ""
        sentence = f"error: {error.strerror}{where}; nothing half-written was kept, the same command continues once it is mended."
        sys.exit(_fail(sentence, EXIT_INPUT))


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory instead of returning it to the system; elsewhere nothing happens.

    XLA allocates a computation's scratch memory anew each time it runs. Got back from the system, every page of it faults, which
    shows in the time of a training step on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(parameter, value)


def _fail(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    return code
