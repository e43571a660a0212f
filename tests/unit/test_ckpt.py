"""`dlrover-hooks ckpt ls | verify | prune`: what lies there, what is damaged, what goes (DL-91)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlrover_hooks import cli
from dlrover_hooks.checkpoint import retention, storage
from dlrover_hooks.checkpoint.chunks import CHUNK_BYTES
from dlrover_hooks.protocol import Generation, Manifest, Retention
from dlrover_hooks.testing import faulty_store

RUN = "a" * 32
DATA = os.urandom(2 * CHUNK_BYTES + 1000)


def save(url: str, step: int, *, attempt: int = 0, keep: int | Retention = 99) -> Manifest:
    which = Generation(attempt, step, RUN)
    files = tuple(
        storage.write_shard(url, None, which, rank, 2, [memoryview(DATA)], len(DATA), job="mine") for rank in (0, 1)
    )
    manifest = Manifest("mine", which, 2, files, float(step))
    storage.commit(url, None, manifest, keep)
    return manifest


def called(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["ckpt", *words])


def listed(url: str) -> dict[int, str | None]:
    rows = [json.loads(line) for line in called("ls", url, "--json").stdout.splitlines()]
    return {row["step"]: row["fault"] for row in rows}


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """Steps 10 to 40 whole, 50 cut short, 60 never committed."""
    url = str(tmp_path / "ck")
    for step in (10, 20, 30, 40, 50):
        save(url, step)
    name = storage.shard_name(1)
    os.truncate(tmp_path / "ck" / "step-0000000050-0000" / name, 5)
    storage.write_shard(url, None, Generation(0, 60, RUN), 0, 2, [memoryview(DATA)], len(DATA), job="mine")
    return url


def test_ls_says_what_is_whole_and_why_not(tree: str) -> None:
    done = called("ls", tree)
    assert done.exit_code == 0
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert lines["40"][:7] == ["40", "0", "mine", "aaaaaaaa", "2", "16.8", "MB"]
    assert lines["40"][-1] == "whole"
    assert lines["50"][-2:] == ["damaged,", "latest"]
    assert lines["60"] == ["60", "0", "-"]
    assert f"step-0000000050-0000: {storage.shard_name(1)}: expected {len(DATA)} bytes, found 5\n" in done.stdout
    assert "step-0000000060-0000: there is no MANIFEST.json: it was never committed\n" in done.stdout
    rows = [json.loads(line) for line in called("ls", tree, "--json").stdout.splitlines()]
    assert [row["step"] for row in rows if row["whole"]] == [10, 20, 30, 40]
    assert [row["step"] for row in rows if row["latest"]] == [50]


def test_ls_of_nothing_is_an_error(tmp_path: Path) -> None:
    done = called("ls", str(tmp_path))
    assert done.exit_code == 1
    assert "there are no checkpoints at" in done.output
    assert called("ls", str(tmp_path), "--storage-options", "{").exit_code == 78


def test_verify_names_file_and_chunk(tree: str) -> None:
    """Every damage, not only the first one; exit code 1."""
    path = Path(tree) / "step-0000000020-0000" / storage.shard_name(0)
    data = bytearray(path.read_bytes())
    for at in (5, 2 * CHUNK_BYTES):
        data[at] ^= 1
    path.write_bytes(data)
    done = called("verify", tree)
    assert done.exit_code == 1
    where = f"step-0000000020-0000/{storage.shard_name(0)}"
    assert f"{where}: chunk 0 does not match its hash\n{where}: chunk 2 does not match its hash\n" in done.stdout
    assert f"step-0000000050-0000: {storage.shard_name(1)}: expected {len(DATA)} bytes" in done.stdout
    assert "3 of 5 generations are whole" in done.stdout
    assert called("verify", tree, "--step", "30").exit_code == 0
    gone = called("verify", tree, "--step", "35")
    assert gone.exit_code == 78
    assert "there are steps 10, 20, 30, 40, 50, 60" in gone.output


def test_prune_says_what_it_removes(tree: str) -> None:
    """The newest whole one stays whatever is asked; the damaged one is not touched; --dry-run touches nothing."""
    before = listed(tree)
    dry = called("prune", tree, "--keep", "last=1,every_steps=20", "--dry-run")
    assert (dry.exit_code, listed(tree)) == (0, before)
    assert dry.stdout == "would remove step-0000000010-0000\nwould remove step-0000000030-0000\n"
    done = called("prune", tree, "--keep", "last=1,every_steps=20")
    assert done.stdout == dry.stdout.replace("would remove", "removed")
    assert set(listed(tree)) == {20, 40, 50, 60}
    with retention.reading(storage.Place(tree), Generation(0, 20, RUN)):
        assert "step-0000000020-0000 is being read: it stays" in called("prune", tree, "--keep", "1").stdout
    called("prune", tree, "--keep", "1")
    assert set(listed(tree)) == {40, 50, 60}
    assert called("prune", tree, "--keep", "none").exit_code == 78


def test_prune_keeps_off_a_live_job(tree: str) -> None:
    code = (
        "from dlrover_hooks.checkpoint.storage import Claim; import sys; "
        f"c = Claim.take({tree!r}, None, 'mine', 'its master'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        done = called("prune", tree, "--keep", "1")
        other.kill()
    assert done.exit_code == 1
    assert "belongs to job 'mine' (its master), which is alive" in done.output
    assert len(listed(tree)) == 6


def test_all_of_it_on_an_object_store(tmp_path: Path) -> None:
    with faulty_store():
        url = f"faulty://{tmp_path.name}"
        for step in (1, 2, 3):
            save(url, step)
        assert called("verify", url).stdout.startswith("3 of 3 generations are whole")
        assert called("prune", url, "--keep", "2").stdout == "removed step-0000000001-0000\n"
        assert listed(url) == {2: None, 3: None}


def test_looking_loads_no_framework(tree: str) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from dlrover_hooks.ckpt import ckpt; "
        f"[CliRunner().invoke(ckpt, [verb, {tree!r}]) for verb in ('ls', 'verify')]; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
