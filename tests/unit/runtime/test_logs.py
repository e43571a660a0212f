"""Where the output of workers goes: torchrun's syntax, and one file per stream that is copied line by line (DL-77)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.runtime import logs
from dlrover_hooks.runtime.logs import Logs, Streams, streams


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
    assert (shown, errors) == ("[default0]:said\n[default0]:half a line\nsaid\nhalf a line", "")
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "7/4/stdout.log": "said\nhalf a line", "7/4/stderr.log": "wrong\n", "7/5/stderr.log": "wrong\n"
    }  # fmt: skip


def test_a_later_worker_is_shown_from_its_own_first_line_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Started again in a round of the same number the file grows; a line that never ends is shown when it is long."""
    made = Logs(str(tmp_path), Streams(), Streams(3))
    for word in ("first", "later"):
        with made.files(word, 0, 0, 1) as (out, _):
            os.write(out, word.encode() + b"\n" + b"." * (logs._LONG + 1))
        made.ended(word)
        shown = capfd.readouterr().out
        assert shown == f"[default0]:{word}\n[default0]:{'.' * (logs._LONG + 1)}\n"
    made.close()
    assert (tmp_path / "1/0/stdout.log").read_text().count("\n") == 2
