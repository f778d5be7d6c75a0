"""Files that are whole or not there, and a folder that belongs to one process."""

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from accel_ft.errors import ConfigError

logger = logging.getLogger(__name__)

STAGED = ".accel_ft-"  # between the name of a file that is being written, and who writes it
LOCK_SECONDS = 30.0  # a run that was told to stop may still be saving


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file's content; a reader, or a kill, never meets half of it."""
    staging = path.with_name(f".{path.name}{STAGED}{os.getpid()}")
    try:
        with staging.open("wb") as file:
            if isinstance(content, str):  # a file's name in it may be no UTF-8
                content = content.encode(errors="backslashreplace")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a write names none
        raise
    finally:
        staging.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what `write_whole` has left there in processes that were killed."""
    for path in folder.glob(f".*{STAGED}*"):
        number = path.name.rpartition(STAGED)[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return what is JSON to every reader: what is no number (NaN, infinite) becomes null."""
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent)


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Put a file, or a folder's entries, on the disk; not every file system does the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, path: Path) -> Iterator[None]:
    """Hold the lock `path` of `folder`; the operating system gives it back when the process dies.

    Raises:
        ConfigError: another process still holds it after half a minute.
    """
    lock = FileLock(path, fallback_to_soft=False)  # a marker would outlive a killed run
    held: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        logger.warning("%s is in use by another run: waiting %.0f s", folder, LOCK_SECONDS)
        try:
            held = lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise ConfigError(
                f"output_dir={folder}: another run is writing to it. Fix: end that run, or another "
                "--output_dir"
            ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        logger.warning("%s: its file system has no locks; see to it that one run uses it", folder)
    with held:
        yield
