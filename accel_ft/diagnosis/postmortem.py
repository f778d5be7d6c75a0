"""Crashes without a trace, and hangs: which rank, at which stage, with which Python stack.

The ranks write down where they are (`Stages`), Python's faulthandler writes the stack, and
`post_mortem` reads both.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
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
        folder: the same for all ranks; one job's, a new one for each start.
        rank: of this process.
        limit_seconds: a stage that lasts longer is taken for a hang: the Python stack of every
            thread goes into the log and the process ends with exit code 1.
    """

    def __init__(self, folder: Path, rank: int, limit_seconds: float) -> None:
        self.folder, self.rank, self.limit = folder, rank, limit_seconds
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"stage_{rank:05d}.json").unlink(missing_ok=True)  # of an earlier job

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
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self("end")
        else:
            print("".join(traceback.format_exception(error)), file=self._log)
            first = str(error).strip().partition("\n")[0]
            print(f"raised: {type(error).__name__}: {first}", file=self._log)
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
    ends = [_read(folder, rank, (exit_codes or {}).get(rank)) for rank in range(num_ranks)]
    missing = [end.rank for end in ends if end.stage is None]
    if missing:
        return failed(
            CHECK, f"rank {listed(missing)} never started", "see the launcher's own output"
        )
    lost = [end for end in ends if not end.is_well]
    if not lost:
        return passed(CHECK, f"{num_ranks} ranks reached their end")
    well = [end.rank for end in ends if end.is_well]
    gone = f"; rank {listed(well)} had reached its end before" if well else ""
    hung = [end for end in lost if end.hung]
    causes = [end for end in lost if not end.hung and not end.is_echo]
    if hung and not causes:
        return failed(
            CHECK,
            f"a hang: {listed([end.where for end in lost], 8)}{gone}",
            "all ranks must come to the same collectives in the same order: compare the lines; "
            f"loaders of unequal length end early on one rank; {NCCL}",
        )
    first = min(causes or lost, key=lambda end: end.at)
    log = folder / f"stack_{first.rank:05d}.log"
    return failed(CHECK, f"{first.where}{first.how}{gone}", f"see {log}")


@dataclass(frozen=True)
class _End:
    """How one rank ended.

    Attributes:
        stage: its last one, None where it never started.
        at: when that began, seconds.
        stack: what its log holds.
        code: its exit code, where known.
    """

    rank: int
    stage: str | None
    at: float
    stack: str
    code: int | None

    @property
    def is_well(self) -> bool:
        """Whether it reached its end."""
        return self.stage == "end" and self.code in (None, 0)

    @property
    def hung(self) -> bool:
        """Whether a stage lasted longer than the limit."""
        return self.stack.startswith("Timeout")

    @property
    def error(self) -> str:
        """Its exception, on one line, or ""."""
        lines = [line for line in self.stack.splitlines() if line.startswith("raised: ")]
        return lines[-1].removeprefix("raised: ") if lines else ""

    @property
    def is_echo(self) -> bool:
        """Whether it only felt another's end: a broken connection, or a launcher's signal."""
        felt = any(words in self.error.lower() for words in ECHOES)
        return felt or self.code == -signal.SIGTERM

    @property
    def where(self) -> str:
        """Rank, stage, and the innermost line of Python that is not a library's."""
        main = self.stack.rpartition("Thread ")[2] or self.stack
        lines = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
        if "most recent call last" in main:
            lines.reverse()
        own = [line for line in lines if "site-packages" not in line and "/lib/python" not in line]
        return f"rank {self.rank} at stage {self.stage}" + (
            f" at {(own or lines)[0]}" if lines else ""
        )

    @property
    def how(self) -> str:
        """What ended it."""
        fatal = [line for line in self.stack.splitlines() if line.startswith("Fatal Python error")]
        if self.code is not None and self.code < 0:
            return f", ended by {signal.Signals(-self.code).name}"
        if fatal or self.error:
            return f", {self.error or fatal[0]}"
        code = "" if self.code is None else f" with exit code {self.code}"
        return f", ended without a word{code}: os._exit, a kill, or an exception that was swallowed"


def _read(folder: Path, rank: int, code: int | None) -> _End:
    stage, at, stack = None, 0.0, ""
    with contextlib.suppress(OSError, ValueError):
        words = json.loads((folder / f"stage_{rank:05d}.json").read_text())
        stage, at = words["stage"], words["at"]
    with contextlib.suppress(OSError):
        stack = (folder / f"stack_{rank:05d}.log").read_text(errors="replace")
    return _End(rank, stage, at, stack, code)
