"""`dlrover-hooks ckpt ls | verify | prune`: what lies there, what is damaged, what goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.save import progress_log
from dlrover_hooks.checkpoint.storage import damage_scan, generations, retention
from dlrover_hooks.cli import main
from dlrover_hooks.protocol import Generation, Manifest, Retention
from dlrover_hooks.testing import faulty_store

RUN = "a" * 32
DATA = os.urandom(2 * CHUNK_BYTES + 1000)


def save(url: str, step: int, *, attempt: int = 0, keep: int | Retention = 99) -> Manifest:
    which = Generation(attempt, step, RUN)
    files = tuple(
        generations.write_shard(url, None, which, rank, 2, [memoryview(DATA)], len(DATA), job="mine") for rank in (0, 1)
    )
    manifest = Manifest("mine", which, 2, files, float(step))
    generations.commit(url, None, manifest, keep)
    return manifest


def called(*words: str) -> Result:
    return CliRunner().invoke(main.main, ["ckpt", *words])


def listed(url: str) -> dict[int, str | None]:
    rows = [json.loads(line) for line in called("ls", url, "--json").stdout.splitlines()]
    return {row["step"]: row["fault"] for row in rows}


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """Steps 10 to 40 whole, 50 cut short, 60 never committed."""
    url = str(tmp_path / "ck")
    for step in (10, 20, 30, 40, 50):
        save(url, step)
    name = generations.shard_name(1)
    os.truncate(tmp_path / "ck" / "step-0000000050-0000" / name, 5)
    generations.write_shard(url, None, Generation(0, 60, RUN), 0, 2, [memoryview(DATA)], len(DATA), job="mine")
    return url


def test_ls_says_what_is_whole_and_why_not(tree: str) -> None:
    done = called("ls", tree)
    assert done.exit_code == 0
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert lines["40"][:7] == ["40", "0", "mine", "aaaaaaaa", "2", "16.8", "MB"]
    assert lines["40"][-1] == "whole"
    assert lines["50"][-2:] == ["damaged,", "latest"]
    assert lines["60"] == ["60", "0", "not", "committed"]
    assert f"step-0000000050-0000: {generations.shard_name(1)}: expected {len(DATA)} bytes, found 5\n" in done.stdout
    assert "step-0000000060-0000: there is no MANIFEST.json: it was never committed\n" in done.stdout
    rows = [json.loads(line) for line in called("ls", tree, "--json").stdout.splitlines()]
    assert [row["step"] for row in rows if row["whole"]] == [10, 20, 30, 40]
    assert [row["step"] for row in rows if row["latest"]] == [50]


VERBS = (("ls",), ("verify",), ("prune", "--keep", "1"), ("export", "--to", "torch"))


@pytest.mark.parametrize("verb", VERBS, ids=lambda words: words[0])
def test_what_is_there_instead_of_checkpoints_is_said(verb: tuple[str, ...], tree: str, tmp_path: Path) -> None:
    """By each verb alike, and with one exit code."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk").mkdir()
    for name in "abcd":
        (tmp_path / "junk" / name).touch()
    one = Path(tree) / "step-0000000040-0000"
    for url, said in {
        tmp_path / "nowhere": "nowhere does not exist\nHINT: URL is what `save_to` was",
        tmp_path / "nowhere" / "step-0000000040-0000": "does not exist",
        tmp_path / "empty": "empty holds nothing\n",
        tmp_path / "junk": "junk holds no checkpoints, but a, b, c, ...\n",
        tmp_path / "junk" / "a": "junk/a is a file, not a folder with checkpoints in it\n",
        one: f"{one} is one generation, not a tree of them\nHINT: give the folder above: {tree}\n",
    }.items():
        done = called(*verb, str(url), *([str(tmp_path / "x.pt")] if verb[0] == "export" else []))
        assert (done.exit_code, said in done.output) == (78, True), done.output
    assert called("ls", tree, "--storage-options", "{").exit_code == 78


def test_a_missing_file_and_a_damaged_manifest_have_words(tree: str) -> None:
    (Path(tree) / "step-0000000010-0000" / generations.shard_name(1)).unlink()
    (Path(tree) / "step-0000000020-0000" / "MANIFEST.json").write_text("{")
    done = called("ls", tree)
    assert f"step-0000000010-0000: {generations.shard_name(1)} is missing\n" in done.stdout
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert lines["20"] == ["20", "0", "damaged"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (99, "99 B"), (25_040, "25.0 KB"), (999_999, "1.0 MB"), (16_800_000, "16.8 MB"), (4.7e9, "4.70 GB")],
)
def test_sizes_have_a_unit_that_fits(nbytes: float, text: str) -> None:
    assert progress_log.readable(nbytes) == text


