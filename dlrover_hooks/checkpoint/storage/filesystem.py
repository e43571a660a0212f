"""A folder at a URL: local files are written durably (tmp, fsync, rename), all others through fsspec.

No torch. Every failure is raised as `StorageFailed` with the reason and a hint, and the cached file system is
discarded: a retry opens it again, so that expired credentials are renewed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dlrover_hooks.checkpoint.storage import direct_io
from dlrover_hooks.checkpoint.storage.stall_guard import AttemptAbandoned
from dlrover_hooks.errors import Corrupt, HooksError, StorageFailed

BLOCK_BYTES = 8 << 20
"""Part size of an upload. Stores allow 10 000 parts, so larger files get larger parts."""
PARTS = 10_000
SMALL_BYTES = 1 << 20
"""Maximum size of a file about the tree: `latest`, a reader's note."""
_PART = re.compile(r".+\.\d+-\d+\.tmp$")
"""Names of this module's temporary files; they contain the writing process and thread."""
LITTER_S = 3600.0
"""A temporary file older than this is not in use any more."""

_VERSIONS = ("ETag", "etag", "generation", "LastModified", "last_modified", "updated", "mtime", "ino", "created")
"""Version fields of fsspec back ends: S3, Azure, Google, SFTP, local, memory."""
_HINTS = {
    errno.ENOSPC: "free some space there, lower `keep`, or choose another `save_to`",
    errno.EDQUOT: "your quota there is used up: free some space, or choose another `save_to`",
    errno.EACCES: "choose a `save_to` that this user may write",
    errno.EPERM: "choose a `save_to` that this user may write",
    errno.EROFS: "that file system is mounted read-only: choose another `save_to`",
    errno.ENOTDIR: "a part of that path is a file: `save_to` must be a folder",
    errno.EEXIST: "a part of that path is a file: `save_to` must be a folder",
}


class FolderEntry(NamedTuple):
    """One entry of a folder listing."""

    size: int
    """-1 for a folder."""
    version: tuple[Any, ...]
    """Changes whenever the file is written again; empty if the back end does not report one."""


def _entry(found: Mapping[str, Any]) -> FolderEntry:
    size = -1 if found["type"] == "directory" else int(found["size"])
    return FolderEntry(size, tuple(found[key] for key in _VERSIONS if found.get(key) is not None))


