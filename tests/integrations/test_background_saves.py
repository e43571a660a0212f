"""Writes behind the step: bounded, in order, whole, nothing lost and no error unsaid."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover_hooks.checkpoint.save.background_saves import BackgroundSaves
from dlrover_hooks.checkpoint.save.state_tree_copies import StateTreeCopies
from dlrover_hooks.checkpoint.storage import atomic_files
from dlrover_hooks.checkpoint.storage.atomic_files import SUFFIX, put_back, whole_file, whole_folder
from dlrover_hooks.errors import CheckpointError, StorageFailed, UnsupportedState
from tests.ranks import ROOT


def test_a_third_save_waits_for_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's AsyncCheckpointIO queues clones without a bound."""
    behind, gate, order = BackgroundSaves(deadline_s=60), threading.Event(), list[str]()
    for name in ("a", "b"):
        behind.room()
        behind.save(name, lambda name=name: (gate.wait(60), order.append(name)))
    third = threading.Thread(target=lambda: (behind.room(), order.append("room")))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    gate.set()
    third.join(60)
    behind.close()
    assert order.index("room") >= 1
    assert caplog.text.count("waits for the save before the last") == 1


def test_a_removal_comes_after_the_saves_before_it(tmp_path: Path) -> None:
    behind, gate, path = BackgroundSaves(), threading.Event(), tmp_path / "file"
    behind.save(str(path), lambda: (gate.wait(60), path.write_text("whole")))
    behind.remove(str(path), path.unlink)
    assert behind.leaves(str(path)) is False
    gate.set()
    behind.wait()
    assert behind.leaves(str(path)) is None
    assert not path.exists()
    behind.close()


def test_an_error_is_raised_at_the_next_verb_and_only_there(tmp_path: Path) -> None:
    behind, path = BackgroundSaves(), tmp_path / "missing" / "file"
    behind.save(str(path), lambda: path.write_text(""))
    with pytest.raises(StorageFailed, match=f"cannot write {path}: No such file"):
        behind.wait()
    behind.room()
    behind.save(str(path), lambda: path.write_text(""))
    with pytest.raises(StorageFailed):
        behind.close()
    behind.close()


def test_errors_that_need_not_stop_training_are_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    behind = BackgroundSaves(on_error="warn")
    behind.save("file", lambda: (tmp_path / "no" / "file").write_text(""))
    behind.close()
    assert "cannot write file" in caplog.text


def test_a_storage_that_hangs_is_not_waited_for_for_ever() -> None:
    behind, gate = BackgroundSaves(deadline_s=0.05), threading.Event()
    behind.save("slow", lambda: gate.wait(60))
    with pytest.raises(CheckpointError, match="slow is still not written"):
        behind.wait()
    gate.set()


def test_the_thread_ends_with_close_and_comes_back_with_the_next_save() -> None:
    behind, done = BackgroundSaves(), list[int]()
    for number in range(20):
        behind.save("file", lambda number=number: done.append(number))
        behind.close()
    assert done == list(range(20))


