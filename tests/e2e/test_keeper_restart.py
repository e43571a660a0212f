"""A launched job whose keeper, then whose worker is killed: both come back by themselves."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.storage import generations
from tests.e2e.launched import ALIVE, Launched

SCRIPT = """
    import numpy as np
    from dlrover_hooks import config, protocol as p
    from dlrover_hooks.session import Session
    session = Session(config.load(save_every=1), config.place())
    session.join()
    restored = session.restore_plan()
    at = restored.state["step"] if restored else 0
    right = restored is None or bool((restored.state["w"] == at).all())
    note(at=at, source=restored and restored.source.value, right=right)
    session.before_fetch(at)
    session.batch_requested(at)
    while True:
        at += 1
        session.stepped()
        session.before_fetch(at)
        if session.batch_requested(at):
            session.cut(at, {"step": at, "w": np.full(1000, at)})
        threading.Event().wait(0.02)
        complete = session._caller.call(p.ShowJob(session.config.job)).newest_complete
        if complete == p.Generation(session.attempt, at, session.run):
            note(complete=at)
"""


def completed(lives: list[dict], pid: int) -> list[int]:
    return [life["complete"] for life in lives if "complete" in life and life["pid"] == pid]


@pytest.mark.deep
def test_keeper_then_worker_killed(tmp_path: Path) -> None:
    """What is in the second keeper restores the second life; the breakpoint save makes it durable meanwhile."""
    url = tmp_path / "ck"
    run = Launched(tmp_path, ALIVE + SCRIPT, DLROVER_HOOKS_SAVE_TO=str(url), DLROVER_HOOKS_PERSIST_EVERY="1h")
    try:
        first = run.wait_for(lambda lives: len(lives) > 1)[0]
        assert first["at"] == 0
        keeper = run.child("checkpoint.keeper")
        keeper.kill()
        run.child("checkpoint.keeper", other_than=keeper.pid)
        before = len(run.read())
        run.wait_for(lambda lives: len(completed(lives[before:], first["pid"])) > 2)
        assert not list(url.glob("step-*/MANIFEST.json"))
        run.child("script.py").send_signal(signal.SIGKILL)
        second = run.wait_for(lambda lives: any(life["pid"] != first["pid"] for life in lives))
        life = next(life for life in second if life["pid"] != first["pid"])
        newest = max(completed(second, first["pid"]))
        assert (life["source"], life["right"]) == ("memory", True)
        assert life["at"] >= newest
        run.wait_for(lambda _: bool(list(url.glob("step-*/MANIFEST.json"))))
        assert life["at"] in {one.generation.step for one in generations.scan(str(url), None, run.job).manifests}
    finally:
        run.process.send_signal(signal.SIGINT)
        run.end()
    assert run.leftovers() == []


@pytest.mark.deep
def test_the_runtime_folder_goes_and_the_worker_dies(tmp_path: Path) -> None:
    """A logout removes XDG_RUNTIME_DIR under a run. The next life looks where the launcher did, and finds it all."""
    session = tmp_path / "xdg"
    session.mkdir(0o700)
    run = Launched(tmp_path, ALIVE + SCRIPT, XDG_RUNTIME_DIR=str(session))
    try:
        first = run.wait_for(lambda lives: len(completed(lives, lives[0]["pid"] if lives else 0)) > 2)[0]
        shutil.rmtree(session)
        run.child("script.py").send_signal(signal.SIGKILL)
        lives = run.wait_for(lambda lives: any(life["pid"] != first["pid"] for life in lives))
        second = next(life for life in lives if life["pid"] != first["pid"])
        assert (second["source"], second["right"]) == ("memory", True)
    finally:
        run.process.send_signal(signal.SIGINT)
        run.end()
    assert run.leftovers() == []
