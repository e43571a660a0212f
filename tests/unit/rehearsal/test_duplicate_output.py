"""Lines that a run added to files (rehearsal)."""

from __future__ import annotations

from pathlib import Path

from dlrover_hooks.rehearsal import duplicate_output


def test_lines_added_and_files_written_anew(tmp_path: Path) -> None:
    for name, text in {"grown": "a\nb\n", "anew": "a\nb\nc\n", "same": "x\n", ".hidden": "x\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\0\n\n")
    before = duplicate_output.look(str(tmp_path))
    assert set(before) == {"grown", "anew", "same", "binary"}
    with (tmp_path / "grown").open("a") as file:
        file.write("c\n")
    (tmp_path / "anew").write_text("other\n")
    (tmp_path / "binary").write_bytes(b"\0\n\n\n\n")  # a checkpoint of the script's own has no lines
    (tmp_path / "new").write_text("1\n2\n")
    (tmp_path / ".hidden").write_text("y\n")
    assert duplicate_output.added(str(tmp_path), before) == {"grown": 1, "anew": 1, "new": 2}
