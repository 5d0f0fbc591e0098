import resource
import subprocess
import sys

import pytest

NUM_BYTES = 5 << 29  # 2.5 GiB
PROGRAM = f"""
import ctypes
import resource
from de_jax import command

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
command.keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    scratch = ctypes.c_void_p(libc.malloc(ctypes.c_size_t({NUM_BYTES})))
    ctypes.memset(scratch, 1, {NUM_BYTES})
    libc.free(scratch)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.soak
def test_scratch_memory_of_gibibytes_is_used_again_without_page_faults():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < NUM_BYTES / resource.getpagesize() / 100
