"""Flags of `dlrover-hooks run` and of the master: variables, durations, tokens and numbers of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
from click.testing import CliRunner

from dlrover_hooks.cli import main, run
from dlrover_hooks.config.duration import seconds
from dlrover_hooks.errors import UsageError
from dlrover_hooks.host import processors
from dlrover_hooks.launcher import node_supervisor
from dlrover_hooks.launcher.options import Bounds, LaunchOptions
from dlrover_hooks.master.__main__ import command
from dlrover_hooks.testing.nvml_fake import GPUFake, driver


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """Options of launchers that were to run."""
    found: list[LaunchOptions] = []

    class Launcher:
        def __init__(self, options: LaunchOptions) -> None:
            found.append(options)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(node_supervisor, "Launcher", Launcher)
    return found


def start(*words: str, **env: str) -> Any:
    return CliRunner().invoke(main.main, ["run", *words, __file__], env=env)


def test_flags_are_read_from_variables(asked: list[LaunchOptions]) -> None:
    """Ours first, then torchrun's; the command line before both."""
    env = {"DLROVER_HOOKS_RUN_NPROC_PER_NODE": "2", "PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "4"}
    env |= {"PET_RDZV_ID": "theirs", "DLROVER_HOOKS_RUN_GRACE": "1m", "PET_RDZV_BACKEND": "c10d"}
    assert start(**env).exit_code == 0
    assert start("--nproc-per-node", "5", "--job", "mine", **env).exit_code == 0
    first, second = asked
    assert (first.workers, first.max_restarts, first.job, first.grace_s) == (Bounds(2, 2), 4, "theirs", 60.0)
    assert (second.workers, second.job) == (Bounds(5, 5), "mine")


def test_only_flags_that_torchrun_has_are_read_from_its_variables(asked: list[LaunchOptions]) -> None:
    assert start(PET_JOB="no", PET_FRESH="1", PET_GRACE="1", DLROVER_HOOKS_RUN_NPROC="7").exit_code == 0
    assert (asked[0].job, asked[0].fresh, asked[0].grace_s, asked[0].workers) == ("", False, 25.0, Bounds(1, 1))


def test_each_flag_has_one_variable_of_ours() -> None:
    options = [param for param in run.run.params if param.param_type_name == "option"]
    ours = [[name for name in param.envvar or () if name.startswith("DLROVER_HOOKS_RUN_")] for param in options]
    assert [len(names) for names in ours] == [1] * len(options)
    assert len({names[0] for names in ours}) == len(options)


@pytest.mark.parametrize(
    ("text", "found"), [("25", 25.0), ("2.5", 2.5), ("90s", 90.0), ("10m", 600.0), (" 1H ", 3600.0)]
)
def test_durations(text: str, found: float) -> None:
    assert seconds(text, name="--grace") == found


@pytest.mark.parametrize("text", ["", "auto", "-1", "0s", "1.2.3", "ten", "5 minutes"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="--grace"):
        seconds(text, name="--grace")


def test_no_duration_exits_78(asked: list[LaunchOptions]) -> None:
    for flags in (["--grace", "soon"], ["--hang-timeout", "x"]):
        done = start(*flags)
        assert (done.exit_code, f"{flags[0]}: {flags[1]!r} is no duration" in done.output) == (78, True)
    for flags in (["--lease", "soon"], ["--open-lease", "0.01"], ["--forget-after", "now"]):
        assert CliRunner().invoke(command, flags).exit_code == 78
    assert asked == []


def test_a_token_in_a_file(asked: list[LaunchOptions], tmp_path: Path) -> None:
    """It counts, and never stands in the output. An empty file is refused."""
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "empty").write_text("\n")
    done = start("--token-file", str(tmp_path / "token"))
    assert (done.exit_code, asked[0].token) == (0, "s3cret")
    assert "s3cret" not in done.output
    refused = start("--token-file", str(tmp_path / "empty"))
    assert refused.exit_code == 78
    assert "is empty" in refused.output


@pytest.mark.parametrize(
    ("word", "gpus", "expected"), [("auto", 4, 4), ("gpu", 4, 4), ("cpu", 4, 3), ("auto", 0, 3), ("gpu", 0, None)]
)
def test_workers_for_each_processor(
    word: str, gpus: int, expected: int | None, asked: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "cpus", lambda: 3)
    monkeypatch.setattr(processors, "gpus", lambda _: gpus)
    done = start("--nproc-per-node", word)
    if expected is None:
        assert done.exit_code == 78
        assert "shows no GPU" in done.output
    else:
        assert asked[0].workers == Bounds(expected, expected)


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, 4), ("", 0), ("0,2", 2), ("1,9,2", 1), ("-1", 0), ("GPU-1,GPU-2", 2)],
)
def test_visible_gpus(visible: str | None, found: int) -> None:
    with driver(*(GPUFake(f"GPU-{index}") for index in range(4))):
        assert processors.gpus(visible) == found


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert processors.gpus(None) == 0
    assert processors.cpus() >= 1
