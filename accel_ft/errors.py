"""Faults of the user or the machine: one short message each, exit code 2, never a traceback."""

import os
import sys
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A fault the user can mend; the message says what was found, what is allowed and how to mend
    it.
    """


class ConfigError(UserError):
    """A key, value or option that cannot be."""


class DataError(UserError):
    """A file or data set that cannot be read as asked; names file and line."""


class LaunchError(UserError):
    """What is running is not what the accelerate YAML or the environment asked for."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another run."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean `x`?' for the closest of `known`, or ''."""
    close = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean `{close[0]}`?" if close else ""


def run_command(main: Callable[[], None], hint: str = "") -> None:
    """Run a command's `main`; turn a `UserError` into one message on stderr and exit code 2.

    Args:
        main: the command.
        hint: what to do after an interruption.

    A fault that every rank meets is printed once: the other ranks hold theirs back for three
        seconds, in which the launcher ends them; a fault of one rank alone is printed by that rank.
    """
    try:
        main()
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `... | head` closed our standard output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        _let_rank_0_speak_first()
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print(f"\ninterrupted{hint}", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception:  # on other ranks mostly the echo of a fault of rank 0
        _let_rank_0_speak_first()
        raise


def _let_rank_0_speak_first() -> None:
    """Hold another rank's message back: where rank 0 has one too, the launcher ends this rank
    now.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
