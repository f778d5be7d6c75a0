"""The C library's allocator, told to keep what a training step frees: the next step wants it again.

By default glibc gives large blocks back to the system, and each step faults them in anew, 4 KiB at
a time.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)
MIB = 2**20
TOP_PAD = 64 * MIB
HEAP = 8192 * MIB  # of address space, at most


def keep_freed_memory() -> bool:
    """Set glibc's malloc to hold on to freed memory, to grow in large steps, and in huge pages
    where the system gives them; the peak stays.

    Returns:
        Whether there is a glibc to set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    never = -1
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, never), (_TOP_PAD, TOP_PAD))
    done = all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
    if done:
        _ask_for_huge_pages(library)
    return done


def _ask_for_huge_pages(library: Any) -> None:
    """Let the heap grow in huge pages, unless addresses without memory behind them are counted.

    madvise(2) takes what is mapped: the heap is made large first, in addresses. That must not fail,
    since a malloc that does has glibc leave the heap that is set up here.
    """
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    limited = any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)
    size = min(HEAP, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError):
        mode = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii")[0]
        if limited or mode == "2":
            return
        mmap.mmap(-1, size + 2 * TOP_PAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        if (start := library.malloc(size)) is not None:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            library.madvise(first, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
            library.free(start)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this process had: on its CUDA device, elsewhere resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
