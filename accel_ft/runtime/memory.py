"""The C library's allocator, told to keep what a training step frees: the next step wants it again.

By default glibc gives large blocks back to the system, and each step faults them in anew.
"""

import ctypes
import platform
import resource
import sys

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)
MIB = 2**20


def keep_freed_memory() -> bool:
    """Set glibc's malloc to hold on to freed memory and grow in large steps; the peak stays.

    Returns:
        Whether there is a glibc to set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * MIB))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this process had: on its CUDA device, elsewhere resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
