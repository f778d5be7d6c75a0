"""How a command ends: a fault of the user or the machine prints one short message, no traceback.

exit code 0     done
          1     a rank failed, a bug in accel_ft (with its traceback), a FAIL of the doctor, or the
                reader of standard output is gone
          2     a fault the user can fix
          75    preempted: a checkpoint was saved, if there was anything to save; start again
                (EX_TEMPFAIL of sysexits.h)
          128+n a second signal n ended it at once; a command that never saves ends at the first
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
from pathlib import Path
from typing import Any

import psutil

DOCTOR = "`-m accel_ft.doctor` in place of `-m accel_ft.train` finds what is wrong with a set-up"
GUESSED_NAMES, GUESSED_CHARACTERS = 1000, 100  # at most, for a suggestion
LONGEST = 500  # characters shown of a library's message, or of a value
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
STOP_SIGNALS = (  # signals that end a run
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP,
)  # fmt: skip
PARENT = "ACCEL_FT_PARENT"  # variable: keeps `parent` when this process re-executes itself
parent: tuple[int, list[str]]  # process id and command line, at start-up


def _note_parent() -> None:
    """Record the parent at import or fork: it may be gone once libraries are loaded, in seconds."""
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
    """Block STOP_SIGNALS in the child processes that are started in the body: schedulers and
    launchers signal every process of a job, and a child inherits the signal mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UserError(Exception):
    """A fault the user can fix; says what was found, what is allowed and how to fix it."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """A key, value or option that is not valid."""


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
    """A signal asked the run to stop; what there was to save is saved. Not a UserError: a program
    may catch those and go on with its next run.
    """

    exit_code = EXIT_PREEMPTED


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean `x`?' for the closest of `known`, or ''. No guess among many names, or
    for a long one: each comparison takes time by the product of two lengths.
    """
    names = [name for name in known if len(name) <= GUESSED_CHARACTERS]
    if len(names) > GUESSED_NAMES or len(word) > GUESSED_CHARACTERS:
        return ""
    close = get_close_matches(word, names, n=1, cutoff=cutoff)
    close = close or [name for name in names if name.casefold() == word.casefold()]
    return f" Did you mean `{close[0]}`?" if close else ""


def listed(names: Sequence[Any], limit: int = 3, between: str = ", ") -> str:
    """Return the first few of `names`, and how many more there are."""
    more = len(names) - limit
    return between.join([*map(str, names[:limit]), *[f"and {more} more"] * (more > 0)])


def beside(missing: Path) -> str:
    """Return ' Did you mean `x`?' for the folder closest in name to one that is missing; else which
    others there are, or ''.
    """
    there = sorted(path.name for path in missing.parent.glob("[!._]*") if path.is_dir())
    has_others = there and missing.parent.name  # not those of the current folder
    others = f" {missing.parent} holds {listed(there)}" if has_others else ""
    return nearest(missing.name, there) or others


def counted(number: int, what: str) -> str:
    """Return '1 row', '2 rows'."""
    return f"{number} {what}{'s' * (number != 1)}"


def require(extra: str, what: str, *modules: str) -> None:
    """Raise ConfigError where a library of an extra is missing."""
    if any(find_spec(module) is None for module in modules):
        needs = f"{what} needs {' and '.join(modules)}"
        raise ConfigError(f"{needs}. Fix: pip install 'accel_ft[{extra}]'")


def printable(text: str) -> str:
    """Escape the characters that control a terminal; labels and file names may contain them."""
    steering = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # bidi marks too
    return re.sub(steering, lambda found: ascii(found[0])[1:-1], text)


def in_one_line(error: BaseException) -> str:
    """Return an error's message on one line, cut at LONGEST characters."""
    words = " ".join(str(error).split()) or repr(error)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its repr where the message is empty."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`; turn a `UserError` into one message on stderr and exit code 2.

    A fault that every rank meets is printed once, by rank 0: the other ranks wait three seconds,
    during which the launcher ends them. A fault of one rank alone is printed by that rank.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may be unable to encode a path
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
            signal.signal(number, signal.SIG_IGN)  # sent twice, or by the launcher as ranks end
        leave_last_words(words)
        if preempted:
            if error.__cause__ is None:  # else another rank is gone, and NCCL would wait for it
                close_process_group()
            if os.environ.get("RANK", "0") != "0":  # only rank 0 prints it
                sys.exit(EXIT_PREEMPTED)
        _let_rank_0_speak_first()
        with contextlib.suppress(OSError):  # stderr may be closed; the exit code matters
            told = "\n".join([words, *getattr(error, "__notes__", [])])
            print(printable(told), file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", EXIT_USER_ERROR))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception:  # on other ranks mostly a consequence of rank 0's fault
        _let_rank_0_speak_first()
        raise
    finally:
        let_go_of_output()


def _flush_output() -> None:
    """Flush standard output; raise OSError where it is lost."""
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def let_go_of_output() -> None:
    """Flush the standard streams, and discard what cannot be written: Python flushes again at
    exit, and a failure there would turn the exit code into 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def close_process_group() -> None:
    """Destroy the process group before the interpreter exits: at exit NCCL would warn about it, and
    a gloo thread may abort the process (pytorch issue 190489).
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:  # the work is done
            print(f"the process group could not be closed: {first_line(error)}", file=sys.stderr)


def leave_last_words(message: str) -> None:
    """Write the error file: the message that torchrun prints at the end if this rank fails.

    Source: torch/distributed/elastic/multiprocessing/errors, the error file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        words = json.dumps({"message": message, "timestamp": str(int(time.time()))})
        with contextlib.suppress(OSError):  # atomic rename: half a file breaks the launcher
            own = f"{path}.{threading.get_ident()}"  # the watch thread may write one too
            with open(own, "w", encoding="utf-8") as file:
                file.write(words)
            os.replace(own, path)


def _let_rank_0_speak_first() -> None:
    """Delay a message on other ranks: if rank 0 fails too, the launcher ends them meanwhile."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
