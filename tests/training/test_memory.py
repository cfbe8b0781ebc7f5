"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STILL_HELD = """
import os, sys
import torch
from reprise.training.memory import keep_freed_memory

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = held()
step = [torch.ones(2**20) for _ in range(10)]
del step
print(held() - before)
"""


def megabytes_held(mode: str) -> float:
    """What a process holds more than before, once it has made and dropped ten tensors of 4 MB."""
    command = [sys.executable, "-c", STILL_HELD, mode]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt, and only Linux /proc")
def test_what_a_step_frees_is_kept_for_the_next() -> None:
    assert megabytes_held("keep") > 35
    assert megabytes_held("give back") < 15, "the guard must see what happens without it"
