"""Sessions with real masters and keepers: what is damaged is not restored."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import NoCheckpoint
from dlrover_hooks.protocol import Source
from tests.e2e.house import House, trained


def test_a_flipped_bit_in_memory_falls_back_to_the_generation_before(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Still from memory, and the log names slot and chunk of what was given up."""
    first = trained(house.life(), 3)
    first.leave()
    shared = house.shared()
    slot = max((one for one in shared.slots() if one.generation), key=lambda one: one.generation or first.generation)
    assert slot.generation == first.generation
    shared.view(slot.index)[slot.image_bytes - 5] ^= 8
    shared.close()
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second = house.life()
    assert second.restored is not None
    assert (second.at, second.restored.source, second.data.committed) == (2, Source.MEMORY, 2)
    assert (second.w == 1.5 * 1 + 2).all()
    assert f"slot {slot.index} of seat 0, step 3" in caplog.text
    assert "chunk 0" in caplog.text
    assert "fell back" in caplog.text
    trained(second, 1)


def test_a_truncated_file_falls_back_to_the_older_durable_generation(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is gone with its keeper and the newest file is too short: storage has one more."""
    save_to = tmp_path / "ckpt"
    options: dict[str, Any] = {"save_to": str(save_to), "persist_every": 1, "keep": 3}
    first = trained(house.life(**options), 3, durable=True)
    first.leave()
    house.kill_keeper()
    (file,) = max(save_to.glob("step-*")).glob("shard-*")
    os.truncate(file, file.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second = house.life(**options)
    assert second.restored is not None
    assert (second.at, second.restored.source, second.data.committed) == (2, Source.STORAGE, 2)
    assert file.name in caplog.text
    trained(second, 1, durable=True)


def damage(save_to: Path, how: str) -> set[Path]:
    """Every durable generation becomes unreadable; their files."""
    files = set(save_to.glob("step-*/shard-*"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-5] ^= 8
        file.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    return files


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_required_but_all_checkpoints_are_damaged(house: House, tmp_path: Path, how: str, alone: bool) -> None:
    """Nothing is trained, whichever master there is, and however often it is tried again."""
    options: dict[str, Any] = {"save_to": str(tmp_path), "persist_every": 1}
    options |= {"master": None, "token": None} if alone else {}
    trained(house.life(**options), 2, durable=True).leave()
    house.kill_keeper()
    files = damage(tmp_path, how)
    assert len(files) == 2
    for _ in range(2):
        with pytest.raises(NoCheckpoint, match="none of 2 checkpoints of job") as refused:
            house.life(**options, resume="require")
        assert "ckpt verify" in refused.value.hint
    assert set(tmp_path.glob("step-*/shard-*")) == files


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_start_anew_over_damaged_checkpoints_is_loud_and_keeps_them(
    house: House, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither retention nor a folder of the same name takes what the user may still want to look at."""
    options: dict[str, Any] = {"save_to": str(tmp_path), "persist_every": 1, "master": None, "token": None}
    first = trained(house.life(**options), 2, durable=True)
    first.leave()
    house.kill_keeper()
    left = {file: file.read_bytes() for file in damage(tmp_path, how)}
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second = house.life(**options)
    assert second.restored is None
    assert caplog.text.count("starting over at step 0: none of 2 checkpoints could be loaded") == 1
    trained(second, 4, durable=True)
    assert second.session.run != first.session.run
    assert {file: file.read_bytes() for file in left} == left
    assert len(list(tmp_path.glob("step-*"))) == 2 + 2, "of its own run it keeps two"
    second.leave()
    third = house.life(**options)
    assert (third.at, third.session.run) == (4, second.session.run)
