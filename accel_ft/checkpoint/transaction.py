"""Atomic writes of a folder: it reaches the disk complete or not at all.

Write: fill a staging folder, and seal it. Then, in the background of the training, write SHA-256
    and size of every file to manifest.json, fsync everything, rename the folder to its final name,
    and only then prune older ones. Read: verify the manifest before any file is opened.

    checkpoints/.staging-step_00000500/       being written, or left over by a killed run
    checkpoints/.sealed-BOOT-step_00000500/   written, but not fsynced yet
    checkpoints/step_00000500/                published
    checkpoints/damaged-step_00000500/        set aside by a resume or a rollback

What a killed process has written survives it: the next process publishes sealed folders. It may not
survive a crash of the machine: folders sealed before the last boot are removed.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from accel_ft.errors import CheckpointError
from accel_ft.runtime.files import fsync, sha256

logger = logging.getLogger(__name__)

MANIFEST, NEW = "manifest.json", ".new"
STAGING_PREFIX = ".staging-"
SEALED_PREFIX = ".sealed-"
ASIDE_PREFIX = "damaged-"
STRAY = re.compile(r"(^|/)(\.nfs|\._|\.DS_Store$)[^/]*$")  # left by NFS and macOS
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


def checkpoint_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint after `step` updates is published."""
    return root / f"step_{step:08d}"


def staging_folder(final: Path) -> Path:
    """Return where a folder is written before it is published."""
    return final.with_name(STAGING_PREFIX + final.name)


def sealed_folder(final: Path) -> Path:
    """Return where a sealed folder waits to be published."""
    return final.with_name(f"{SEALED_PREFIX}{_boot()}-{final.name}")


@cache
def _boot() -> str:
    """An id that changes with each boot of the machine; if unknown, with each process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return secrets.token_hex(16)


def make_root(root: Path) -> None:
    """Create the folder of checkpoints; fsync it and its parents."""
    root.mkdir(parents=True, exist_ok=True)
    for folder in (root, root.parent, root.parent.parent):
        with contextlib.suppress(PermissionError):  # fsync needs to open it for reading
            fsync(folder)


def start(final: Path) -> Path:
    """Make an empty staging folder for `final` and return it."""
    staging = staging_folder(final)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    return staging


@contextlib.contextmanager
def writing(final: Path) -> Iterator[Path]:
    """Yield an empty staging folder; publish it without a manifest, or remove it on an exception.

    Raises:
        CheckpointError: another process is writing it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_folder(final)
    if staging.is_symlink():  # the folder it points to must not be emptied
        staging.unlink()
    staging.mkdir(exist_ok=True)
    # Closing the descriptor, as a kill does too, releases the lock.
    lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(lock, staging, final)
        try:
            for path in staging.iterdir():  # left by a killed process
                _delete(path)
            yield staging
            publish(final, with_manifest=False)  # users may add files to it
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _lock(folder: int, staging: Path, final: Path) -> None:
    is_ours = True
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems cannot lock folders
        is_ours = error.errno != errno.EWOULDBLOCK
    with contextlib.suppress(FileNotFoundError):  # published, or removed, since it was opened
        if is_ours and os.path.samestat(os.fstat(folder), staging.lstat()):
            return
    raise CheckpointError(f"{final}: another process is writing it")


def seal(final: Path) -> None:
    """Record names and sizes of `final`'s staged files, and mark the folder as complete."""
    staging = staging_folder(final)
    _write_manifest(staging, {name: {"bytes": size} for name, size in _sizes(staging).items()})
    staging.rename(sealed_folder(final))


def publish_sealed(root: Path) -> None:
    """Publish folders sealed by killed processes, if complete: in a copy of a live run, one may not
    be.
    """
    for path in root.glob(f"{SEALED_PREFIX}{_boot()}-step_*"):
        final = root / path.name.removeprefix(f"{SEALED_PREFIX}{_boot()}-")
        sealed = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entries = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
            sealed = {name: entry["bytes"] for name, entry in entries.items()}
        if sealed == _sizes(path):
            logger.info("%s was complete but not yet published: published now", final)
            publish(final)


def publish(final: Path, with_manifest: bool = True) -> None:
    """Write the manifest of the sealed or staged folder, fsync everything, and rename it."""
    source = sealed_folder(final)
    if not source.is_dir():
        source = staging_folder(final)
    mode = source.stat().st_mode & 0o666
    for path in _files(source):  # safetensors makes files that only their owner may read
        if not path.is_symlink():
            path.chmod(mode)
    if with_manifest:
        _write_manifest(source, {name: _entry(source / name) for name in _sizes(source)})
    for path in [*_files(source), *(p for p in source.rglob("*") if p.is_dir()), source]:
        fsync(path)
    if final.exists():  # a damaged checkpoint that a resume skipped, or an older final model
        remove(final)
    source.rename(final)
    fsync(final.parent)


