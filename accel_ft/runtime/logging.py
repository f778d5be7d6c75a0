"""A run's output: messages on the terminal (rank 0), events in metrics.jsonl, a progress bar."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from accel_ft.errors import CheckpointError, printable
from accel_ft.runtime.files import fsync, to_json, write_whole

MEASURED = ("train", "eval", "test")  # events of computed values; the others are the timeline


class _Terminal:
    """Standard error whose writes never raise: it may be closed (`| tee` ended), full or missing,
    and the run goes on.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(AttributeError, ValueError):
            return sys.stderr.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


TERMINAL = _Terminal()


class _TqdmHandler(logging.Handler):
    """Writes a message above a running progress bar, a warning with that word before it."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " * (record.levelno >= logging.WARNING)
        tqdm.write(printable(mark + self.format(record)), file=TERMINAL)


class _Collector(logging.Handler):
    """Appends each warning to `warned`, which the receipt lists."""

    def emit(self, record: logging.LogRecord) -> None:
        warned.append(record.getMessage())


warned: list[str] = []  # since the last `setup_logging`


def setup_logging(is_main: bool) -> None:
    """Show accel_ft's messages (on other ranks than 0 errors alone); silence transformers."""
    logger, ours = logging.getLogger("accel_ft"), (_TqdmHandler, _Collector)
    others = [each for each in logger.handlers if not isinstance(each, ours)]
    logger.handlers = [*others, _TqdmHandler(), _Collector(logging.WARNING)]
    warned.clear()
    logger.setLevel(logging.INFO if is_main else logging.ERROR)
    logger.propagate = False
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def progress_bar(done: int, total: int, shown: bool) -> Any:
    """Return a progress bar of updates; none in a log file, which has a line per train event."""
    return tqdm(
        file=TERMINAL,
        total=total,
        initial=done,
        unit="update",
        disable=not (shown and TERMINAL.isatty()),
        mininterval=0.2,
        dynamic_ncols=True,
    )


class EventLog:
    """metrics.jsonl: one JSON object a line; events of the timeline have a time, in UTC. Every rank
    may hold an EventLog; only rank 0's writes to the file.
    """

    def __init__(
        self,
        path: Path,
        writes: bool,
        listener: Callable[[str, int, dict[str, Any]], None] = lambda *_: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.writes, self.listener, self.check = path, writes, listener, check

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event; on return the operating system has it, but not yet the disk.

        Raises:
            CheckpointError: it cannot be written, or `check` raised.
        """
        if self.writes:
            self.check()
            line = {"event": event, "step": step, **values}
            if event not in MEASURED:
                line["time"] = datetime.now(UTC).isoformat(timespec="seconds")
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(to_json(line) + "\n")
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be written ({error.strerror}). Fix: free disk space, or "
                    "permission to write there, then the same command with "
                    "--resume_from_checkpoint latest"
                ) from error
        self.listener(event, step, values)

    def rewind(
        self, step: int, eval_is_due: bool = False, passed_over: Collection[int] = ()
    ) -> None:
        """Drop what the run will write again: events after update `step`, a half-written last line,
        the evaluation of `step` if it is due, test and end. Drop rollbacks, unless their batch is
        in `passed_over`. Keep when and why the run was resumed and stopped.
        """
        if self.writes and self.path.exists():
            kept = (
                json.dumps(event) + "\n"
                for event in read_events(self.path)
                if (
                    event["step"] <= step
                    and event["event"] not in ("test", "end")
                    and not (eval_is_due and (event["step"], event["event"]) == (step, "eval"))
                    and event.get("policy") != "rollback"
                )
                or event["event"] in ("resume", "preempted")
                or event.get("policy") == "stop"
                or (event.get("policy") == "rollback" and event["update"] - 1 in passed_over)
            )
            write_whole(self.path, "".join(kept))

    def sync(self) -> None:
        """Flush the events to disk."""
        if self.writes and self.path.exists():
            fsync(self.path)


def read_events(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics.jsonl, all or those of one kind. A line that a kill cut short,
    or that holds no event, is skipped.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            is_event = isinstance(event, dict) and {"event", "step"} <= event.keys()
            if is_event and kind in (None, event["event"]):
                yield event
