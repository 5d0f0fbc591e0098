"""Memory that a process frees and soon needs again: kept from the system, but not without end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1  # a threshold that nothing reaches; the largest int, 2 GiB, is less than a step's scratch memory
_SECONDS = 0.1
_MOST_KEPT, _SLACK = 0.5, 512 << 20
"""Memory is given back where a process has more than its largest need, this share of it and so many bytes."""
_SHORT = 0.125
"""It is also given back where less than this share of the machine's memory is left."""


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def keep() -> None:
    """Tells glibc to reuse freed memory instead of returning it to the system. On other systems this does nothing.

    XLA allocates a computation's scratch memory again for each run. Every page of memory fresh from the system faults, which took
    two fifths of a step with 3.3 GiB of it. Small blocks that stay come to lie in the space of a large one, which is then allocated
    elsewhere, so that a process would grow to several times its need; a thread gives free memory back before that.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Heap  # glibc 2.33; without it nothing is kept
        for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER)):
            libc.mallopt(parameter, value)
        threading.Thread(target=_give_back, args=(libc,), name="freed memory", daemon=True).start()


def _give_back(libc: ctypes.CDLL) -> None:
    """Watches the memory of this process."""
    need, elsewhere = 0, 0  # `elsewhere` is memory that does not come from malloc
    while True:
        used, held = libc.mallinfo2().used, _private_bytes() - elsewhere
        need = max(need, used)
        if held - used > _SLACK and (held > need * (1 + _MOST_KEPT) + _SLACK or _is_short()):
            libc.malloc_trim(0)
            elsewhere = max(0, _private_bytes() - libc.mallinfo2().used)
        time.sleep(_SECONDS)


def _is_short() -> bool:
    """Whether the machine, or the container that this process is in, has little memory left."""
    of_machine = dict(re.findall(r"(MemTotal|MemAvailable): +(\d+) kB", Path("/proc/meminfo").read_text()))
    if int(of_machine["MemAvailable"]) < _SHORT * int(of_machine["MemTotal"]):
        return True
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        most, now = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        return most - now < _SHORT * most
    return False


def _private_bytes() -> int:
    """The memory that this process holds, without files that are mapped."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
