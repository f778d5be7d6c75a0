"""The C library's allocator, told to keep what a training step frees: the next step wants it again.

By default glibc gives large blocks back to the system, and each step faults them in anew, 4 KiB at
a time.
"""

import ctypes
import mmap
import platform
import resource
import sys
from pathlib import Path

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)
MIB = 2**20
HEAP = 8192 * MIB  # of address space


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
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, never), (_TOP_PAD, 64 * MIB))
    done = all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
    if done and not _address_space_is_counted():
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes = [ctypes.c_void_p]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # madvise(2) takes what is mapped: the heap grows first, by addresses, not by memory.
        if (start := library.malloc(HEAP)) is not None:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            library.madvise(first, HEAP - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
            library.free(start)
    return done


def _address_space_is_counted() -> bool:
    """Whether addresses without memory behind them use up what this process may have."""
    mode = Path("/proc/sys/vm/overcommit_memory")
    never_overcommits = mode.is_file() and mode.read_text(encoding="ascii").strip() == "2"
    return never_overcommits or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this process had: on its CUDA device, elsewhere resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
