"""A call between workers as bytes: the request, and the answer of the called worker. The same on every platform."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from dlrover_hooks.errors import CallFailed, HooksError, UsageError
from dlrover_hooks.job.call_codec import decode, encode
from dlrover_hooks.job.spec import printable

Answer = Callable[[str, list[Any], float], Any]
"""Runs a function by its name with these arguments. The last argument: how many seconds the caller still waits."""
_MOST_TEXT = 200_000


def request(function: str, arguments: list[Any]) -> bytes:
    """The bytes of a request. Raises UsageError if an argument cannot be sent."""
    return encode([function, arguments])


def answered(answer: Answer, data: bytes | bytearray, within_s: float) -> bytes:
    """Run the request `data`, and return the bytes of its answer: the result, or the text of any exception.

    The text contains the traceback, unless the exception is a `HooksError`. Raises nothing, not even what `SystemExit`
    and `KeyboardInterrupt` stand for: the caller would wait for its answer.
    """
    try:
        function, arguments = decode(data)
        value = answer(function, arguments, within_s)
        try:
            return encode([True, value])
        except UsageError as error:
            return encode([False, _sendable(f"its result: {error}")])
    except BaseException as error:
        return encode([False, _sendable(_told(error))])


def result_of(data: bytes | bytearray) -> Any:
    """The result in the bytes of an answer. Raises CallFailed: the function raised, or its result cannot be read."""
    try:
        done, value = decode(data)
    except Exception as error:
        raise CallFailed(f"its result cannot be read: {type(error).__name__}: {error}") from None
    if not done:
        raise CallFailed(value)
    return value


def _told(error: BaseException) -> str:
    """Type and text of an exception, whose `__str__` may raise."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
        if isinstance(error, HooksError):
            return text
        return f"{text}\n{''.join(traceback.format_exception(error))}"
    except BaseException as other:
        return f"{name}, whose text cannot be read: its __str__ raises {type(other).__name__}"


def _sendable(text: str) -> str:
    """`printable` text, without its middle if it is very long."""
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT // 2]}\n...\n{text[-_MOST_TEXT // 2 :]}"
    return printable(text)
