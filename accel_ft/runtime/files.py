"""Files that are written atomically, and a folder that is locked by one process."""

import contextlib
import errno
import glob
import hashlib
import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from accel_ft.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

STAGED = ".accel_ft-"  # in the name of a staging file, between the final name and the writer's pid
LOCK_SECONDS = 30.0  # a run that was told to stop may still be saving


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file's content by an atomic rename: no reader sees half, even after a kill."""
    staging = path.with_name(f".{path.name}{STAGED}{os.getpid()}")
    try:
        staging.unlink(missing_ok=True)  # in a shared folder it may be another user's link
        with staging.open("xb") as file:
            if isinstance(content, str):  # file names may not be UTF-8
                content = content.encode(errors="backslashreplace")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of write() has none
        raise
    finally:
        staging.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(name: str) -> Iterator[Any]:
    """Open a text file that is renamed to `name` when it is complete; - is standard output. What
    cannot be replaced (a device, a file in a folder without write permission) is written in place.
    """
    if name == "-" and sys.stdout is None:
        raise ConfigError("output=-: standard output is closed. Fix: --output FILE")
    place, final = Path(name), Path(name).resolve()
    in_place = place.exists() and not (place.is_file() and os.access(final.parent, os.W_OK))
    in_place |= name.startswith(("/dev/", "/proc/"))  # such as the shell's /dev/fd/63
    how: Any = {"encoding": "utf-8", "errors": "backslashreplace"}  # escapes surrogates like JSON
    if name == "-" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(**how)
    if name == "-" or in_place:
        with contextlib.nullcontext(sys.stdout) if name == "-" else open(name, "w", **how) as file:
            yield file
        return
    remove_unfinished(final.parent, glob.escape(final.name))
    staging = final.with_name(f".{final.name}{STAGED}{os.getpid()}")
    if final.exists():
        final.open("a").close()  # raises without write permission
    try:
        staging.unlink(missing_ok=True)  # in a shared folder it may be another user's link
        with staging.open("x", **how) as file:
            if final.exists():
                staging.chmod(final.stat().st_mode & 0o777)
            yield file
    except OSError as error:  # may come from one of the caller's own reads
        if error.filename == str(staging) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = name
        raise
    else:
        shutil.move(staging, final, shutil.copyfile)  # copies if `final` is a mount
    finally:
        staging.unlink(missing_ok=True)


def refuse_links(*paths: Path) -> None:
    """Refuse symbolic links as targets of a write: in a folder that came from somebody else they
    may lead anywhere.

    Raises:
        ConfigError: naming the link.
    """
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link to {path.readlink()}. Fix: remove it")


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove the staging files of `name` that killed processes left in `folder`."""
    for path in folder.glob(f".{name}{STAGED}*"):
        number = path.name.rpartition(STAGED)[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON, which every reader accepts: NaN and infinite values become null."""
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent)


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk; not every file system supports the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, path: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock file `path` of `folder`; the operating system frees it when the process dies.

    Yields:
        A check that raises CheckpointError if the folder was moved or removed: by then another
        run may use its name.

    Raises:
        ConfigError: another process still holds it after half a minute.
    """
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock outlives a killed run
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
        logger.warning("%s: its file system has no locks; make sure only one run uses it", folder)

    def check() -> None:
        is_same = False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_same = os.path.samestat(os.fstat(own.fileno()), path.stat())
        if not is_same:
            raise CheckpointError(
                f"{folder}: was moved or removed while this run was writing to it. Fix: put it "
                "back, then the same command with --resume_from_checkpoint latest"
            )

    with held, path.open("ab") as own:  # an open file's inode is not reused
        yield check
