"""Crashes without a trace, and hangs: which rank, at which stage, with which Python stack.

What you see: "exit code -11" and no more; a job that ends well with a rank missing; GPUs at 100 %
and no progress. What it is: a rank that died in C code, left by os._exit, swallowed its exception,
ran out of data before the others, or waits in another collective than they do. The ranks write down
where they are (`Stages`), Python's faulthandler writes the stack, and `post_mortem` reads both.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from accel_ft.diagnosis.finding import Finding, failed, listed, passed

CHECK = "post-mortem"
ECHOES = ("connection closed", "connection reset", "broken pipe", "timed out", "remote process")
NCCL = "on NCCL, TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 let its flight "
NCCL += "recorder name the collective"


class Stages:
    """What this rank is doing, in files that outlive it.

    with Stages(folder, rank, limit_seconds=60) as stage:
        stage("model") ...

    Args:
        folder: the same for all ranks; one job's.
        rank: of this process.
        limit_seconds: a stage that lasts longer is taken for a hang: the Python stack of every
            thread goes into the log and the process ends with exit code 1.
    """

    def __init__(self, folder: Path, rank: int, limit_seconds: float) -> None:
        self.folder, self.rank, self.limit = folder, rank, limit_seconds
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str) -> None:
        """Say what begins now, and give it the whole limit."""
        words = {"rank": self.rank, "pid": os.getpid(), "stage": name, "at": time.time()}
        staging = self.folder / f"stage_{self.rank:05d}.tmp"
        staging.write_text(json.dumps(words))
        staging.replace(self.folder / f"stage_{self.rank:05d}.json")
        if name != "end":
            faulthandler.dump_traceback_later(self.limit, exit=True, file=self._log)

    def __enter__(self) -> Self:
        self._log = (self.folder / f"stack_{self.rank:05d}.log").open("w", encoding="utf-8")
        faulthandler.enable(self._log)
        self("start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        if error is None:
            self("end")
        else:
            import traceback

            print("".join(traceback.format_exception(error)), file=self._log)
        self._log.close()
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.stderr)


def post_mortem(
    folder: Path, num_ranks: int, exit_codes: Mapping[int, int] | None = None
) -> Finding:
    """Say who ended where, from what the ranks left in `folder`.

    Args:
        folder: of their `Stages`.
        num_ranks: how many were started.
        exit_codes: by rank, where the caller started the processes; negative is a signal.
    """
    codes = dict(exit_codes or {})
    stages, stacks = {}, {}
    for rank in range(num_ranks):
        with contextlib.suppress(OSError, ValueError):
            stages[rank] = json.loads((folder / f"stage_{rank:05d}.json").read_text())
        with contextlib.suppress(OSError):
            stacks[rank] = (folder / f"stack_{rank:05d}.log").read_text(errors="replace")
    missing = [rank for rank in range(num_ranks) if rank not in stages]
    if missing:
        return failed(
            CHECK, f"rank {listed(missing)} never started", "see the launcher's own output"
        )
    unfinished = [rank for rank in stages if stages[rank]["stage"] != "end"]
    if not unfinished:
        return passed(CHECK, f"{num_ranks} ranks reached their end")
    hung = [rank for rank in unfinished if stacks[rank].startswith("Timeout")]
    crashed = [rank for rank in unfinished if rank not in hung]
    at_end = [rank for rank in stages if rank not in unfinished]
    gone = f"; rank {listed(at_end)} had reached its end before" if at_end else ""
    if hung and not crashed:
        places = [_where(rank, stages, stacks) for rank in hung]
        return failed(
            CHECK,
            f"a hang: {listed(places, 8)}{gone}",
            "all ranks must come to the same collectives in the same order: compare the lines; "
            f"loaders of unequal length end early on one rank; {NCCL}",
        )
    first = min(crashed or hung, key=lambda rank: (_is_echo(stacks[rank]), stages[rank]["at"]))
    return failed(
        CHECK,
        f"{_where(first, stages, stacks)}{_how(codes.get(first), stacks[first])}{gone}",
        f"see {folder / f'stack_{first:05d}.log'}",
    )


def _is_echo(stack: str) -> bool:
    """Whether a rank only felt another's end."""
    last = stack.rpartition("Error: ")[2].lower()
    return "Error: " in stack and any(word in last for word in ECHOES)


def _how(code: int | None, stack: str) -> str:
    if code is not None and code < 0:
        return f", ended by {signal.Signals(-code).name}"
    fatal = [line for line in stack.splitlines() if line.startswith("Fatal Python error")]
    if fatal:
        return f", {fatal[0]}"
    raised = [
        line for line in stack.splitlines() if line and not line.startswith((" ", "Traceback"))
    ]
    if raised:
        return f", {raised[-1]}"
    hidden = "" if code is None else f" with exit code {code}"
    return f", ended without a word{hidden}: os._exit, or an exception that was swallowed"


def _where(rank: int, stages: Mapping[int, dict[str, object]], stacks: Mapping[int, str]) -> str:
    """Rank, stage, and the innermost line of Python that is not a library's."""
    main = stacks[rank].rpartition("Thread ")[2] or stacks[rank]
    lines = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    if "most recent call last" in main:
        lines.reverse()
    own = [line for line in lines if "site-packages" not in line and "/lib/python" not in line]
    place = f" at {(own or lines)[0]}" if lines else ""
    return f"rank {rank} at stage {stages[rank]['stage']}{place}"
