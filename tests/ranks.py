"""Ranks as forked processes: real processes on gloo that start in a tenth of a second, because torch and
transformers are imported once, by the parent. The parent runs no torch operation with threads.
"""

import contextlib
import ctypes
import importlib
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from accel_ft.errors import run_command

# If a process is killed while it holds a lock shared by forked processes, all others block.
TqdmDefaultWriteLock.mp_lock = None
tqdm.monitor_interval = 0

PR_SET_PDEATHSIG = 1
IMPORTED = Path(os.environ["HF_HOME"]) / "imported.txt"


class Ranks:
    """A started job: one process group of N ranks.

    Args:
        act: what each does, as a command.
        num_ranks: how many.
        log: file for the output of the ranks.
        before: called in each rank, with its number, before it starts.
        is_group: whether they get torchrun's variables for a rendezvous; default: if there are several.
    """

    def __init__(
        self,
        act: Callable[[], None],
        num_ranks: int,
        log: Path,
        before: Callable[[int], None] = lambda rank: None,
        is_group: bool | None = None,
    ) -> None:
        self.started = time.monotonic()
        # Bound but not listening: the port is given to nobody else, and rank 0 may listen on it.
        self.place = socket.socket()
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.place.bind(("127.0.0.1", 0))
        is_group = num_ranks > 1 if is_group is None else is_group
        address = self.place.getsockname() if is_group else None
        self.pids: list[int] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, num_ranks, address, act, log, before)
            self.pids.append(pid)
            os.setpgid(pid, self.pids[0])
        self.codes: dict[int, int] = {}

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids[0], number)

    def poll(self) -> bool:
        """Return whether all have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        if len(self.codes) < len(self.pids):
            return False
        self.place.close()
        return True

    def wait(self, seconds: float = 120.0, grace: float = math.inf) -> list[int]:
        """Return the exit codes by rank; after `seconds`, or `grace` seconds after one has failed, all are killed and
        TimeoutError is raised.
        """
        deadline = time.monotonic() + seconds
        while not self.poll():
            if any(self.codes.values()):
                deadline, grace = min(deadline, time.monotonic() + grace), math.inf
            if time.monotonic() > deadline:
                self.kill()
                while not self.poll():
                    time.sleep(0.01)
                raise TimeoutError(f"ranks did not end in {seconds} s, or one failed: {self.codes}")
            time.sleep(0.005)
        return [self.codes[pid] for pid in self.pids]


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_rank(
    rank: int,
    num_ranks: int,
    address: tuple[str, int] | None,
    act: Callable[[], None],
    log: Path,
    before: Callable[[int], None],
) -> None:
    code = 1
    try:
        end_with_parent()
        os.setpgid(0, 0) if rank == 0 else None
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        if address is not None:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
            }  # fmt: skip
        random.seed(rank)
        before(rank)
        run_command(act)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()
            if (code, rank) == (0, 0):
                IMPORTED.write_text("\n".join(sys.modules))
        finally:
            os._exit(code)


def import_what_ranks_import() -> None:
    """Import what the last successful rank 0 had imported, so that later ranks start with it."""
    for name in IMPORTED.read_text().splitlines():
        if name.split(".")[0] not in ("__main__", "__mp_main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
