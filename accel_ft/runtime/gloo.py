"""Gloo groups with one worker thread each, where torch gives them two.

The two threads have a race condition: both write the name of the operation they finished into one
std::string (ProcessGroupGloo::runLoop, torch 2.13). A name of more than 15 letters, such as a
sparse sum's, lies on the heap, and the race corrupts it: ranks died of SIGSEGV or SIGABRT, about
once in 20,000 updates of a small model. One worker costs two ranks on two cores 1 to 3 %.
"""

import os
from functools import cache
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


@cache
def give_groups_one_worker() -> None:
    """Give one worker thread to every gloo group that this process makes from now on."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    group: Any = dist.ProcessGroupGloo
    make = group.__init__

    def init(
        self: Any, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout
    ) -> None:
        options = group._Options()
        options._timeout, options._threads, options._devices = timeout, 1, _devices(group)
        make(self, store, rank, size, options)

    group.__init__ = init


def _devices(group: Any) -> list[Any]:
    """Return a device for each interface in GLOO_SOCKET_IFNAME, parsed as torch does."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = [group.create_device(interface=name) for name in names.split(",") if name]
    return interfaces or [group.create_default_device()]
