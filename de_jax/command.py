"""How every command of the project ends: exit 0 when its output is complete, else one sentence on stderr."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from de_jax.types import InputError

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


def run(main: Callable[[], None]) -> None:
    """Runs a command's `main`; what a user can mend becomes `error: <sentence>` and a non-zero exit, our own faults raise."""
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


def _fail(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    return code
