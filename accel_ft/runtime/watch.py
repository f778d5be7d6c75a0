"""Watch this rank and the others: signals, heartbeats, and the message about a rank that died or
stopped.

    <output_dir>/ranks/rank_00000.json   heartbeat: host, pid and stage of the process
                       rank_00000.log    Python stacks at a crash, or when another rank is lost

A thread does the work. Python runs signal handlers only between two bytecodes of the main thread,
which may be blocked in a collective.
"""

import contextlib
import faulthandler
import json
import logging
import os
import re
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import distributed as dist

from accel_ft.errors import (
    STOP_SIGNALS,
    ConfigError,
    LaunchError,
    Preempted,
    RankError,
    leave_last_words,
    listed,
)
from accel_ft.runtime.request import own_launcher

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 1.0  # a scheduler and a launcher both pass a signal on: it arrives twice
TICK_SECONDS = 0.5
TELL_SECONDS = 1.0  # limit for a message to a terminal that may block
GRACE_SECONDS = 2.0  # in which the main thread may notice another rank's end, and clean up
SILENCE_SECONDS = 30.0  # least silence of another machine that counts: shared folders may lag
SAME_BIRTH_SECONDS = 5.0  # if creation times differ by more, the pid was reused
SHARED_SECONDS = 60.0  # until one machine's write is visible on the others: NFS caches that long
PATIENCE = timedelta(days=7)