def test_ctrl_c_is_130(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 would say that something is damaged."""

    def interrupted(*_: object) -> Iterator[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(damage_scan, "faults", interrupted)
    done = called("verify", tree)
    assert (done.exit_code, done.output) == (130, "ended with Ctrl-C\n")


def test_verify_names_file_and_chunk(tree: str) -> None:
    """Every damage, not only the first one; exit code 1."""
    path = Path(tree) / "step-0000000020-0000" / generations.shard_name(0)
    data = bytearray(path.read_bytes())
    for at in (5, 2 * CHUNK_BYTES):
        data[at] ^= 1
    path.write_bytes(data)
    done = called("verify", tree)
    assert done.exit_code == 1
    where = f"step-0000000020-0000/{generations.shard_name(0)}"
    assert f"{where}: chunk 0 does not match its hash\n{where}: chunk 2 does not match its hash\n" in done.stdout
    assert f"step-0000000050-0000: {generations.shard_name(1)}: expected {len(DATA)} bytes" in done.stdout
    assert "3 of 5 generations are whole, 67.1 MB read" in done.stdout
    assert done.stderr == ""
    assert called("verify", tree, "--step", "30").exit_code == 0
    (Path(tree) / "latest.json").write_bytes(b"{}")
    assert "latest.json: cannot be read, or does not match its hash\n" in called("verify", tree).stdout
    assert called("verify", tree, "--step", "30").exit_code == 0
    gone = called("verify", tree, "--step", "35")
    assert gone.exit_code == 78
    assert "no step 35 is at" in gone.output
    assert "the newest other whole one is --step 40; there are steps 10, 20, 30, 40\n" in gone.output
    assert "step 60 at" in called("verify", tree, "--step", "60").output


def test_prune_says_what_it_removes(tree: str) -> None:
    """The newest whole one stays whatever is asked; the damaged one is not touched; --dry-run touches nothing."""
    before = listed(tree)
    dry = called("prune", tree, "--keep", "last=1,every_steps=20", "--dry-run")
    assert (dry.exit_code, listed(tree)) == (0, before)
    assert dry.stdout == (
        "would remove step-0000000010-0000\nwould remove step-0000000030-0000\n"
        "step-0000000060-0000 was never committed, but is newer than what is whole: it stays, since a keeper may still "
        "be writing it. If no process of that job runs, remove the folder by hand\n"
    )
    done = called("prune", tree, "--keep", "last=1,every_steps=20")
    assert done.stdout == dry.stdout.replace("would remove", "removed")
    assert set(listed(tree)) == {20, 40, 50, 60}
    with retention.reading(generations.StorageFolder(tree), Generation(0, 20, RUN)):
        assert "step-0000000020-0000 is being read: it stays" in called("prune", tree, "--keep", "1").stdout
    called("prune", tree, "--keep", "1")
    assert set(listed(tree)) == {40, 50, 60}
    for nothing in ("none", "0", "last=0"):
        refused = called("prune", tree, "--keep", nothing)
        assert refused.exit_code == 78
        assert f"--keep='{nothing}' does not say what to keep\nHINT: use a whole number from 1" in refused.output
    assert set(listed(tree)) == {40, 50, 60}


def test_prune_that_has_nothing_to_do_says_so(tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    save(url, 1)
    assert called("prune", url, "--keep", "2").stdout == f"nothing to remove at {url}: --keep 2 keeps what is there\n"


def test_prune_follows_no_link(tree: str, tmp_path: Path) -> None:
    linked = Path(tree) / "step-0000000010-0000"
    linked.rename(tmp_path / "disk")
    linked.symlink_to(tmp_path / "disk")
    done = called("prune", tree, "--keep", "1")
    assert "step-0000000010-0000 is a link: it stays\n" in done.stdout
    assert listed(tree)[10] is None


def test_prune_keeps_off_a_live_job(tree: str) -> None:
    code = (
        "from dlrover_hooks.checkpoint.storage.url_claim import UrlClaim; import sys; "
        f"c = UrlClaim.take({tree!r}, None, 'mine', 'its master'); print('held', flush=True); sys.stdin.read()"
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
        "import sys; from click.testing import CliRunner; from dlrover_hooks.cli.ckpt import ckpt; "
        f"[CliRunner().invoke(ckpt, [verb, {tree!r}]) for verb in ('ls', 'verify')]; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_ls_shows_a_job_whose_name_looks_like_markup(tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    generations.write_shard(url, None, Generation(0, 1, RUN), 0, 1, [memoryview(DATA)], len(DATA), job="exp[/2]")
    file = generations.write_shard(url, None, Generation(0, 1, RUN), 0, 1, [memoryview(DATA)], len(DATA), job="exp[/2]")
    generations.commit(url, None, Manifest("exp[/2]", Generation(0, 1, RUN), 1, (file,), 1.0), 2)
    done = called("ls", url)
    assert done.exit_code == 0, done.output
    assert "exp[/2]" in done.stdout
