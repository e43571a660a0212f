"""A folder somewhere: local files written durably (tmp, fsync, rename), anything else through fsspec.

No torch. Every failure leaves here as `StorageFailed` with the reason and a hint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dlrover_hooks.errors import HooksError, StorageFailed

_HINTS = {
    errno.ENOSPC: "free some space there, lower `keep`, or choose another `save_to`",
    errno.EDQUOT: "your quota there is used up: free some space, or choose another `save_to`",
    errno.EACCES: "choose a `save_to` that this user may write",
    errno.EPERM: "choose a `save_to` that this user may write",
    errno.EROFS: "that file system is mounted read-only: choose another `save_to`",
    errno.ENOTDIR: "a part of that path is a file: `save_to` must be a folder",
    errno.EEXIST: "a part of that path is a file: `save_to` must be a folder",
}


def reason(error: BaseException) -> str:
    """One line that says why."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def failures(doing: str) -> Iterator[None]:
    """Turn whatever the file system raises into StorageFailed("cannot DOING: REASON")."""
    try:
        yield
    except HooksError:
        raise
    except Exception as error:  # fsspec back ends raise types of their own; all of them mean the same here
        code = error.errno if isinstance(error, OSError) else None
        hint = _HINTS.get(code or 0, "check the URL, `storage_options` and the network")
        raise StorageFailed(f"cannot {doing}: {reason(error)}", hint=hint) from error


def absolute(url: str) -> str:
    """`url` as another process with another working folder must spell it."""
    if "://" in url:
        return url
    return os.path.abspath(os.path.expanduser(url))


class Place:
    """The folder at an fsspec URL. Names are relative, with `/`. Thread-safe as far as the file system is."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = absolute(url)
        with failures(f"open {url}"):
            fs, root = fsspec.core.url_to_fs(self.url, **dict(options or {}))
        self.fs: Any = fs
        self.root: str = str(root).rstrip("/") or "/"
        self.local = isinstance(fs, LocalFileSystem)

    def path(self, name: str = "") -> str:
        return f"{self.root}/{name}" if name else self.root

    def make(self, name: str = "") -> None:
        """The folder `name` exists afterwards."""
        with failures(f"make the folder {self.path(name)}"):
            if self.local:
                os.makedirs(self.path(name), exist_ok=True)
            else:
                self.fs.makedirs(self.path(name), exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file; None if there is none."""
        with failures(f"read {self.path(name)}"):
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except FileNotFoundError:
                return None

    def fill(self, name: str, target: memoryview) -> int:
        """Read file `name` into `target`; the number of bytes it really has, up to one more than fits."""
        with failures(f"read {self.path(name)}"), self.fs.open(self.path(name), "rb", block_size=8 << 20) as file:
            got = 0
            while got < len(target):
                count = file.readinto(target[got:])
                if not count:
                    return got
                got += count
            return got + len(file.read(1))

    def put(self, name: str, data: bytes) -> None:
        """Replace small file `name` at once: a reader sees the old or the new one."""
        self.write(name, [memoryview(data)])

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """File `name` from `pieces`; visible only when whole. Local: on the disk afterwards."""
        with failures(f"write {self.path(name)}"):
            if self.local:
                _write_local(self.path(name), pieces)
            else:
                with self.fs.open(self.path(name), "wb") as file:
                    for piece in pieces:
                        file.write(piece)

    def sizes(self, name: str = "") -> dict[str, int]:
        """Files and folders (size -1) directly under `name`; empty if there is no such folder."""
        with failures(f"list {self.path(name)}"):
            self.fs.invalidate_cache(self.path(name))
            try:
                entries = self.fs.ls(self.path(name), detail=True)
            except FileNotFoundError:
                return {}
            return {
                entry["name"].rstrip("/").rsplit("/", 1)[-1]: -1 if entry["type"] == "directory" else int(entry["size"])
                for entry in entries
            }

    def remove(self, name: str) -> None:
        """No file `name` afterwards."""
        with failures(f"remove {self.path(name)}"), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """No folder `name` afterwards, whatever was in it."""
        with failures(f"remove {self.path(name)}"), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)


def _write_local(path: str, pieces: Iterable[memoryview]) -> None:
    part = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with open(part, "wb", buffering=0) as file:
            for piece in pieces:
                while len(piece):
                    piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync_folder(os.path.dirname(path))


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
