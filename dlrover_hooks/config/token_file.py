"""A token or a password in a file, which `ps` and the environment of other processes do not show."""

from __future__ import annotations

from dlrover_hooks.errors import UsageError


def read_token(path: str, what: str = "token") -> str:
    """The token in the file `path`, without spaces around it. `what`: the word for it in the error.

    Raises:
        UsageError: the file is empty, or holds other than printable ASCII, which no HTTP header can carry.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        token = file.read().strip()
    if not token or not token.isascii() or not token.decode().isprintable():
        raise UsageError(
            f"the {what} file {path} {'holds other than printable ASCII' if token else 'is empty'}",
            hint="write one line of letters and digits into it, such as that of: openssl rand -hex 16",
        )
    return token.decode()
