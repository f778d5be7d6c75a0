"""Gloo groups with one worker thread each, where torch gives them two.

The two write the name of the operation they have ended into one std::string, without a lock
(ProcessGroupGloo::runLoop, torch 2.13). A name of more than 15 letters, as a sparse sum's, lies on
the heap, which that corrupts: ranks died of SIGSEGV or SIGABRT, about once in 20,000 updates of a
small model. One worker costs two ranks on two cores 1 to 3 %.
"""

import os
from functools import cache
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


@cache
def give_groups_one_worker() -> None:
    """Let every gloo group that is made from here on in this process have one worker thread."""
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
    """The interfaces that GLOO_SOCKET_IFNAME names, as torch reads it."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = [group.create_device(interface=name) for name in names.split(",") if name]
    return interfaces or [group.create_default_device()]
