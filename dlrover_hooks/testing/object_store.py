"""An in-memory object store with realistic semantics and failures."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class FaultyStore(AbstractFileSystem):
    """An in-memory object store with realistic semantics and failures; fsspec protocol `faulty`.

    An object appears when its upload ends, not before. An upload that was neither ended nor aborted stays in `uploads`.
    All instances share one bucket. Each instance has the credentials of the time when it was created.
    """

    protocol = "faulty"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.credentials = FaultyStore.bucket.credentials

    bucket: ClassVar[Bucket]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Files and folders directly under `path`."""
        self._ask("ls", path)
        inside = _name(path).rstrip("/") + "/"
        rows: dict[str, dict[str, Any]] = {}
        for name, data in list(self.bucket.objects.items()):
            if name.startswith(inside):
                first, *rest = name.removeprefix(inside).split("/", 1)
                kind = {"type": "directory", "size": 0} if rest else {"type": "file", "size": len(data)}
                rows.setdefault(inside + first, {"name": inside + first} | kind)
        if not rows:
            raise FileNotFoundError(path)
        return list(rows.values()) if detail else list(rows)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """An object's bytes."""
        self._ask("read", path)
        try:
            return self.bucket.objects[_name(path)][start:end]
        except KeyError:
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Store a small object at once. `mode="create"` raises FileExistsError if it exists."""
        self._ask("put", path)
        name = _name(path)
        with self.bucket.lock:
            if mode == "create" and name in self.bucket.objects:
                raise FileExistsError(path)
            self.bucket.store(name, bytes(value))

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self._ask("remove", path)
        if self.bucket.objects.pop(_name(path), None) is None:
            raise FileNotFoundError(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: there are no folders."""

    def rmdir(self, path: str) -> None:
        """Does nothing: there are no folders."""

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, *_: Any, **more: Any) -> Any:
        self._ask("open", path)
        size: Any = block_size or 1 << 20
        return _FaultyFile(self, path, mode, block_size=size, **more)

    def _ask(self, verb: str, path: str) -> None:
        """Called for every request: checks the credentials and injects failures."""
        if self.credentials != self.bucket.credentials:
            raise PermissionError("the credentials have expired")
        self.bucket.fail(verb, path)


def _name(path: str) -> str:
    return str(FaultyStore._strip_protocol(path))


class Bucket:
    """The content of a `FaultyStore` and its failures.

    `fail(verb, path)` is set by the test; it may raise or wait. Verbs: ls, read, put, remove, open, part, end.
    `room_bytes`: the capacity. `credentials`: when changed, instances created before are refused.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[int, bytearray] = {}
        self.fail: Callable[[str, str], object] = lambda verb, path: None
        self.room_bytes = 1 << 40
        self.credentials = 0
        self.lock = threading.Lock()

    def store(self, name: str, data: bytes) -> None:
        """Create an object. Raises OSError (ENOSPC) if the bucket is full."""
        if sum(map(len, self.objects.values())) + len(data) > self.room_bytes:
            raise OSError(errno.ENOSPC, "the bucket is full")
        self.objects[name] = data


class _FaultyFile(AbstractBufferedFile):
    """A multipart upload, or a download by ranges."""

    def _initiate_upload(self) -> None:
        self.fs.bucket.uploads[id(self)] = bytearray()

    def _upload_chunk(self, final: bool = False) -> Any:
        self.fs._ask("part", self.path)
        upload = self.fs.bucket.uploads[id(self)]
        upload += self.buffer.getvalue()
        if len(upload) > self.fs.bucket.room_bytes:
            raise OSError(errno.ENOSPC, "the bucket is full")
        if final:
            self.fs._ask("end", self.path)
            self.fs.bucket.store(self.path, bytes(upload))
            del self.fs.bucket.uploads[id(self)]
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)

    def discard(self) -> None:
        """Abort the upload."""
        self.fs.bucket.uploads.pop(id(self), None)


@contextlib.contextmanager
def faulty_store() -> Iterator[Bucket]:
    """An empty bucket behind `faulty://` URLs, until the end of the block."""
    FaultyStore.bucket = bucket = Bucket()
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.clear_instance_cache()
    try:
        yield bucket
    finally:
        bucket.fail = lambda verb, path: None
