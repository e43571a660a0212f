"""What lies in a checkpoint tree: names, MANIFESTs, which generations are whole. Reads only. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from dlrover_hooks.checkpoint.place import Place
from dlrover_hooks.protocol import Generation, Manifest, Message

MANIFEST, LATEST, FINISHED, FRESH = "MANIFEST.json", "latest.json", "finished.json", "fresh.json"
FOLDER = re.compile(r"step-(\d{10,})-(\d{4,})$")
_Row = TypeVar("_Row", bound=Message)


class Latest(Message, frozen=True):
    """What `latest.json` holds."""

    job: str
    generation: Generation
    folder: str
    format: int = 1


class Finished(Message, frozen=True):
    """What `finished.json` holds."""

    job: str
    run: str
    step: int
    format: int = 1


class Fresh(Message, frozen=True):
    """What `fresh.json` holds."""

    job: str
    run: str
    format: int = 1


class Listed(Message, frozen=True):
    """One generation's folder as it is found. `fault`: why it is not whole; None: it is, as far as sizes tell."""

    folder: str
    step: int
    attempt: int
    fault: str | None = None
    manifest: Manifest | None = None
    """None: there is none, or it cannot be read."""
    names: tuple[str, ...] = ()
    """What lies in the folder."""


def folder(generation: Generation) -> str:
    """Name of a generation's folder."""
    return f"step-{generation.step:010d}-{generation.attempt:04d}"


def shard_name(rank: int) -> str:
    """Name of a rank's file; the form is the one that stock DCP readers expect."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def age(manifest: Manifest) -> tuple[int, int]:
    """Sorts generations of one run."""
    return manifest.generation.attempt, manifest.generation.step


def decode(data: bytes | None, row: type[_Row]) -> _Row | None:
    """`data` as `row`; None if absent or damaged."""
    try:
        return msgspec.json.decode(data, type=row) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def manifests(place: Place) -> Iterator[tuple[str, Manifest]]:
    """Folder and MANIFEST of all that can be read, whether the files are whole or not."""
    for name in sorted(place.sizes()):
        if FOLDER.match(name) and (manifest := decode(place.read(f"{name}/{MANIFEST}"), Manifest)) is not None:
            yield name, manifest


def listing(place: Place) -> Iterator[Listed]:
    """Every generation's folder, whatever is in it, by name."""
    for name in sorted(place.sizes()):
        if (match := FOLDER.match(name)) is None:
            continue
        sizes = place.sizes(name)
        manifest = decode(place.read(f"{name}/{MANIFEST}"), Manifest) if MANIFEST in sizes else None
        why = fault(manifest, name, sizes) if MANIFEST in sizes else f"there is no {MANIFEST}: it was never committed"
        yield Listed(name, int(match[1]), int(match[2]), why, manifest, tuple(sizes))


def whole(place: Place, bad: list[str]) -> Iterator[Manifest]:
    """Generations whose files are there; one line in `bad` for each that was committed and is damaged."""
    for one in listing(place):
        if one.manifest is not None and one.fault is None:
            yield one.manifest
        elif MANIFEST in one.names:
            bad.append(f"{place.path(one.folder)}: {one.fault}")


def fault(manifest: Manifest | None, name: str, sizes: dict[str, int]) -> str | None:
    """Why the generation in folder `name`, with files of `sizes`, is not whole; None if it is."""
    if manifest is None or manifest.format != 1 or folder(manifest.generation) != name:
        return f"{MANIFEST} cannot be read"
    if sorted(file.rank for file in manifest.files) != list(range(min(manifest.world_size, len(manifest.files) + 1))):
        return f"{MANIFEST} does not name all {manifest.world_size} ranks"
    for file in manifest.files:
        if file.name != shard_name(file.rank):
            return f"{MANIFEST} names {file.name!r}, which is no file of rank {file.rank}"
        if sizes.get(file.name) != file.nbytes:
            return f"{file.name}: expected {file.nbytes} bytes, found {sizes.get(file.name)}"
    return None