def verify(folder: Path) -> None:
    """Check every file against the manifest.

    Raises:
        CheckpointError: naming the files that are missing, changed or unexpected.
    """
    try:
        if not stat.S_ISREG((folder / MANIFEST).lstat().st_mode):  # opening a pipe would block
            raise ValueError("it is no plain file")
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        entries = dict(json.loads(text)["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _reraise_unless_damage(error, folder / MANIFEST)
        words = f"is no checkpoint, or a damaged one: no readable {MANIFEST} ({error})"
        raise CheckpointError(f"{folder}: {words}") from error
    found = {path.relative_to(folder).as_posix() for path in _files(folder)} - {MANIFEST}
    faults = [f"{name} is missing" for name in sorted(entries.keys() - found)]
    strange = [name for name in sorted(found - entries.keys()) if not STRAY.search(name)]
    faults += [f"{name} is not in {MANIFEST}" for name in strange]
    faults += [f"{MANIFEST} is damaged"] * (text != _manifest(entries))
    for name in sorted(found & entries.keys()):
        try:
            entry, wanted = _entry(folder / name), entries[name]
        except OSError as error:
            _reraise_unless_damage(error, folder / name)
            faults.append(f"{name} cannot be read ({error.strerror})")
            continue
        if entry != wanted:
            size = isinstance(wanted, dict) and wanted.get("bytes") == entry["bytes"]
            faults.append(f"{name} is damaged ({'SHA-256' if size else 'size'} differs)")
    if faults:
        raise CheckpointError(f"{folder}: " + "; ".join(faults))


def _reraise_unless_damage(error: Exception, path: Path) -> None:
    """Re-raise an error that does not prove damage: it is transient, or the user can fix it."""
    if isinstance(error, OSError) and error.errno not in DAMAGE:
        error.filename = str(path)
        raise error


def list_published(root: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the published checkpoints, oldest step first."""
    folders = root.iterdir() if root.is_dir() else ()
    steps = ((re.fullmatch(r"step_(\d{8,})", path.name), path) for path in folders)
    return sorted((int(match[1]), path) for match, path in steps if match)


def prune(root: Path, keep: int, protected: Collection[int | None] = ()) -> None:
    """Remove all checkpoints except the newest `keep` (at least 1) and the `protected` steps."""
    for step, path in list_published(root)[:-keep]:
        if step not in protected:
            try:
                remove(path)
            except OSError as error:  # on NFS, files that a reader has open may stay behind
                logger.warning("%s could not be removed: %s", path, error)


def set_aside(checkpoints: Iterable[Path], why: str) -> None:
    """Rename checkpoints that must be neither used nor pruned, or that must not count as the newest
    when others are pruned. Log why.
    """
    for path in checkpoints:
        aside = path.with_name(ASIDE_PREFIX + path.name)
        remove(aside)
        path.rename(aside)
        logger.warning("%s: %s; set aside as %s, which may be removed", path, why, aside.name)


def has_leftovers(root: Path) -> bool:
    """Return whether killed runs left unpublished checkpoints here."""
    return any(any(root.glob(f"{kind}step_*")) for kind in (STAGING_PREFIX, f"{SEALED_PREFIX}*-"))


def remove_leftovers(root: Path) -> None:
    """Remove the unpublished folders of killed runs."""
    for prefix in (STAGING_PREFIX, SEALED_PREFIX):
        for path in root.glob(f"{prefix}*"):
            if prefix == SEALED_PREFIX:
                logger.warning("%s may be incomplete (written on another machine, or before this "
                               "one was booted): removed", path)  # fmt: skip
            _delete(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a published folder; rename it first, so that a kill leaves no part under its name."""
    doomed = folder.with_name(f"{STAGING_PREFIX}removed-{folder.name}")
    _delete(doomed, ignore_errors=True)
    if folder.exists():
        folder.rename(doomed)
        _delete(doomed)


def _delete(path: Path, ignore_errors: bool = False) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path, ignore_errors) if is_folder else path.unlink(missing_ok=True)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file except the manifest."""
    sizes = {path.relative_to(folder).as_posix(): path.lstat().st_size for path in _files(folder)}
    return {name: size for name, size in sizes.items() if name not in (MANIFEST, MANIFEST + NEW)}


def _write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    (folder / (MANIFEST + NEW)).write_text(_manifest(entries), encoding="utf-8")
    (folder / (MANIFEST + NEW)).replace(folder / MANIFEST)  # atomic: never a partial manifest


def _manifest(entries: dict[str, Any]) -> str:
    return json.dumps({"files": entries}, indent=1)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _entry(path: Path) -> dict[str, int | str]:
    if path.is_symlink() or (path.exists() and not path.is_file()):  # opening a pipe would block
        raise CheckpointError(f"{path}: is no plain file")
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
