"""A mount that is lost under `save_to`: nothing is written to the node's disk below it. Real mounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.storage import generations, mounts, url_claim
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import Generation, Manifest
from tests.e2e.kept import Kept, state

pytestmark = pytest.mark.usefixtures("runtime")
RELAUNCHED = (
    "import sys; from dlrover_hooks.checkpoint.storage.url_claim import UrlClaim\n"
    "UrlClaim.take(sys.argv[1], None, 'job', 'again')"
)


def mount(at: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this container lets root mount nothing: {done.stderr.strip()}")


def unmount(at: Path) -> None:
    subprocess.run(["umount", "-l", str(at)], check=True, capture_output=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "mnt"
    at.mkdir()
    mount(at)
    yield at
    with contextlib.suppress(subprocess.CalledProcessError):
        unmount(at)


@pytest.fixture(params=["a folder in it", "the mount point"])
def url(mounted: Path, request: pytest.FixtureRequest) -> Path:
    return mounted if request.param == "the mount point" else mounted / "runs/one"


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: file systems cannot be mounted, so none can be lost")
def test_a_lost_mount_fails_the_persist_and_nothing_is_written(
    kept: Kept, mounted: Path, url: Path, tmp_path: Path
) -> None:
    """By the keeper, whatever a relaunched process has made of the mount point; by the process that commits, too.

    Once it is mounted again, with another device number, saves go on.
    """
    kept.keeper()
    trainer = kept.trainer(save_to=str(url))
    claim = url_claim.UrlClaim.take(str(url), None, "job", "test")

    def saved(step: int) -> tuple[Generation, Any]:
        trainer.save(step, state(step))
        generation = kept.notice(keeper_messages.Hashed).generation
        trainer.persist(generation)
        return generation, kept.notice((keeper_messages.Persisted, keeper_messages.PersistFailed))

    def commit(generation: Generation, said: keeper_messages.Persisted) -> Manifest:
        manifest = Manifest("job", generation, 1, (said.file,), 1.0)
        generations.commit(str(url), None, manifest, 2)
        return manifest

    first, said = saved(1)
    assert isinstance(said, keeper_messages.Persisted)
    manifest = commit(first, said)
    shutil.copytree(mounted, tmp_path / "kept")
    unmount(mounted)
    for _ in range(2):
        _, failed = saved(2)
        assert isinstance(failed, keeper_messages.PersistFailed)
        assert f"{url} is on another file system than before: its mount is gone" in failed.reason
        assert "mount it again" in failed.hint
        for write in (lambda: commit(first, said), lambda: generations.finish(str(url), None, "job", first.run, 1)):
            with pytest.raises(StorageFailed, match="another file system"):
                write()
        assert not list(mounted.glob("**/step-*"))
        subprocess.run([sys.executable, "-c", RELAUNCHED, str(url)], check=True, cwd=Path(__file__).parents[2])
    mount(mounted)
    shutil.copytree(tmp_path / "kept", mounted, dirs_exist_ok=True)
    second, said = saved(3)
    assert isinstance(said, keeper_messages.Persisted)
    commit(second, said)
    found = generations.scan(str(url), None, "job").manifests
    assert [one.generation for one in found] == [second, manifest.generation]
    claim.release()


def test_a_folder_that_is_made_again_on_the_same_disk_is_no_lost_mount(tmp_path: Path) -> None:
    place = generations.StorageFolder(str(tmp_path / "tree"))
    claim = url_claim.UrlClaim.take(place.url, None, "job", "test")
    claim.release()
    shutil.rmtree(place.root)
    mounts.demand_same(place)
    url_claim.UrlClaim.take(place.url, None, "job", "test").release()
    mounts.demand_same(place)
