"""Crashes without a trace, and hangs: which rank, at which stage, with which Python stack.

Each rank writes its stage to a file (`Stages`), Python's faulthandler adds the stack, and
`post_mortem` reads both.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

from accel_ft.diagnosis.finding import Finding, Verdict, check
from accel_ft.errors import first_line, listed

FILE = "rank_{:05d}.json"
LAST_WORDS = re.compile(r"Fatal Python error: .*|Timeout \(.*")  # faulthandler's
OWN_FRAME = re.compile(r'File "(?!.*(?:site-packages|/lib/python)).*')
NCCL = "on NCCL, TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 let its flight "
NCCL += "recorder name the collective"
# A forked worker that gets SIGTERM must not dump its stack into the rank's log.
os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGTERM))


class Stages:
    """Keeps what this rank is doing in a file that outlives it, beside a log of Python stacks.

    with Stages(folder, rank, limit_seconds=60) as stage:
        stage("model") ...

    Args:
        folder: the same for all ranks of a job; a new one for each start.
        rank: of this process.
        limit_seconds: a stage that lasts longer counts as a hang: the Python stack of every
            thread goes into the log and the process ends with exit code 1.
    """

    def __init__(self, folder: Path, rank: int, limit_seconds: float) -> None:
        self.path, self.limit = folder / FILE.format(rank), limit_seconds
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str) -> None:
        """Begin a stage, and restart the time limit."""
        self._write(name)
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self._log)

    def _write(self, stage: str, error: str = "", stack: str = "", last: str = "") -> None:
        self._stage = stage
        said = {"stage": stage, "at": time.time(), "error": error, "stack": stack, "last": last}
        staging = self.path.with_suffix(".new")  # atomic: a kill or full disk leaves no half
        staging.write_text(json.dumps(said))
        staging.replace(self.path)

    def __enter__(self) -> Self:
        # Log and signal handler stay until the process ends: unregistering the handler would also
        # remove one that the program has set meanwhile.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._log = os.open(self.path.with_suffix(".log"), flags, 0o644)
        faulthandler.enable(self._log)
        faulthandler.register(signal.SIGTERM, self._log, chain=True)  # how a launcher ends the rest
        self("start")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable()  # to standard error again
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._write("end", last=self._stage)
        else:  # most recent call first, as faulthandler has it
            stack = "".join(reversed(traceback.format_tb(error.__traceback__)))
            self._write(self._stage, f"{type(error).__name__}: {first_line(error)}", stack)


@check("post-mortem")
def post_mortem(
    folder: Path, num_ranks: int, exit_codes: Mapping[int, int] | None = None
) -> Finding:
    """Say which rank ended where, from the files that the ranks left in `folder`.

    Args:
        folder: that of their `Stages`; a copy of it must preserve modification times.
        num_ranks: how many were started.
        exit_codes: by rank, where the caller started the processes; negative for a signal.
    """
    lost, well = [], []
    for rank in range(num_ranks):
        path, code = folder / FILE.format(rank), (exit_codes or {}).get(rank)
        if not path.is_file():
            return Verdict.FAIL(f"rank {rank} never started", "see the launcher's own output")
        said, log = json.loads(path.read_text()), path.with_suffix(".log")
        if said["stage"] == "end" and not code:
            well.append(f"{rank} after stage {said['last']}")
            continue
        stacks = said["stack"] or log.read_text(errors="replace")
        mark = "Current thread " if "Current thread " in stacks else "Thread "  # main thread: last
        frame, told = OWN_FRAME.search(stacks.rpartition(mark)[2]), LAST_WORDS.search(stacks)
        if code is None and "Current thread " in stacks and not told:
            code = -signal.SIGTERM
        how = said["error"] or _how(code, told[0] if told else "")
        where = f"rank {rank} at stage {said['stage']}" + (f" at {frame[0]}" if frame else "")
        ended = said["at"] if said["error"] else max(said["at"], log.stat().st_mtime)
        is_last, hung = how == _how(-signal.SIGTERM), how.startswith("Timeout (")
        lost.append((is_last, ended, f"{where}: {how}", hung))
    if not lost:
        return Verdict.PASS(f"{num_ranks} ranks reached their end")
    hung = min(lost)[-1]  # a hang: the order means nothing, each rank waits for another
    about = listed([words for _, _, words, _ in (lost if hung else sorted(lost))], 8)
    about += f"; ended well before: rank {listed(well)}" if well else ""
    if hung:
        return Verdict.FAIL(
            f"a hang: {about}",
            "all ranks must call the same collectives in the same order: compare the lines; "
            f"loaders of unequal length end early on one rank; {NCCL}",
        )
    return Verdict.FAIL(
        about,
        f"the first is the likeliest cause, except that the time at which ranks without a message "
        f"ended is not known: see the files in {folder}",
    )


def _how(code: int | None, told: str = "") -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    known = "" if code is None else f" with exit code {code}"
    return (
        told
        or f"ended without a message{known}: os._exit, a kill, or an exception that was swallowed"
    )
