"""The parts of the deep tests, of which CI runs one."""

from __future__ import annotations

import pytest

from tests.deep import in_part


@pytest.mark.parametrize("parts", [["1/1"], ["1/2", "2/2"], ["1/3", "2/3", "3/3"]])
def test_each_test_is_in_one_part_and_the_parts_are_about_equal(parts: list[str]) -> None:
    tests = [f"tests/test_a.py::test_it[{number}]" for number in range(300)]
    found = [[one for one in tests if in_part(one, part)] for part in parts]
    assert sorted(one for part in found for one in part) == sorted(tests)
    assert min(map(len, found)) > 300 / len(parts) / 2
