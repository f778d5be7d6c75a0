"""Crashes without a trace, and hangs: which rank, at which stage, with which Python stack.

Each rank writes down where it is (`Stages`), Python's faulthandler adds the stack, and
`post_mortem` reads what they left.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from accel_ft.diagnosis.finding import Finding, check, listed
from accel_ft.errors import first_line

LOG = "rank_{:05d}.log"
STAGE, RAISED = "stage of accel_ft: ", "raised: "
ECHOES = ("connection closed", "connection reset", "broken pipe", "timed out", "remote process")
NCCL = "on NCCL, TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 let its flight "
NCCL += "recorder name the collective"
# The log is the rank's: a worker process that it ends writes nothing into it.
os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGTERM))


class Stages:
    """What this rank is doing, in a file that outlives it.

    with Stages(folder, rank, limit_seconds=60) as stage:
        stage("model") ...

    Args:
        folder: the same for all ranks; one job's, a new one for each start.
        rank: of this process.
        limit_seconds: a stage that lasts longer is taken for a hang: the Python stack of every
            thread goes into the log and the process ends with exit code 1.
    """

    def __init__(self, folder: Path, rank: int, limit_seconds: float) -> None:
        self.path, self.limit = folder / LOG.format(rank), limit_seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)  # of an earlier job

    def __call__(self, name: str) -> None:
        """Say what begins now, and give it the whole limit."""
        print(f"{STAGE}{time.time()} {name}", file=self._log, flush=True)
        if name != "end":
            faulthandler.dump_traceback_later(self.limit, exit=True, file=self._log)

    def __enter__(self) -> Self:
        self._log = self.path.open("w", encoding="utf-8")
        faulthandler.enable(self._log)
        faulthandler.register(signal.SIGTERM, self._log, chain=True)  # so a launcher ends the rest
        self("start")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        own = signal.getsignal(signal.SIGTERM)
        faulthandler.unregister(signal.SIGTERM)
        if callable(own) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, own)  # that the program has set meanwhile
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self("end")
        else:
            print("".join(traceback.format_exception(error)), file=self._log)
            print(f"{RAISED}{type(error).__name__}: {first_line(error)}", file=self._log)
        self._log.close()
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.stderr)


@check("post-mortem")
def post_mortem(
    folder: Path, num_ranks: int, exit_codes: Mapping[int, int] | None = None
) -> Finding:
    """Say who ended where, from what the ranks left in `folder`.

    Args:
        folder: of their `Stages`.
        num_ranks: how many were started.
        exit_codes: by rank, where the caller started the processes; negative is a signal.
    """
    ends = [_read(folder, rank, (exit_codes or {}).get(rank)) for rank in range(num_ranks)]
    missing = [end.rank for end in ends if not end.stage]
    if missing:
        return Finding.failed(
            f"rank {listed(missing)} never started", "see the launcher's own output"
        )
    lost = [end for end in ends if not end.is_well]
    if not lost:
        return Finding.passed(f"{num_ranks} ranks reached their end")
    well = [end.rank for end in ends if end.is_well]
    gone = f"; rank {listed(well)} had reached its end before" if well else ""
    hung = [end for end in lost if end.hung]
    causes = [end for end in lost if not end.hung and not end.is_echo]
    if hung and not causes:
        return Finding.failed(
            f"a hang: {listed([end.where for end in lost], 8)}{gone}",
            "all ranks must come to the same collectives in the same order: compare the lines; "
            f"loaders of unequal length end early on one rank; {NCCL}",
        )
    first = min(causes or lost, key=lambda end: end.at)
    log = folder / LOG.format(first.rank)
    return Finding.failed(f"{first.where}{first.how}{gone}", f"see {log}")


class _End(NamedTuple):
    """How one rank ended: at which stage ("" where it never started), when that began, whether
    it reached its end, hung, or only felt another's end; where it was, and what ended it.
    """

    rank: int
    stage: str
    at: float
    is_well: bool
    hung: bool
    is_echo: bool
    where: str
    how: str


def _read(folder: Path, rank: int, code: int | None) -> _End:
    log = ""
    with contextlib.suppress(OSError):
        log = (folder / LOG.format(rank)).read_text(errors="replace")

    def told(mark: str) -> list[str]:
        return [line.removeprefix(mark) for line in log.splitlines() if line.startswith(mark)]

    stages = [line.split(" ", 1) for line in told(STAGE) if " " in line]  # not cut off
    at, stage = stages[-1] if stages else ("0", "")
    error, fatal = ((told(mark) or [""])[-1] for mark in (RAISED, "Fatal Python error: "))
    mark = "Current thread " if "Current thread " in log else "Thread "  # the main one comes last
    main = log.rpartition(mark)[2]
    if mark in log:
        main = main.partition("\n\n")[0]
    frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    if "most recent call last" in main:
        frames.reverse()
    own = [frame for frame in frames if "site-packages" not in frame and "/lib/python" not in frame]
    how = f", {error or fatal}" if error or fatal else ""
    hung, kind = bool(told("Timeout (")), error.partition(":")[0]
    if "Current thread " in log and stage != "end" and code is None and not (how or hung):
        code = -signal.SIGTERM
    if code is not None and code < 0:
        how = f", ended by {signal.Signals(-code).name}"
    elif not how:
        known = "" if code is None else f" with exit code {code}"
        how = f", ended without a word{known}: os._exit, a kill, or an exception that was swallowed"
    return _End(
        rank,
        stage,
        float(at),
        is_well=stage == "end" and code in (None, 0),
        hung=hung,
        is_echo=code == -signal.SIGTERM
        or (kind.startswith(("RuntimeError", "Dist")) and any(e in error.lower() for e in ECHOES)),
        where=f"rank {rank} at stage {stage}" + (f" at {(own or frames)[0]}" if frames else ""),
        how=how,
    )
