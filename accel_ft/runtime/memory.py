"""The C library's allocator, made to serve training on a CPU: each step wants again what it freed.

By default glibc gives large blocks back to the system, and each step faults them in anew, 4 KiB at
a time. And torch asks for aligned blocks, which glibc cuts out of larger ones: the scraps become
small objects that live on between the large blocks, so that these, freed, do not join again; memory
grows, and what is taken next lies where no cache has it.
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
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, Windows' for its Linux
_OF_DEBIAN = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
FOLDERS = (f"{sys.prefix}/lib", "/usr/local/lib", _OF_DEBIAN, "/usr/lib64")
STARTED_ANEW = "accel_ft_started_anew"  # an option -X of Python's, which nothing takes away
CHOICES = ("LD_PRELOAD", "GLIBC_TUNABLES")  # of an allocator, from a process's start


def restart_with_better_malloc(command: str) -> None:
    """Start this process anew, with the same arguments, under `better_malloc`, once. To be called
    before anything else is. Where it cannot be, the process goes on as it is.

    Args:
        command: what this process was started as, as in python -m accel_ft.train: nothing is done
            where another program runs it, or a debugger.
    """
    is_command = command in sys.orig_argv and sys.gettrace() is None
    if is_command and STARTED_ANEW not in sys._xoptions and (variables := better_malloc()):
        words = [sys.executable, "-X", STARTED_ANEW, *sys.orig_argv[1:]]
        variables[errors.PARENT] = "\n".join([str(errors.parent[0]), *errors.parent[1]])
        with contextlib.suppress(OSError):
            os.execve(sys.executable, words, os.environ | variables)


def better_malloc() -> dict[str, str]:
    """Return the variable, and its value, that a process is to be started with: gperftools'
    tcmalloc where it is installed, else glibc without its caches of scraps.

    Nothing where either of CHOICES is set, be it empty, without glibc, and where there is a GPU.
    """
    chosen = any(name in os.environ for name in CHOICES)
    has_gpu = any(Path(node).exists() for node in GPU_NODES)
    if chosen or has_gpu or platform.libc_ver()[0] != "glibc":
        return {}
    for folder in FOLDERS:
        for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
            library = f"{folder}/{name}"
            if Path(library).exists() and not {" ", ":"} & set(library):  # which part a list
                return {"LD_PRELOAD": library}
    return {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


def malloc_in_use() -> str:
    """Return the allocator's name, with what was set of it from the start."""
    if hasattr(ctypes.CDLL(None), "tc_malloc"):
        return "tcmalloc"
    name = platform.libc_ver()[0] or sys.platform
    return " ".join([name, *(os.environ[each] for each in CHOICES if os.environ.get(each))])


def keep_freed_memory() -> None:
    """Set glibc's malloc to hold on to freed memory, and to grow in large steps; the peak stays."""
    if platform.libc_ver()[0] == "glibc":
        library, never = ctypes.CDLL(None), -1
        for setting in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, never), (_TOP_PAD, TOP_PAD)):
            library.mallopt(*setting)


def peak_memory(device: "torch.device") -> int:
    """Return the most bytes this process had: on its CUDA device, elsewhere resident."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
