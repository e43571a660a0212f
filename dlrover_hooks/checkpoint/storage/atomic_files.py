"""Local files and folders that appear only when complete: written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dlrover_hooks.errors import HooksError

SUFFIX = ".behind.tmp"
FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_BYTES = 1 << 16
_AT_FDCWD, _EXCHANGE = -100, 2
_OLD = ".old"
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """The name to write to; at the end of the block it is on the disk as `path`. Nothing is left if the block raises.

    Remains of killed processes in that folder are removed; a lock distinguishes them from files being written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    part = target.parent / f".{target.name}.{os.getpid()}{SUFFIX}"
    with open(part, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield str(part)
            sync(part)
            os.replace(part, target)
        except BaseException as error:
            try:
                blame(part.parent, error)
            finally:
                part.unlink(missing_ok=True)
            raise
    sync(target.parent)


def blame(folder: Path, error: BaseException) -> None:
    """Check for a full disk, since torch's writer reports it only as a position in its file. Called before cleanup.

    Raises:
        OSError: nothing more can be written in `folder`, which caused `error`.
    """
    if isinstance(error, OSError | HooksError) or not isinstance(error, Exception):
        return
    probe = folder / f".probe.{os.getpid()}{SUFFIX}"
    try:
        with open(probe, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
            os.fsync(file.fileno())
    except OSError as full:
        if full.errno in FULL:
            raise full from error
    finally:
        probe.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    for part in folder.glob(f".*{SUFFIX}"):
        with contextlib.suppress(OSError), open(part, "rb") as found:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def whole_folder(part: str, path: str) -> None:
    """Replace `path` with folder `part`, whose files are all written, at once. Other files in an older `path` stay."""
    sync_all(Path(part))
    if not os.path.exists(path):
        os.rename(part, path)
    elif not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    else:
        _exchange(part, path)
        for name in set(os.listdir(part)) - set(os.listdir(path)):
            os.rename(Path(part, name), Path(path, name))
        shutil.rmtree(part)
    sync(Path(path).absolute().parent)


def put_back(path: Path) -> None:
    """Restore `path` after a process was killed between the two renames of `whole_folder`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{SUFFIX}{_OLD}"):
        if path.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            os.rename(left, path)


def whole_link(path: str, link: str) -> None:
    """Make `link` point to `path`, whatever it was before; it is never missing."""
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    part = f"{link}.{os.getpid()}{SUFFIX}"
    os.symlink(os.path.relpath(path, os.path.dirname(link)), part)
    os.replace(part, link)


def _exchange(one: str, other: str) -> None:
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        if code not in _NO_EXCHANGE:
            raise OSError(code, os.strerror(code), other)
        aside = f"{one}{_OLD}"  # NFS and others cannot exchange: `other` is missing for a moment, see `put_back`
        os.rename(other, aside)
        try:
            os.rename(one, other)
        except OSError:
            os.rename(aside, other)
            raise
        os.rename(aside, one)


def sync_all(folder: Path) -> None:
    """Sync everything in `folder` to disk. Files that disappear meanwhile belong to other processes."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in (*names, ""):
            with contextlib.suppress(FileNotFoundError):
                sync(Path(place, name))


def sync(path: Path) -> None:
    """Sync `path`, a file or a folder, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
