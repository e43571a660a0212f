"""Times as objects of the API have them: RFC 3339, in UTC, to the second."""

from __future__ import annotations

import calendar
import time

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def utc_now() -> str:
    """Now."""
    return time.strftime(_FORM, time.gmtime())


def seconds_of(text: str) -> float:
    """Seconds since the epoch. Raises ValueError if `text` is no such time."""
    return float(calendar.timegm(time.strptime(text, _FORM)))
