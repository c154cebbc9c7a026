"""Host memory that a step frees and takes again stays with the process, which pages it in once and not every step.

Without it glibc maps each large buffer anew and hands it back when it is freed. The kernel then clears its pages at every
use: ZeRO-3 on two CPU ranks spent a sixth of a step's CPU time there (`docs/performance.md`).
"""

from __future__ import annotations

import ctypes
from typing import Any

# <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_LARGEST = 2**31 - 1  # mallopt takes an int
_OLDER_LARGEST = 2**25  # what glibc before 2.35 accepts
_GROWTH_BYTES = 2**26


def keep_freed_memory(libc: Any = None) -> bool:
    """Let the C library keep freed memory of any size for what is allocated next; return whether it can.

    It holds for the whole process. Only glibc knows how; elsewhere nothing changes.
    """
    libc = ctypes.CDLL(None) if libc is None else libc
    if not hasattr(libc, "mallopt"):
        return False
    large = libc.mallopt(_MMAP_THRESHOLD, _LARGEST) or libc.mallopt(_MMAP_THRESHOLD, _OLDER_LARGEST)
    return bool(large and libc.mallopt(_TRIM_THRESHOLD, _NEVER) and libc.mallopt(_TOP_PAD, _GROWTH_BYTES))


def give_back_freed_memory(libc: Any = None) -> None:
    """Hand memory that is free now back to the operating system, where the C library knows how."""
    libc = ctypes.CDLL(None) if libc is None else libc
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
