"""The parts of the deep tests, of which CI runs one."""

from __future__ import annotations

import argparse

import pytest

from tests.deep import part


@pytest.mark.parametrize("parts", [["1/1"], ["1/2", "2/2"], ["1/3", "2/3", "3/3"]])
def test_each_file_is_in_one_part_and_the_parts_are_about_equal(parts: list[str]) -> None:
    files = [f"tests/test_{number}.py" for number in range(300)]
    found = [[one for one in files if part(text).has(one)] for text in parts]
    assert sorted(one for files_of_part in found for one in files_of_part) == sorted(files)
    assert min(map(len, found)) > 300 / len(parts) / 2


@pytest.mark.parametrize("text", ["", "1", "half", "0/2", "3/2", "1/0", "-1/2", "1/2/3"])
def test_what_is_not_a_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give one such as 1/2 or 2/2"):
        part(text)