def reason(error: BaseException) -> str:
    """The reason in one line."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def failures(doing: str) -> Iterator[None]:
    """Turn any exception of the file system into StorageFailed("cannot DOING: REASON")."""
    try:
        yield
    except (HooksError, AttemptAbandoned):
        raise
    except Exception as error:  # fsspec back ends raise exceptions of their own
        code = error.errno if isinstance(error, OSError) else None
        hint = _HINTS.get(code or 0, "check the URL, `storage_options` and the network")
        raise StorageFailed(f"cannot {doing}: {reason(error)}", hint=hint) from error


def absolute(url: str) -> str:
    """`url` in a form that is valid in processes with another working folder."""
    if "://" in url:
        return url
    return os.path.abspath(os.path.expanduser(url))


class StorageFolder:
    """The folder at an fsspec URL. Names are relative, with `/`. As thread-safe as the file system."""

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
        """Create the folder `name` if it is missing."""
        with self._doing(f"make the folder {self.path(name)}"):
            if self.local:
                os.makedirs(self.path(name), exist_ok=True)
            else:
                self.fs.makedirs(self.path(name), exist_ok=True)

    def read(self, name: str, limit: int = SMALL_BYTES) -> bytes | None:
        """The bytes of a small file; None if there is none.

        Raises:
            Corrupt: it is no regular file (reading a pipe would block forever), or longer than `limit`.
        """
        path = self.path(name)
        with self._doing(f"read {path}"):
            try:
                data = _read_local(path, limit) if self.local else self._range(path, limit + 1)
            except FileNotFoundError:
                return None
        if len(data) > limit:
            raise _too_long(path, limit)
        return data

    def _range(self, path: str, nbytes: int) -> bytes:
        try:
            return bytes(self.fs.cat_file(path, start=0, end=nbytes))
        except FileNotFoundError:
            raise
        except Exception:
            with contextlib.suppress(Exception):  # the first error is raised
                if self.fs.size(path) == 0:  # some stores reject a range of an empty object
                    return b""
            raise

    def put(self, name: str, data: bytes) -> None:
        """Replace small file `name` atomically: a reader gets the old or the new one."""
        with self._doing(f"write {self.path(name)}"):
            if self.local:
                _write_local(self.path(name), lambda part: _write_small(part, data), os.replace)
            else:
                self.fs.pipe_file(self.path(name), data)

    def put_new(self, name: str, data: bytes) -> bool:
        """As `put`, but returns False if file `name` exists. Back ends without an atomic check look first."""
        with self._doing(f"write {self.path(name)}"):
            try:
                if self.local:
                    _write_local(self.path(name), lambda part: _write_small(part, data), _publish_new)
                else:
                    self._create(self.path(name), data)
            except FileExistsError:
                return False
            return True

    def _create(self, path: str, data: bytes) -> None:
        try:
            self.fs.pipe_file(path, data, mode="create")
        except (TypeError, ValueError, NotImplementedError):
            if self.fs.exists(path):
                raise FileExistsError from None
            self.fs.pipe_file(path, data)

    def write(self, name: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        """Write file `name` from `pieces`, about `nbytes`; visible only when complete. Local: on the disk afterwards.

        If `pieces` raises AttemptAbandoned, nothing is removed, since a later attempt may have written the file.
        """
        with self._doing(f"write {self.path(name)}"):
            if self.local:
                _write_local(self.path(name), lambda part: direct_io.write(part, pieces), os.replace)
            else:
                self._upload(self.path(name), pieces, max(BLOCK_BYTES, nbytes // (PARTS << 20) + 1 << 20))

    def _upload(self, path: str, pieces: Iterable[memoryview], block: int) -> None:
        file = self.fs.open(path, "wb", block_size=block)
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException as error:
            _discard(file)
            if not isinstance(error, AttemptAbandoned):
                with contextlib.suppress(Exception):  # the first error is raised
                    self.fs.rm_file(path)
            raise

    def sizes(self, name: str = "") -> dict[str, int]:
        """Files and folders (size -1) directly under `name`; empty if there is no such folder."""
        return {one: entry.size for one, entry in self.entries(name).items()}

    def entries(self, name: str = "") -> dict[str, FolderEntry]:
        """As `sizes`, with the version of each file."""
        with self._doing(f"list {self.path(name)}"):
            self.fs.invalidate_cache(self.path(name))
            try:
                found = self.fs.ls(self.path(name), detail=True)
            except FileNotFoundError:
                return {}
            return {one["name"].rstrip("/").rsplit("/", 1)[-1]: _entry(one) for one in found}

    def is_link(self, name: str) -> bool:
        """`name` is a symbolic link in a local folder."""
        return self.local and os.path.islink(self.path(name))

    def remove(self, name: str) -> None:
        """Remove file `name` if it exists."""
        with self._doing(f"remove {self.path(name)}"), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Remove folder `name` if it exists, with all its content."""
        with self._doing(f"remove {self.path(name)}"), contextlib.suppress(FileNotFoundError):
            if self.local:
                _remove_tree(self.path(name))
            else:
                self.fs.rm(self.path(name), recursive=True)

    def sweep(self) -> None:
        """Remove temporary files that a dead writer left in this folder; files with other names stay."""
        for name in self.sizes() if self.local else ():
            if is_part(name):
                with self._doing(f"remove {self.path(name)}"), contextlib.suppress(FileNotFoundError):
                    found = os.lstat(self.path(name))
                    if stat.S_ISREG(found.st_mode) and found.st_mtime < time.time() - LITTER_S:
                        os.unlink(self.path(name))

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            with failures(what):
                yield
        except StorageFailed:
            if not self.local:
                type(self.fs).clear_instance_cache()
            raise


def is_part(name: str) -> bool:
    """Whether `name` is that of an unfinished file of `StorageFolder.put` or `StorageFolder.write`."""
    return _PART.match(name) is not None


def _remove_tree(path: str) -> None:
    """Remove as much of the folder `path` as possible, then raise the first OSError."""
    errors = list[OSError]()
    for folder, folders, files in os.walk(path, topdown=False, onerror=errors.append):
        for name in (*files, *folders):
            one = os.path.join(folder, name)
            _attempt(os.rmdir if name in folders and not os.path.islink(one) else os.unlink, one, errors)
    _attempt(os.rmdir, path, errors)
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise error


def _attempt(remove: Callable[[str], None], path: str, errors: list[OSError]) -> None:
    try:
        remove(path)
    except OSError as error:
        errors.append(error)


def _read_local(path: str, limit: int) -> bytes:
    """Raises Corrupt if it is no regular file, or longer than `limit`; it is not read then."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # `open` would block on a pipe without a writer
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Corrupt(f"{path}: it is no regular file")
        if found.st_size > limit:
            raise _too_long(path, limit)
        with open(fd, "rb", closefd=False) as file:
            return file.read(found.st_size + 1)  # allocates memory for the full count
    finally:
        os.close(fd)


def _too_long(path: str, limit: int) -> Corrupt:
    return Corrupt(f"{path}: it has more than the {limit} bytes that such a file may have")


def _discard(file: Any) -> None:
    """Abort an upload, so that neither its parts nor a truncated object remain. Closing it would publish it."""
    with contextlib.suppress(Exception):  # the earlier error is raised
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True  # otherwise its finalizer would close it


def _write_local(path: str, write: Callable[[str], None], publish: Callable[[str, str], None]) -> None:
    part = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        write(part)
        publish(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    _sync_folder(os.path.dirname(path))


def _publish_new(part: str, path: str) -> None:
    """Raises FileExistsError."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links
        if os.path.exists(path):
            raise FileExistsError from None
        os.replace(part, path)


def _write_small(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