def new_host_group(timeout: timedelta | None = None) -> Any:
    """Return a gloo group of all ranks, for collectives on the host. Collective.

    Raises:
        LaunchError: the ranks cannot connect to each other.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"the ranks cannot reach each other over gloo: {error}. Fix: "
            "GLOO_SOCKET_IFNAME=the network interface that joins the machines"
        ) from error


class Watch:
    """Watches this rank and the others. The constructor is collective.

    Args:
        folder: of heartbeats and logs, on a file system that all ranks share.
        rank, num_ranks: of this process; the world size.
        limit_seconds: after which a stopped or silent rank counts as lost.
        advice: a line to add to the message about a lost rank.
        fault: the error because of which this rank cannot begin, if any.
        clean_up: called before this process exits at once; its argument says whether to keep the
            logs, as the message names them.

    Raises:
        Exception: the fault of the lowest rank that has one, on all ranks: the program can go on.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        limit_seconds: float,
        advice: str = "",
        fault: Exception | None = None,
        clean_up: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.folder, self.rank, self.num_ranks, self.advice = folder, rank, num_ranks, advice
        self.limit, self._clean_up = limit_seconds, clean_up
        self.check_folder: Callable[[], None] = lambda: None
        """Raises CheckpointError if the run's folder is no longer the one that rank 0 locked."""
        self.stop_signal = 0
        """Number of the signal that asked this rank to stop, 0 for none."""
        self._stopped_at = 0.0
        self._can_save = self._interrupted = self._gives_up = False
        self._has_begun = self._is_over = False
        self._late_signal = 0  # arrived during `__exit__`
        self._beat: dict[str, Any] = {"rank": rank, "host": _host(), "pid": os.getpid()}
        self._beat |= {"born": psutil.Process().create_time(), "stage": "start", "count": 0}
        self._beat["exit_code"] = RankError.exit_code
        self._failed = ""
        self._seen: dict[int, tuple[Any, float]] = {}
        self._killed: dict[int, str] = {}
        self._can_write = True
        self._suspected_since: float | None = None
        self._launcher = own_launcher()
        if fault is None:
            folder.mkdir(parents=True, exist_ok=True)
        if num_ranks > 1:
            self._patient_group = new_host_group(PATIENCE)  # rank 0 may wait for the folder's lock
            self._group = new_host_group(timedelta(seconds=limit_seconds))
        # Tells this run's heartbeats from those that an earlier run left in the folder.
        self._beat["run"] = self.all_gather(secrets.token_hex(8))[0]
        for error in self.all_gather(fault):
            if error is not None:
                raise error
        if num_ranks > 1:
            self._check_shared()

    # Collectives, on the host, so that no accelerator has to synchronize.

    def all_max(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all ranks. Collective."""
        if self.num_ranks == 1:
            return list(numbers)
        greatest = torch.tensor(numbers)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in greatest]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; waits up to PATIENCE. Collective."""
        values = [value]
        if self.num_ranks > 1:
            values *= self.num_ranks
            dist.all_gather_object(values, value, group=self._patient_group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, up to PATIENCE. Collective."""
        if self.num_ranks > 1:
            dist.barrier(self._patient_group)

    @contextlib.contextmanager
    def first(self, is_first: bool) -> Any:
        """Run the body on the ranks with `is_first`, then on the others. Collective."""
        if not is_first:
            self.barrier()
        yield
        if is_first:
            self.barrier()

    def _check_shared(self) -> None:
        """Refuse an output_dir that the machines do not share: each would hold a part of a
        checkpoint. Collective.

        Raises:
            ConfigError: names the ranks that do not see what rank 0 writes.
        """
        self._write_beat()  # on all ranks: an NFS client rereads a folder it wrote to
        can_write = self.all_gather(self._can_write)[0]  # if not, a later write will report it
        deadline = time.monotonic() + SHARED_SECONDS
        is_seen = self.rank == 0 or not can_write
        while not is_seen and time.monotonic() < deadline:
            is_seen = any(beat["rank"] == 0 for beat in self._others())
            time.sleep(0.0 if is_seen else 0.1)
        looked = self.all_gather((is_seen, f"({socket.gethostname()}, {self.folder.parent})"))
        blind = [f"rank {rank} {place}" for rank, (sees, place) in enumerate(looked) if not sees]
        if blind:
            raise ConfigError(
                f"output_dir: {listed(blind, 4)} cannot see what rank 0 {looked[0][1]} writes. "
                "Fix: the same folder for all, on a file system that all machines share"
            )

    def stage(self, name: str, can_save: bool = False) -> None:
        """Record what this rank is doing.

        Args:
            name: start, data, model, wrap, step N, save, eval, end.
            can_save: whether a stop signal leads to a save; if not, it ends the process at once.
        """
        self._can_save = can_save
        self._beat["stage"] = name
        if self.stop_signal and not can_save:
            self._interrupt(self.stop_signal, None)
            self._exit_unsaved()

    # The watching thread.

    def __enter__(self) -> Self:
        path = self.folder / f"rank_{self.rank:05d}.log"
        self._log = path.open("a", encoding="utf-8", errors="backslashreplace")  # odd names
        print(f"started {time.strftime('%F %T')}, pid {os.getpid()}", file=self._log, flush=True)
        self._dumps_crash = not faulthandler.is_enabled()  # else keep the program's file
        if self._dumps_crash:
            faulthandler.enable(self._log)
        self._wake_end, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._old_handlers, self._old_wakeup = {}, -1
        if threading.current_thread() is threading.main_thread():
            self._old_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            # torchrun handles SIGHUP even under `nohup`, and ends its ranks: they must save.
            spared = () if "TORCHELASTIC_RUN_ID" in os.environ else (signal.SIGHUP, signal.SIG_IGN)
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                is_pythons = handler is signal.default_int_handler
                is_anothers = handler is None or (callable(handler) and not is_pythons)
                if (number, handler) == spared or is_anothers:
                    continue
                self._old_handlers[number] = signal.signal(number, self._interrupt)
                signal.siginterrupt(number, False)
        self._write_beat()
        self._thread = threading.Thread(target=self._run, name="accel_ft watch", daemon=True)
        self._thread.start()
        self._has_begun = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over = True
        lost: str | None = None
        words, code = "", RankError.exit_code
        ended = error is None or isinstance(error, Preempted) or self._interrupted
        if error is None:
            self.stage("end", can_save=True)
        elif not ended:
            lost, code = self._cause(error)
            self._failed, self._beat["exit_code"] = f"{type(error).__name__}: {error}", code
            words = lost or self._words(self._beat, f"failed ({self._failed})")
            leave_last_words(f"error: {words}")  # the launcher may end this rank from here on
            self._say("".join(traceback.format_exception(error)), aloud=False)
        self._wake.send(b"\0")  # 0 is no signal's number: it ends the thread
        self._thread.join()
        if words:  # again: the thread may have overwritten them
            leave_last_words(f"error: {words}")
        self._write_beat(ended=ended)
        self._let_go()
        # Raise the signal again: its sender, the launcher, waits for this rank to end.
        if self._late_signal and self.num_ranks > 1 and not ended:
            signal.raise_signal(self._late_signal)
        if lost is not None:
            kind_of_end = Preempted if code == Preempted.exit_code else RankError
            raise kind_of_end(lost) from error
        if self._interrupted:
            stage = self._beat["stage"]
            why = "without saving" if self._gives_up else "there was nothing to save yet"
            raise Preempted(f"SIGINT at stage {stage}: stopped, {why}") from error

    def _cause(self, error: BaseException) -> tuple[str | None, int]:
        """Return the message if other ranks caused the error, else None; and the exit code."""
        felt = isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
        if self.num_ranks == 1 or not felt:
            return None, RankError.exit_code
        limit = self.limit / 2 if "imed out" in str(error) else 0.0
        found = self._find_lost(limit, wait_seconds=GRACE_SECONDS)
        if found is not None:
            return found[1:]
        lost = self._if_timed_out(error)
        if lost is None and not self.folder.is_dir():
            lost = f"rank {self.rank} lost the others, and {self.folder.parent} is gone"
        return lost, RankError.exit_code

    def _let_go(self) -> None:
        """Restore the signal handlers, and close the log and the sockets."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            with contextlib.suppress(OSError, ValueError):  # the program closed its fd
                signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        if self._dumps_crash:
            faulthandler.disable()
        for file in (self._log, self._wake, self._wake_end):
            file.close()

    def _run(self) -> None:
        beats = 0.0
        while True:
            ready, _, _ = select.select([self._wake_end], [], [], TICK_SECONDS)
            for number in self._wake_end.recv(64) if ready else b"":
                if number == 0:
                    return
                if number in self._old_handlers:
                    self._on_signal(number)
                elif self._old_wakeup >= 0:  # the program's signal: pass it to its wakeup fd
                    with contextlib.suppress(OSError):  # full, or closed
                        os.write(self._old_wakeup, bytes([number]))
            if self._gives_up and not ready:
                self._wake_main()  # again: it may have blocked between the signal and its handler
            if self._launcher not in (None, os.getppid()) and not self.stop_signal:
                self._on_signal(signal.SIGTERM, "the launcher is gone")
            now = time.monotonic()
            pause = max(2 * TICK_SECONDS, self.num_ranks / 32)
            if now - beats > pause + 20 * TICK_SECONDS:  # this rank was stopped itself: start over
                self._seen, self._suspected_since = {}, None
            if now - beats >= pause:
                beats = now
                self._write_beat()
                self._watch_others()

    def _on_signal(self, number: int, reason: str = "") -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        is_first = not self.stop_signal
        if is_first or self._is_over:
            lost = self._find_lost() if self.num_ranks > 1 else None
            if lost is not None:  # one ended, so the launcher signals the others
                self._end(lost)
        if self._is_over:
            return
        if is_first:
            self.stop_signal, self._stopped_at = number, now
            if self._leaves_to_python(number):
                return
            if not self._can_save:
                self._exit_unsaved()
            words = "%s: saving after this update; a second signal ends the run at once"
            _tell(lambda: logger.warning(words, reason or name))  # shown by rank 0 alone
        elif now - self._stopped_at > SAME_SIGNAL_SECONDS:
            if number == signal.SIGINT and self.num_ranks == 1 and hasattr(sys, "ps1"):
                if not self._gives_up:  # a notebook or a prompt: end only the run
                    self._gives_up = True
                    self._wake_main()
                return
            self._clean_up(False)
            self._leave(f"{name} again: stopped at once, without saving", 128 + number)

    def _wake_main(self) -> None:
        """Make the main thread raise KeyboardInterrupt, even out of a sleep, unless it has."""
        main, is_done = threading.main_thread().ident, self._interrupted or self._is_over
        assert main is not None
        if not is_done and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.pthread_kill(main, signal.SIGINT)

    def _leaves_to_python(self, number: int) -> bool:
        """Return whether Ctrl-C only raises: a single process with nothing to save outlives it."""
        return number == signal.SIGINT and self.num_ranks == 1 and not self._can_save

    def _interrupt(self, number: int, _: Any) -> None:
        """Handle a signal in the main thread; the watching thread does all other work."""
        if self._is_over:
            self._late_signal = number
        elif self._has_begun and (self._gives_up or self._leaves_to_python(number)):
            self._interrupted = True
            raise KeyboardInterrupt  # passes through every `except Exception`

    def _exit_unsaved(self) -> None:
        name = signal.Signals(self.stop_signal).name
        code = self._beat["exit_code"] = Preempted.exit_code
        self._failed = f"{name}, nothing to save yet"
        self._write_beat()
        self._clean_up(False)
        self._leave(f"{name} at stage {self._beat['stage']}: nothing to save yet", code)

    def _watch_others(self) -> None:
        lost = self._find_lost(self.limit) if self.num_ranks > 1 else None
        if lost is None:
            self._suspected_since = None
            return
        self._suspected_since = self._suspected_since or time.monotonic()
        if time.monotonic() - self._suspected_since > GRACE_SECONDS:
            self._end(lost)

    def _end(self, lost: tuple[int, str, int]) -> None:
        """Exit at once: the main thread may be waiting for the lost rank."""
        rank, words, exit_code = lost
        self._failed, self._beat["exit_code"] = words, exit_code
        self._write_beat()  # first: else a third rank would blame this one
        faulthandler.dump_traceback(self._log)
        self._clean_up(exit_code != Preempted.exit_code)
        told = words if exit_code == Preempted.exit_code else self._advised(words)
        self._leave(told, exit_code, aloud=self.rank == (1 if rank == 0 else 0))

    def _leave(self, words: str, exit_code: int, aloud: bool = True) -> None:
        leave_last_words(words)
        self._say(words, aloud)
        os._exit(exit_code)

    def _say(self, message: str, aloud: bool = True) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a stream that cannot encode it
            print(message, file=self._log, flush=True)
        if aloud:
            _tell(lambda: print(message, file=sys.stderr, flush=True))

    # Heartbeats.

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.json"

    def _write_beat(self, ended: bool = False) -> None:
        self._beat["count"] += 1
        self._beat |= {"failed": self._failed, "ended": ended, "at": time.time()}
        staging = self._path(self.rank).with_suffix(".tmp")
        try:
            staging.write_text(json.dumps(self._beat))
            staging.replace(self._path(self.rank))
            self._can_write = True
        except OSError:  # a full disk: the next event or checkpoint reports it
            self._can_write = False
        if not ended and not self._failed:
            leave_last_words(self._advised(self._words(self._beat, "ended without a message")))

    def _advised(self, words: str) -> str:
        return f"error: {words}\n{self.advice}".rstrip()

    def _words(self, beat: dict[str, Any], what: str) -> str:
        log = self._path(beat["rank"]).with_suffix(".log")
        where = beat["host"].split(" ")[0]
        return (
            f"rank {beat['rank']} (pid {beat['pid']} on {where}) {what} at stage {beat['stage']}. "
            f"Its log: {log}"
        )

    def _if_timed_out(self, error: BaseException) -> str | None:
        """Return where the other ranks were if the error is a timeout, else None."""
        if "imed out" not in str(error):
            return None
        others = [self._words(beat, "did not arrive") for beat in self._others()]
        return f"rank {self.rank} waited for {self.limit:.0f} s (ddp_timeout): " + "; ".join(others)

    def _find_lost(
        self, limit: float = 0.0, wait_seconds: float = 0.0
    ) -> tuple[int, str, int] | None:
        """Return the first rank that failed, died, was silent on another machine, or was stopped
        for `limit` seconds (0: ignore stopped ranks), with its message and exit code; else None.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            found = [
                (beat["at"], beat["rank"], self._words(beat, fate), beat["exit_code"])
                for beat in self._others()
                if (fate := self._fate(beat, limit))
            ]
            if found:
                return min(found)[1:]
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)

    def _others(self) -> list[dict[str, Any]]:
        beats = []
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError, KeyError):  # missing, or foreign
                beat = json.loads(self._path(rank).read_text(encoding="utf-8"))
                if rank != self.rank and beat["run"] == self._beat["run"] and not beat["ended"]:
                    beats.append(beat)
        return beats

    def _fate(self, beat: dict[str, Any], limit: float) -> str:
        """Return what happened to another rank; "" while it is well."""
        if beat["failed"]:
            was_signalled = beat["exit_code"] == Preempted.exit_code
            return f"{'ended' if was_signalled else 'failed'} ({beat['failed']})"
        here = beat["host"] == self._beat["host"]
        return self._fate_here(beat, limit) if here else self._fate_elsewhere(beat, limit)

    def _fate_elsewhere(self, beat: dict[str, Any], limit: float) -> str:
        now = time.monotonic()
        last, since = self._seen.get(beat["rank"], (None, now))
        if last != beat["count"]:
            self._seen[beat["rank"]] = (beat["count"], now)
            return ""
        silent = now - since if self._can_write else 0.0  # cannot write: no verdict
        return f"was silent for {silent:.0f} s" if silent > max(limit, SILENCE_SECONDS) else ""

    def _fate_here(self, beat: dict[str, Any], limit: float) -> str:
        if beat["rank"] in self._killed:
            return self._killed[beat["rank"]]
        try:
            process = psutil.Process(beat["pid"])
            status = process.status()
            shift = psutil.Process().create_time() - self._beat["born"]  # if the clock was set
            another = abs(process.create_time() - shift - beat["born"]) > SAME_BIRTH_SECONDS
        except psutil.NoSuchProcess:
            another = True
        if another or status == psutil.STATUS_ZOMBIE:
            return "died" + _crash(self._path(beat["rank"]).with_suffix(".log"), beat["pid"])
        if status not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            self._seen.pop(beat["rank"], None)
            return ""
        now = time.monotonic()
        _, since = self._seen.setdefault(beat["rank"], (None, now))
        if limit == 0.0 or now - since < limit:
            return ""
        self._killed[beat["rank"]] = f"was stopped for {now - since:.0f} s"
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            process.kill()  # else the launcher waits half a minute more for it
        return self._killed[beat["rank"]]


def _crash(log: Path, pid: int) -> str:
    """Return the fatal error and frame in a crashed process's log, in brackets; "" if killed."""
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace").rpartition(f", pid {pid}\n")[2]
    fatal = re.search("^Fatal Python error: (.+)", text, re.MULTILINE)
    frame = re.search("^Current thread .*\n *(.+)", text, re.MULTILINE)
    return f" ({fatal[1]}{f', {frame[1]}' if frame else ''})" if fatal else ""


def _tell(tell: Callable[[], None]) -> None:
    """Print from a thread of its own, so that a blocked terminal does not block the watch."""

    def try_to_tell() -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it cannot be encoded
            tell()

    teller = threading.Thread(target=try_to_tell, daemon=True)
    teller.start()
    teller.join(TELL_SECONDS)


def _host() -> str:
    """Return what identifies the machine and, on Linux, the pid namespace: a pid is valid in it
    alone. Machines made from one image may share hostname and namespace number, but not a boot id.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += " " + re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return name


def _forget_signals() -> None:
    """Keep a forked worker's signals from its parent's wakeup fd."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
