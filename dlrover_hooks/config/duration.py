"""Intervals and retention rules: parsed from the forms that users write into canonical form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Retention

Duration = timedelta | str | int
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def interval(value: Duration, *, name: str) -> int | str:
    """`value` as optimizer steps (int), `"auto"`, or canonical seconds (`"90s"`). Raises `UsageError` with examples."""
    if isinstance(value, bool):
        raise _bad_interval(name, value)
    if isinstance(value, timedelta):
        return _seconds(value.total_seconds(), name, value)
    if isinstance(value, int) or str(value).strip().isdigit():
        if int(value) < 1:
            raise _bad_interval(name, value)
        return int(value)
    text = str(value).strip().lower()
    if text == "auto":
        return text
    match = re.fullmatch(r"([0-9.]+)\s*(ms|s|m|h|d)", text)
    if match is None:
        raise _bad_interval(name, value)
    return _seconds(float(match[1]) * _UNITS[match[2]], name, value)


def seconds(value: timedelta | str | float, *, name: str) -> float:
    """A time: plain seconds (`25`, `"2.5"`) or a duration (`"90s"`, `"10m"`, a timedelta). Raises UsageError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    text = str(value).strip().lower()
    plain = re.fullmatch(r"\d+(\.\d*)?|\.\d+", text)
    try:
        return float(text) if plain else float(str(interval(text, name=name)).removesuffix("s"))
    except (UsageError, ValueError):
        raise UsageError(f"{name}: {value!r} is no duration", hint="give seconds, or such as 90s, 10m, 12h") from None


def _seconds(seconds: float, name: str, value: object) -> str:
    if seconds <= 0:
        raise _bad_interval(name, value)
    return f"{seconds:g}s"


def _bad_interval(name: str, value: object) -> UsageError:
    return UsageError(
        f"{name}={value!r} is neither a number of optimizer steps nor a duration",
        hint=f'use an int >= 1 for steps ({name}=50), "auto", or a duration such as "90s", "10m" or '
        "timedelta(minutes=10)",
    )


def retention(value: Any, *, name: str = "keep") -> int | Retention:
    """`value` (`2`, `"last=2,every_steps=1000,every=1h"`, the same as a dict, a `Retention`) in canonical form.

    A plain int if only `last` is given. Raises `UsageError` with examples.
    """
    try:
        rules = msgspec.convert(_rules(value), Retention, strict=False)
        every = interval(rules.every, name="every") if rules.every is not None else None
    except (msgspec.ValidationError, ValueError, UsageError):
        raise _bad_retention(name, value) from None
    if rules.last < 1:
        raise _bad_retention(name, value)
    if rules.every_steps is None and every is None:
        return rules.last
    if isinstance(every, int) or every == "auto" or (rules.every_steps is not None and rules.every_steps < 1):
        raise _bad_retention(name, value)
    return Retention(rules.last, rules.every_steps, every)


def _rules(value: Any) -> dict[str, Any]:
    """`value` as a dict of rules. Raises ValueError."""
    rules: dict[str, Any] = {"last": value}
    if isinstance(value, str) and "=" in value:
        pairs = [part.split("=", 1) for part in value.split(",")]
        rules = {name.strip(): text.strip() for name, text in pairs}
        if len(rules) < len(pairs):
            raise ValueError
    elif isinstance(value, Retention):
        rules = {"last": value.last, "every_steps": value.every_steps, "every": value.every}
    elif isinstance(value, Mapping):
        rules = dict(cast(Mapping[str, Any], value))
    if not set(rules) <= {"last", "every_steps", "every"} or any(isinstance(one, bool) for one in rules.values()):
        raise ValueError
    every = rules.get("every")
    return rules | ({"every": f"{every.total_seconds()}s"} if isinstance(every, timedelta) else {})


def _bad_retention(name: str, value: object) -> UsageError:
    return UsageError(
        f"{name}={value!r} does not say what to keep",
        hint="use a whole number from 1 for the newest so many (keep=2), or rules, each once, of which any may keep a "
        'checkpoint: keep="last=2,every_steps=1000,every=1h", or Retention(last=2, every_steps=1000, every="1h")',
    )
