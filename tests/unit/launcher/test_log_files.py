"""Where the output of workers goes: torchrun's syntax, and one file per stream that is copied line by line."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher.processes import log_files
from dlrover_hooks.launcher.processes.log_files import Logs, Streams, streams
from tests.waiting import until


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", Streams()), ("3", Streams(3)), ("0:1,1:3", Streams(0, {0: 1, 1: 3})), ("12:2", Streams(0, {12: 2}))],
)
def test_torchruns_syntax(text: str, found: Streams) -> None:
    assert streams(text, "--tee") == found


@pytest.mark.parametrize("text", ["4", "", "0:1,", "0:4", "stdout", "1,2"])
def test_what_is_not_torchruns_syntax(text: str) -> None:
    with pytest.raises(UsageError, match="--tee") as refused:
        streams(text, "--tee")
    assert "--tee 0:1,1:3" in refused.value.hint


def test_each_stream_goes_where_it_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0: stdout into a file and on the screen, stderr into a file. Rank 1: stdout as ever, stderr into a file."""
    made = Logs(str(tmp_path), redirects=streams("0:2,1:2", "-r"), tee=streams("0:1", "-t"))
    for local_rank, plain in ((0, False), (1, True)):
        with made.files(f"w{local_rank}", local_rank, 4 + local_rank, 7) as (out, err):
            assert (out == 1, err == 2) == (plain, False)
            os.write(out, b"said\nhalf a line")
            os.write(err, b"wrong\n")
        made.ended(f"w{local_rank}")
    made.close()
    shown, errors = capfd.readouterr()
    assert "[default0]:said\n[default0]:half a line\n" in shown
    assert "said\nhalf a line" in shown.replace("[default0]:said\n[default0]:half a line\n", "")
    assert errors == ""
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "7/4/stdout.log": "said\nhalf a line", "7/4/stderr.log": "wrong\n", "7/5/stderr.log": "wrong\n"
    }  # fmt: skip


def test_a_later_worker_is_shown_from_its_own_first_line_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Started again in a round of the same number the file grows; a line that never ends is shown when it is long."""
    made = Logs(str(tmp_path), Streams(), Streams(3))
    for word in ("first", "later"):
        with made.files(word, 0, 0, 1) as (out, _):
            os.write(out, word.encode() + b"\n" + b"." * (log_files._LONG + 1))
        made.ended(word)
    made.close()
    long = f"[default0]:{'.' * (log_files._LONG + 1)}\n"
    assert capfd.readouterr().out == f"[default0]:first\n{long}[default0]:later\n{long}"
    assert (tmp_path / "1/0/stdout.log").read_text().count("\n") == 2


def test_a_screen_that_nobody_reads_stops_the_thread_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher that waited for it would replace no dead worker and obey no Ctrl-C."""
    read, write = os.pipe()
    monkeypatch.setattr(log_files, "_END_S", 0.1)
    made = Logs(str(tmp_path), Streams(), Streams())
    path = tmp_path / "out"
    path.write_bytes(b"x\n" * (1 << 20))
    made._copy("w0", log_files.Copy(str(path), 0, "[default0]:", write))
    select.select([read], [], [])
    for _ in range(2):
        made.ended("w0")
    made.close()
    assert f"what was not shown is in {tmp_path}" in caplog.text
    os.close(read)
    made._thread.join(60.0)
    os.close(write)


def test_the_screen_gets_the_bytes_that_the_worker_wrote(tmp_path: Path, capfdbinary: Any) -> None:
    """A terminal that knows ASCII alone ended the thread, or a run that had done its work."""
    made = Logs(str(tmp_path), Streams(), Streams(1))
    with made.files("w0", 0, 0, 1) as (out, _):
        os.write(out, "Größe \U0001f3d6\n".encode())
    made.close()
    assert capfdbinary.readouterr().out == "[default0]:Größe \U0001f3d6\n".encode()


def test_an_error_of_one_file_does_not_end_the_thread(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = Logs(str(tmp_path), Streams(), Streams(1))
    broken = tmp_path / "broken"
    broken.touch()
    copy = log_files.Copy(str(broken), 0, "[default1]:", 1)
    copy._file.close()
    made._copy("w1", copy)
    until(lambda: "showing the output" in caplog.text, "the error is logged")
    made._copies.clear()
    with made.files("w0", 0, 0, 1) as (out, _):
        os.write(out, b"still shown\n")
    made.close()
    assert "[default0]:still shown" in capfd.readouterr().out
