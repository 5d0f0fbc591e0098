"""Freed memory is used again without page faults, and given back where a process holds much more than it needs."""

import resource
import subprocess
import sys

import pytest

NUM_BYTES = 5 << 29  # 2.5 GiB
PROGRAM = """
import ctypes
import resource
import time
from de_jax import freed_memory

{settings}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
freed_memory.keep()
{then}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    scratch = libc.malloc(ctypes.c_size_t({num_bytes}))
    ctypes.memset(scratch, 1, {num_bytes})
    time.sleep({seconds})
    libc.free(scratch)
    time.sleep({seconds})
    end = time.monotonic() + {patience}
    while freed_memory._private_bytes() >= {num_bytes} / 2 and time.monotonic() < end:
        time.sleep(0.01)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, freed_memory._private_bytes())
"""


def faults_and_bytes(num_bytes, settings="", seconds=0.0, then="", patience=0.0):
    """Page faults of two uses of such a block, and the memory that is held after each, once it is given back or patience ends."""
    program = PROGRAM.format(num_bytes=num_bytes, settings=settings, seconds=seconds, then=then, patience=patience)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.soak
def test_scratch_memory_of_gibibytes_is_used_again_without_page_faults():
    (_, kept), (faults, _) = faults_and_bytes(NUM_BYTES, seconds=0.3)
    assert faults < NUM_BYTES / resource.getpagesize() / 100
    assert kept > NUM_BYTES


SPLIT = """
blocks = [libc.malloc(ctypes.c_size_t(size)) for size in ({num_bytes}, 4096)]
ctypes.memset(blocks[0], 1, {num_bytes})
time.sleep(0.1)
libc.free(blocks[0])
small = libc.malloc(ctypes.c_size_t(1 << 20))  # in the space that is free now, so that a large block must lie elsewhere
"""


def test_a_block_that_is_too_small_for_the_next_need_is_given_back():
    num_bytes = 200 << 20
    quick = "freed_memory._SLACK = 20 << 20; freed_memory._SECONDS = 0.01"
    for _, held in faults_and_bytes(num_bytes, quick, seconds=1.0, then=SPLIT.format(num_bytes=num_bytes)):
        assert held < 1.5 * num_bytes


@pytest.mark.parametrize("then", ["", "from de_jax import command; command.go_on_in_child()"], ids=["itself", "a child"])
def test_free_memory_is_given_back_where_little_is_left(then):
    num_bytes = 200 << 20
    settings = "freed_memory._SHORT = 1.1; freed_memory._SLACK = 20 << 20; freed_memory._SECONDS = 0.01"
    for faults, held in faults_and_bytes(num_bytes, settings, seconds=0.1, then=then, patience=60.0):
        assert faults > num_bytes / resource.getpagesize() / 2
        assert held < num_bytes / 2
