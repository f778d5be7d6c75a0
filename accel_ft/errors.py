"""How a command ends: faults of the user or the machine with one short message, never a traceback.

exit code 0     done
          1     a rank failed, a fault of accel_ft (with its traceback), a FAIL of the doctor's, or
                who reads standard output is gone
          2     a fault the user can mend
          75    preempted: a checkpoint was saved, start again (EX_TEMPFAIL of sysexits.h)
          128+n a second signal n ended it at once; of what saves nothing, the first
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import psutil

DOCTOR = "`-m accel_ft.doctor` in place of `-m accel_ft.train` finds what is wrong with a set-up"
LONGEST = 500  # characters of a library's message, or of a value, that are told
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
STOP_SIGNALS = (  # that end a run
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP,
)  # fmt: skip
PARENT = "ACCEL_FT_PARENT"  # variable, for a process that starts itself anew
parent: tuple[int, list[str]]  # this process's, as it was at the start, and its command line


def _note_parent() -> None:
    """Now, as it may be gone when the libraries, seconds later, are loaded."""
    global parent  # noqa: PLW0603
    told = os.environ.pop(PARENT, "")
    if told:
        pid, *command = told.split("\n")
        parent = int(pid), command
        return
    parent = os.getppid(), []
    with contextlib.suppress(psutil.Error):
        parent = parent[0], psutil.Process(parent[0]).cmdline()


_note_parent()
os.register_at_fork(after_in_child=_note_parent)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Spare the processes that start here the signals that end a run, which schedulers and
    launchers send to all: what is blocked when they start stays blocked there.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UserError(Exception):
    """A fault the user can mend; says what was found, what is allowed and how to mend it."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """A key, value or option that cannot be."""


class DataError(UserError):
    """A file or data set that cannot be read as asked; names file and line."""


class LaunchError(UserError):
    """What is running is not what the accelerate YAML or the environment asked for."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another run."""


class RankError(UserError):
    """Another rank died, stopped or failed; names it, its stage and its log."""

    exit_code = 1


class Preempted(Exception):
    """A signal asked the run to stop; its state is saved. Not a UserError, after which a program
    may go on with its next run.
    """

    exit_code = EXIT_PREEMPTED


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean `x`?' for the closest of `known`, or ''."""
    close = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean `{close[0]}`?" if close else ""


def listed(names: Sequence[Any], limit: int = 3, between: str = ", ") -> str:
    """Return the first few of `names`, and how many more there are."""
    more = len(names) - limit
    return between.join([*map(str, names[:limit]), *[f"and {more} more"] * (more > 0)])


def require(extra: str, what: str, *modules: str) -> None:
    """Raise ConfigError where a library of an extra is missing."""
    if any(find_spec(module) is None for module in modules):
        needs = f"{what} needs {' and '.join(modules)}"
        raise ConfigError(f"{needs}. Fix: pip install 'accel_ft[{extra}]'")


def printable(text: str) -> str:
    """Return a text without what steers a terminal, which labels and names of files may hold."""
    steering = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # and right to left
    return re.sub(steering, lambda found: ascii(found[0])[1:-1], text)


def in_one_line(error: BaseException) -> str:
    """Return what an error says, in one line, as far as a message has room for it."""
    words = " ".join(str(error).split()) or repr(error)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`; turn a `UserError` into one message on stderr and exit code 2.

    A fault that every rank meets is printed once: the other ranks hold theirs back for three
    seconds, in which the launcher ends them; a fault of one rank alone is printed by that rank.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be in other letters
    try:
        main()
        close_process_group()
        if sys.stdout is not None and not sys.stdout.closed:
            _flush_output()
    except (UserError, Preempted, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `... | head` closed our standard output
            sys.exit(1)
        preempted = isinstance(error, Preempted)
        words = str(error) if preempted else f"error: {error}"
        for number in STOP_SIGNALS if preempted else ():
            signal.signal(number, signal.SIG_IGN)  # a copy, or the launcher's, as others have ended
        leave_last_words(words)
        if preempted:
            if error.__cause__ is None:  # else another rank is gone, and NCCL would wait for it
                close_process_group()
            if os.environ.get("RANK", "0") != "0":  # all ranks alike
                sys.exit(EXIT_PREEMPTED)
        _let_rank_0_speak_first()
        with contextlib.suppress(OSError):  # it may be gone; the exit code is not
            told = "\n".join([words, *getattr(error, "__notes__", [])])
            print(printable(told), file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", EXIT_USER_ERROR))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception:  # on other ranks mostly the echo of a fault of rank 0
        _let_rank_0_speak_first()
        raise
    finally:
        let_go_of_output()


def _flush_output() -> None:
    """Output that is lost is a fault."""
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def let_go_of_output() -> None:
    """Flush what was printed, and lose it where it has no place: Python, which flushes at its end,
    would turn the exit code into 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def close_process_group() -> None:
    """Close what torch.distributed left open, while Python runs: at its end NCCL warns of it, and a
    thread of gloo may abort the process (pytorch issue 190489).
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:  # all is done
            print(f"the process group could not be closed: {first_line(error)}", file=sys.stderr)


def leave_last_words(message: str) -> None:
    """Write what torchrun's launcher, which speaks last, is to print should this rank fail.

    Source: torch/distributed/elastic/multiprocessing/errors, the error file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        words = json.dumps({"message": message, "timestamp": str(int(time.time()))})
        with contextlib.suppress(OSError):  # whole or not: the launcher cannot read half of it
            own = f"{path}.{threading.get_ident()}"  # the watch's thread may leave some, too
            with open(own, "w", encoding="utf-8") as file:
                file.write(words)
            os.replace(own, path)


def _let_rank_0_speak_first() -> None:
    """Hold another rank's message back: where rank 0 has one too, this rank is ended now."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
