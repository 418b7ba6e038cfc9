"""The tiny policy's process: memory that was freed is still the process's, and is used again."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from agentic_prompting.sandbox.policy import keep_freed_memory
keeps = keep_freed_memory()
def resident(): return psutil.Process().memory_info().rss // 2**20
before = resident()
for _ in range(20):
    block = bytearray(b"x") * (100 * 2**20)
    del block
print(keeps, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_kept_and_used_again():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    keeps, growth = done.stdout.split()
    assert keeps == "True"
    assert 90 < int(growth) < 150  # MB: one block of a hundred, not none, not twenty
