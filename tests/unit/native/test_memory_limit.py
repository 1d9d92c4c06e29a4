"""The worker's memory limit stops larger allocations, and can be removed."""

import subprocess
import sys

SCRIPT = """
from tokenmill.native import memory_limit
memory_limit.HEADROOM_BYTES = 64 << 20
limit = memory_limit.set_limit(gpus=0)
assert limit is not None and limit <= memory_limit.held_bytes() + (64 << 20)

def grows():
    try:
        return len(bytearray(256 << 20)) > 0
    except MemoryError:
        return False

print(grows())
with memory_limit.lifted(gpus=0):
    print(grows())
print(grows())
"""


def test_only_what_fits_the_limit_is_allocated() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