def test_a_copy_is_what_torch_would_have_saved(tmp_path: Path) -> None:
    """Shared storages stay shared, views and strides stay, flags and kinds stay; nothing is the original's memory."""
    base = torch.arange(12.0).reshape(3, 4)
    shared = torch.nn.Parameter(torch.randn(5))
    state = {"base": base, "row": base[1], "turned": base.t(), "tied": [shared, shared], "zero": torch.tensor(3),
             "none": torch.empty(0, 2), "bytes": torch.tensor([1, 2], dtype=torch.uint8), "half": base.bfloat16(),
             "sparse": torch.eye(3).to_sparse(), "ordered": OrderedDict(a=torch.ones(2)), "text": ["x", {1: (2,)}],
             "conjugate": torch.ones(2, dtype=torch.complex64).conj()}  # fmt: skip
    torch.save(state, tmp_path / "theirs")
    taken = StateTreeCopies().take(state)
    before = copy.deepcopy(state["text"])
    with torch.no_grad():
        base.zero_()
        shared.zero_()
        state["text"][1][1] = 0
    torch.save(taken, tmp_path / "ours")
    ours, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("ours", "theirs"))
    assert ours["text"] == before
    for name in ("base", "row", "turned", "zero", "none", "bytes", "half", "conjugate"):
        assert torch.equal(ours[name], theirs[name])
        assert ours[name].stride() == theirs[name].stride()
    assert torch.equal(ours["sparse"].to_dense(), theirs["sparse"].to_dense())
    assert torch.equal(ours["ordered"]["a"], torch.ones(2))
    assert ours["row"].untyped_storage().data_ptr() == ours["base"].untyped_storage().data_ptr()
    assert ours["tied"][0] is ours["tied"][1]
    assert isinstance(ours["tied"][0], torch.nn.Parameter)
    assert torch.equal(ours["tied"][0], theirs["tied"][0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_of_a_gpu_are_copied_to_the_host() -> None:
    base = torch.arange(12.0, device="cuda").reshape(3, 4)
    taken = StateTreeCopies().take({"base": base, "row": base[1]})
    base.zero_()
    assert taken["base"].device.type == "cpu"
    assert torch.equal(taken["base"], torch.arange(12.0).reshape(3, 4))
    assert taken["row"].untyped_storage().data_ptr() == taken["base"].untyped_storage().data_ptr()


def test_memory_is_used_again_once_a_copy_is_dropped() -> None:
    copies, state = StateTreeCopies(2), {"a": torch.randn(100_000)}
    first = copies.take(state)
    second = copies.take(state)
    places = {one["a"].data_ptr() for one in (first, second)}
    assert len(places) == 2
    with pytest.raises(CheckpointError, match="2 earlier saves"):
        copies.take(state, timeout_s=0.01)
    del first
    third = copies.take(state)
    assert third["a"].data_ptr() in places
    assert torch.equal(second["a"], third["a"])
    del second
    grown = copies.take({"a": torch.randn(200_000)})
    assert grown["a"].data_ptr() not in places


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(UnsupportedState, match="lock"):
        StateTreeCopies().take({"lock": threading.Lock()})


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with pytest.raises(FileNotFoundError), whole_file(str(path)) as part:
        Path(part).unlink()
    assert list(path.parent.iterdir()) == []
    left = path.parent / f".other.123{SUFFIX}"
    left.write_text("of a killed process")
    with whole_file(str(path)) as part:
        Path(part).write_text("whole")
        assert not path.exists()
    assert [one.name for one in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_replaces_another_and_keeps_what_is_not_its_own(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS cannot exchange two folders: two renames do."""
    if not exchanges:
        monkeypatch.setattr(atomic_files, "_EXCHANGE", 1 << 30)  # flags that the kernel refuses: EINVAL, as NFS does
    part, path = tmp_path / "part", tmp_path / "saved"
    for folder, names in ((path, ("model", "notes")), (part, ("model", "new"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    whole_folder(str(part), str(path))
    assert {one.name: one.read_text() for one in path.iterdir()} == {"model": "part", "new": "part", "notes": "saved"}
    assert os.listdir(tmp_path) == ["saved"]


def test_a_folder_whose_replacement_was_killed_halfway_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames the folder is missing."""
    part, path = tmp_path / f".saved.1-1{SUFFIX}", tmp_path / "saved"
    for folder in (path, part):
        folder.mkdir()
        (folder / "model").write_text(folder.name)
    rename, done = os.rename, list[str]()

    class Killed(BaseException): ...

    def killed(one: str, other: str) -> None:
        if done:
            raise Killed
        done.append(one)
        rename(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "_EXCHANGE", 1 << 30)
        patch.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            whole_folder(str(part), str(path))
    assert not path.exists()
    put_back(path)
    assert (path / "model").read_text() == "saved"


SCRIPT = """
    import signal, sys, threading
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that starts the tests may have it ignored
    from dlrover_hooks.checkpoint.save.background_saves import BackgroundSaves
    from dlrover_hooks.checkpoint.storage.atomic_files import whole_file

    def write():
        with whole_file(sys.argv[1]) as part:
            with open(part, "w") as file:
                file.write("half")
                file.flush()
                print("half", flush=True)
                sys.stdin.readline()
                file.write("whole")
    behind = BackgroundSaves()
    behind.save(sys.argv[1], write)
    while sys.argv[2] == "wait":  # a signal that comes just before a wait does not end it
        threading.Event().wait(0.1)
"""


def started(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), how]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


@pytest.mark.parametrize("how", ["end", "wait"])
def test_what_is_begun_is_written_when_the_process_ends(tmp_path: Path, how: str) -> None:
    """A script's end, and Ctrl-C."""
    process = started(tmp_path / "file", how)
    if how == "wait":
        process.send_signal(signal.SIGINT)
    process.communicate("\n", timeout=200)
    assert (tmp_path / "file").read_text() == "halfwhole"


def test_a_killed_process_leaves_no_half_file(tmp_path: Path) -> None:
    process = started(tmp_path / "file", "wait")
    process.kill()
    process.communicate(timeout=200)
    assert not (tmp_path / "file").exists()
    with whole_file(str(tmp_path / "file")) as part:
        Path(part).write_text("again")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
