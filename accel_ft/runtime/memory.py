"""The C library's allocator, tuned for training on a CPU: each step allocates what the last freed.

By default glibc returns large blocks to the system, and each step page-faults them in again, 4 KiB
at a time. Torch also asks for aligned blocks, which glibc cuts out of larger ones. The remainders
become small objects that live on between the large blocks, so that freed large blocks cannot merge:
memory grows, and the next allocation is not in any CPU cache.
"""

import contextlib
import ctypes
import os
import platform
import resource
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ft import errors

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)
MIB = 2**20
TOP_PAD = 64 * MIB
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
_OF_DEBIAN = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
FOLDERS = (f"{sys.prefix}/lib", "/usr/local/lib", _OF_DEBIAN, "/usr/lib64")
STARTED_ANEW = "accel_ft_started_anew"  # a Python -X option: unlike a variable it cannot be unset
CHOICES = ("LD_PRELOAD", "GLIBC_TUNABLES")  # variables that choose or tune an allocator


def restart_with_better_malloc(command: str) -> None:
    """Replace this process, once, by one with the same arguments and the variables that
    `better_malloc` returns. Call it before anything else. If exec fails, the process goes on.

    Args:
        command: the module on this process's command line, as in python -m accel_ft.train. If it
            is not there (another program runs it), or under a debugger, this is a no-op.
    """
    is_command = command in sys.orig_argv and sys.gettrace() is None
    if is_command and STARTED_ANEW not in sys._xoptions and (variables := better_malloc()):
        words = [sys.executable, "-X", STARTED_ANEW, *sys.orig_argv[1:]]
        variables[errors.PARENT] = "\n".join([str(errors.parent[0]), *errors.parent[1]])
        with contextlib.suppress(OSError):
            os.execve(sys.executable, words, os.environ | variables)


def better_malloc() -> dict[str, str]:
    """Return the environment variable, with its value, to start a process with: gperftools'
    tcmalloc if it is installed, else glibc without its per-thread cache of small blocks.

    Returns {} if one of CHOICES is set (even if empty), without glibc, and on a machine with a GPU.
    """
    chosen = any(name in os.environ for name in CHOICES)
    has_gpu = any(Path(node).exists() for node in GPU_NODES)
    if chosen or has_gpu or platform.libc_ver()[0] != "glibc":
        return {}
    for folder in FOLDERS:
        for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
            library = f"{folder}/{name}"
            if Path(library).exists() and not {" ", ":"} & set(library):  # they separate libraries
                return {"LD_PRELOAD": library}
    return {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


def malloc_in_use() -> str:
    """Return the allocator's name; unless it is tcmalloc, with the values of CHOICES."""
    if hasattr(ctypes.CDLL(None), "tc_malloc"):
        return "tcmalloc"
    name = platform.libc_ver()[0] or sys.platform
    return " ".join([name, *(os.environ[each] for each in CHOICES if os.environ.get(each))])


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory and grow in large steps; memory stays at its peak."""
    if platform.libc_ver()[0] == "glibc":
        library, never = ctypes.CDLL(None), -1
        for setting in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, never), (_TOP_PAD, TOP_PAD)):
            library.mallopt(*setting)


def peak_memory(device: "torch.device") -> int:
    """Return this process's peak memory in bytes: allocated on its CUDA device, else resident."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
