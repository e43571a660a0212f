"""A killed and resumed Lightning run leaves the files of an unbroken one: no `-v1`, one `version_N`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from dlrover_hooks.integrations.lightning.output_names import _go_on, written_by
from tests.e2e.launched import REPOSITORY, Launched
from tests.integrations.names_trial import fit

SCRIPT = (REPOSITORY / "tests" / "integrations" / "names_trial.py").read_text()


def left(folder: Path) -> tuple[list[str], list[str]]:
    """The files of a run, and the steps of its log."""
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with open(folder / "logs/lightning_logs/version_0/metrics.csv", newline="") as file:
        return found, [row["step"] for row in csv.DictReader(file)]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_a_killed_run_leaves_the_files_of_an_unbroken_one(tmp_path: Path) -> None:
    """Killed at step 12, resumed at 7: the files of steps 8, 10 and 12 and of the epoch's end are written again. A
    file of somebody else that lies in the way keeps its name.
    """
    fit(tmp_path / "calm")
    foreign = tmp_path / "out" / "steps" / "epoch=1-step=8.ckpt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("of somebody else")
    launched = Launched(tmp_path, SCRIPT, FOLDER=str(tmp_path / "out"))
    code, errors = launched.end(timeout_s=200)
    assert code == 0, errors
    assert launched.read() == [{"restored": 7}]
    assert foreign.read_text() == "of somebody else"
    (files, rows), (calm, calm_rows) = left(tmp_path / "out"), left(tmp_path / "calm")
    assert sorted({*files} - {"steps/epoch=1-step=8-v1.ckpt"}) == calm
    assert rows == calm_rows


def test_a_run_is_known_by_its_mark_alone(tmp_path: Path) -> None:
    torch.save({"dlrover_hooks_run": "1f" * 16, "weights": torch.ones(9)}, tmp_path / "a.ckpt")
    (tmp_path / "text").write_text("1f" * 16)
    assert written_by(str(tmp_path / "a.ckpt"), "1f" * 16)
    assert not written_by(str(tmp_path / "a.ckpt"), "2f" * 16)
    assert not written_by(str(tmp_path / "text"), "1f" * 16)
    assert not written_by(str(tmp_path / "none"), "1f" * 16)


@pytest.mark.parametrize(
    ("torn", "left"),
    [
        ("epoch,loss,step\r\n0,0.5,1\r\n0,0.4,2\r\n0,0.25,1", "epoch,loss,step\n0,0.5,1\n0,0.4,2\n"),  # 1 of 17
        ("epoch,loss,step\r\n0,0.5,1\r\n0,0", "epoch,loss,step\n0,0.5,1\n"),
        ("epoch,lo", None),
    ],
)
def test_a_row_that_was_cut_short_does_not_stay(tmp_path: Path, torn: str, left: str | None) -> None:
    """A process was killed as it wrote its log: its last row would be one of another step."""
    logger = CSVLogger(tmp_path, version=1)
    assert logger.experiment.log_dir.endswith("version_1")
    logger._version = 0  # as `keep_versions` does
    path = Path(logger.log_dir) / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(torn, newline="")
    _go_on(logger, 10)
    assert (path.read_text() if path.exists() else None) == left
    logger.log_metrics({"epoch": 0, "loss": 0.125}, step=3)
    logger.save()
    with path.open(newline="") as file:
        assert list(csv.DictReader(file))[-1] == {"epoch": "0", "loss": "0.125", "step": "3"}
