"""Files from anybody are refused as Corrupt. No code of theirs runs, no memory is taken for what they claim."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, digests
from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.state import safetensors_layout
from dlrover_hooks.checkpoint.state.pytree import flatten, unflatten
from dlrover_hooks.checkpoint.state.safetensors_header import HEADER_LIMIT, Header, Inside, header_end, parse
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.tensors.generation_images import Images, deliver_from_view
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Manifest, ShardFile

GENERATION = Generation(1, 7, "a" * 32)
TREE = {
    "model": {"w": torch.ones(3, 2), "c": torch.ones(2, dtype=torch.complex128)},
    "kind": [torch.float32, torch.device("cpu"), (1, {2: b"x"}), 1 << 70, 1j, float("inf"), {"a"}],
}


def valid() -> bytes:
    flat = flatten(TREE)
    recipe = CachedLayout(flat.tensors)
    inside = Inside(GENERATION, 0, 1, {"state": msgspec.Raw(flat.skeleton)})
    data = bytearray(recipe.layout.total_bytes)
    data[: recipe.layout.header_bytes] = b"".join(recipe.header(inside))
    return bytes(data)


VALID = valid()


class Memory:
    def __init__(self, data: bytes) -> None:
        self.view, self.header = memoryview(data), parse(data)

    def need(self, spans: Any) -> None:
        pass

    def deliver(self, moves: Any, copier: Any, memory: Any) -> None:
        deliver_from_view(self, moves, copier)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def read(data: bytes) -> Any:
    """All that a restore reads of an image before it copies."""
    images = Images(GENERATION, 1, lambda _: Memory(data))
    index = images.everything() if images.image(0) else {}
    skeletons = images.image(0).header.inside().skeletons
    return {part: unflatten(bytes(skeleton), index) for part, skeleton in skeletons.items()}


def framed(header: Any, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def row(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, bytes] = {
    "header of 2^62 bytes": struct.pack("<Q", 1 << 62) + b"{}",
    "header over the limit": struct.pack("<Q", HEADER_LIMIT + 1) + b" " * 64,
    "pickle": b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s." + bytes(64),
    "torch.save": b"PK\x03\x04" + bytes(64),
    "not UTF-8": framed(b'{"\xff\xfe":1}'),
    "UTF-16": framed('{"a":1}'.encode("utf-16")),
    "a list": framed([]),
    "deep nesting": framed(b"[" * 100_000),
    "deep object": framed(b'{"a":' * 100_000),
    "overlap": framed({"a": row(), "b": row(offsets=[4, 12])}, bytes(12)),
    "hole": framed({"a": row(), "b": row(offsets=[12, 20])}, bytes(20)),
    "a hole at the end": framed({"a": row()}, bytes(12)),
    "past the end": framed({"a": row()}, bytes(4)),
    "negative": framed({"a": row(offsets=[-8, 0])}, bytes(8)),
    "backwards": framed({"a": row(offsets=[8, 0])}, bytes(8)),
    "unknown dtype": framed({"a": row("PICKLE")}, bytes(8)),
    "negative shape": framed({"a": row(shape=[-1, -2])}, bytes(8)),
    "overflowing shape": framed({"a": row(shape=[1 << 62, 1 << 62, 4])}, bytes(8)),
    "a million dimensions": framed({"a": row(shape=[1 << 62] * 100_000)}, bytes(8)),
    "product is 2^64": framed({"a": row(shape=[1 << 32, 1 << 30])}),
    "shape of floats": framed({"a": row(shape=[2.0])}, bytes(8)),
    "offsets of text": framed({"a": row(offsets=["0", "8"])}, bytes(8)),
    "duplicate": framed(b'{"a":%s,"a":%s}' % ((json.dumps(row()).encode(),) * 2), bytes(8)),
    "huge integer": framed(b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 5000), bytes(8)),
    "metadata that is no text": framed({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS.keys())
def test_headers_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse(data)


def changed(**metadata: str) -> bytes:
    """The valid image with other metadata."""
    header = parse(VALID)
    table = json.loads(VALID[8 : header_end(VALID, len(VALID))])
    table["__metadata__"] |= metadata
    return framed(table, VALID[header.payload :])


def inside(**fields: Any) -> str:
    return json.dumps(json.loads(parse(VALID).metadata["dlrover_hooks"]) | fields)


def whole(**fields: Any) -> str:
    return json.dumps({"state.model.w": {"shape": [3, 2], "dtype": "F32"} | fields})


METADATA: dict[str, dict[str, str]] = {
    "another generation": {"dlrover_hooks": inside(generation={"attempt": 1, "step": 8, "run": "a" * 32})},
    "another rank": {"dlrover_hooks": inside(rank=1)},
    "half a surrogate": {"dlrover_hooks": "\ud800"},
    "nested": {"dlrover_hooks": "[" * 100_000},
    "offsets of another tensor": {"DCP_SHARDING_INFO": '{"b":{"saved_offsets":[0]}}'},
    "a shard beyond its whole": {"dlrover_hooks_wholes": whole(shape=[2, 2], sharded=True)},
    "a whole of another type": {"dlrover_hooks_wholes": whole(dtype="F16")},
    "a whole of no type": {"dlrover_hooks_wholes": whole(dtype="os.system")},
    "a whole that is not there": {"dlrover_hooks_wholes": whole(shape=[1 << 40, 2], sharded=True)},
    "a whole of negative shape": {"dlrover_hooks_wholes": whole(shape=[-3, -2], sharded=True)},
}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA.keys())
def test_metadata_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(Corrupt):
        read(changed(**metadata))


@pytest.mark.parametrize(
    "skeleton",
    [
        '{"$dtype":"load"}',
        '{"$dtype":"nn"}',
        '{"$dtype":"__builtins__"}',
        '{"$device":"os.system"}',
        '{"$device":{"a":1}}',
        '{"$scalar":["O","AAAAAAAAAAA="]}',
        '{"$inline":["O",[1],"AAAAAAAAAAA="]}',
        '{"$inline":["<f8",[1000000000000],""]}',
        '{"$timedelta":[1e300,0,0]}',
        '{"$float":"x"}',
        '{"$set":[[1]]}',
        '{"$import":"os"}',
        "[" * 100_000,
        '{"$tuple":' * 100_000,
    ],
)
def test_tags_name_nothing_but_data(skeleton: str) -> None:
    with pytest.raises(Corrupt):
        unflatten(skeleton.encode(), {})


MUTATIONS = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=12), st.integers(0, 12)), min_size=1, max_size=4
)


@settings(max_examples=400, deadline=None)
@given(MUTATIONS, st.booleans())
def test_whatever_is_changed_it_reads_or_is_corrupt(changes: list[tuple[int, bytes, int]], reframe: bool) -> None:
    """Bytes put in, taken out or replaced anywhere in the header; with `reframe` its length is made right again."""
    data, end = bytearray(VALID), parse(VALID).payload
    text = data[8:end].rstrip(b" ")
    for at, put, count in changes:
        at %= len(text)
        text[at : at + count] = put
    body = framed(bytes(text), bytes(data[end:])) if reframe else bytes(data[:8]) + bytes(text) + bytes(data[end:])
    with contextlib.suppress(Corrupt):
        read(body)


TAGS = ("tensor", "array", "dtype", "device", "scalar", "inline", "bytes", "int", "float", "dict", "ordered", "set")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("state.model.w"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: {f"${pair[0]}": pair[1]})
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(JSON)
@example({"$inline": "a00"})  # an alias of NumPy that it warns of
def test_any_skeleton_reads_or_is_corrupt(skeleton: Any) -> None:
    with contextlib.suppress(Corrupt):
        unflatten(json.dumps(skeleton).encode(), {"state.model.w": torch.ones(1)})


def manifest(**file: Any) -> Manifest:
    one = {"name": generations.shard_name(0), "rank": 0, "nbytes": len(VALID), "chunk_bytes": CHUNK_BYTES}
    chunks = digests(memoryview(VALID))
    return Manifest("job", GENERATION, 1, (ShardFile(**({**one, "chunks": chunks} | file)),), 1.0)


def stored(folder: Path, made: Manifest) -> None:
    home = folder / generations.folder(GENERATION)
    home.mkdir()
    (home / generations.shard_name(0)).write_bytes(VALID)
    (home / "MANIFEST.json").write_bytes(msgspec.json.encode(made))


def test_what_storage_offers_is_read(tmp_path: Path) -> None:
    stored(tmp_path, manifest())
    assert StoredImage(StorageFolder(str(tmp_path)), manifest(), 0).header.tensors.keys() == parse(VALID).tensors.keys()


@pytest.mark.parametrize(
    "file",
    [
        {"name": "../../etc/passwd"},
        {"name": "/etc/passwd"},
        {"nbytes": 1 << 60},
        {"nbytes": -1},
        {"chunk_bytes": 1},
        {"chunk_bytes": 0},
        {"chunks": ()},
        {"chunks": ("0" * 16,)},
    ],
    ids=str,
)
def test_manifests_are_refused(tmp_path: Path, file: dict[str, Any]) -> None:
    stored(tmp_path, manifest(**file))
    with pytest.raises(Corrupt):
        StoredImage(StorageFolder(str(tmp_path)), manifest(**file), 0)
    if "chunk" not in str(file):  # hashes are not looked at before the files are
        assert generations.scan(str(tmp_path), None, None).manifests == ()


CHILD = """
    import json, resource, struct, sys
    from pathlib import Path
    import msgspec, numpy
    from dlrover_hooks.checkpoint.storage import generations as storage
    from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
    from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
    from dlrover_hooks.errors import CheckpointError
    from dlrover_hooks.protocol import Generation, Manifest, ShardFile

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    root, generation = Path(sys.argv[1]), Generation(1, 7, "a" * 32)
    home = root / storage.folder(generation)
    home.mkdir()
    path = home / storage.shard_name(0)

    def refused(nbytes, head, world_size=1):
        with path.open("wb") as file:
            file.truncate(nbytes)  # as long as it claims, but sparse
            file.write(head)
        shard = ShardFile(path.name, 0, nbytes, CHUNK_BYTES, ("0" * 16,) * min(-(-nbytes // CHUNK_BYTES), 1 << 12))
        manifest = Manifest("job", generation, world_size, (shard,), 1.0)
        (home / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest))
        storage.scan(str(root), None, None)
        try:
            StoredImage(StorageFolder(str(root)), manifest, 0)
        except CheckpointError:
            pass
        else:
            raise SystemExit("it was read")

    refused(4096, struct.pack("<Q", 1 << 40))
    refused(1 << 36, struct.pack("<Q", 100))
    refused(1 << 36, struct.pack("<Q", (1 << 36) - 8))
    refused(4096, b"x", world_size=1 << 60)
    print("refused all")
"""


def test_no_memory_is_taken_for_claims(tmp_path: Path) -> None:
    """In a process that may take 64 MB more: claims of a terabyte, of 10^18 ranks, of a sparse file of 64 GB."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "refused all\n"), done.stderr[-2000:]


def test_header_and_image_agree() -> None:
    """The names that others import from `image` are those of `header`."""
    assert safetensors_layout.parse is parse
    assert isinstance(parse(VALID), Header)
    assert read(VALID)["state"]["kind"][0] is torch.float32
