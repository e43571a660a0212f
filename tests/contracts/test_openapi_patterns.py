"""What the patterns of `/openapi.json` allow the master takes, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from dlrover_hooks.errors import BadRequest
from dlrover_hooks.master.app import KEY_HEADER, _key
from dlrover_hooks.master.openapi import _KEY, document
from dlrover_hooks.protocol import Done

PATTERN = re.compile(_KEY["schema"]["pattern"])
HEADER = st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f", exclude_categories=("Cc",))
"""What a header's value may be made of, as servers read it."""
PART = st.text(HEADER, max_size=4)
NUMBER = st.one_of(st.from_regex(r"[0-9]{1,17}", fullmatch=True), st.sampled_from(("", "-1", "+1", "1_0", "1.0", "²")))


def patterns(part: Any) -> Iterator[str]:
    """All of a JSON document."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "pattern" and isinstance(value, str):
                yield value
            yield from patterns(value)
    elif isinstance(part, list):
        for value in part:
            yield from patterns(value)


def taken(text: str) -> bool:
    """As the app reads it."""
    headers = {KEY_HEADER.lower().encode(): text.encode("latin-1")}
    try:
        key = _key(headers, Done())
    except BadRequest:
        return False
    assert key is not None
    assert (key.incarnation, key.channel) == tuple(text.split("/")[:2])
    return True


def test_the_keys_pattern_is_the_only_one() -> None:
    """Another one needs a test like those below."""
    assert set(patterns(document())) == {PATTERN.pattern}


@given(st.from_regex(PATTERN, alphabet=HEADER, fullmatch=True))
@example("a/b/999999999999999")
def test_what_is_allowed_is_taken(text: str) -> None:
    assert taken(text)


@given(st.one_of(st.text(HEADER), st.tuples(PART, PART, NUMBER).map("/".join), st.lists(PART).map("/".join)))
@example("a/b/1000000000000000")
@example("a/b/c/1")
@example("a//1")
def test_what_is_not_allowed_is_refused(text: str) -> None:
    assert taken(text) == bool(PATTERN.search(text))


@pytest.mark.parametrize("seq", [2**49, 10**15 - 1])
def test_numbers_of_the_greatest_length(seq: int) -> None:
    """They are journaled as they are."""
    assert taken(f"a/b/{seq}")
