"""A real PostgreSQL for tests: Debian's package `postgresql`, in a folder of its own, by a user that is not root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg

from dlrover_hooks.host.ports import free_port
from tests.waiting import WAIT_S, until


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    return found[-1]


def _other_user() -> dict[str, object]:
    """Arguments for `subprocess`: the server refuses to run as root."""
    if os.getuid():
        return {}
    user = next(one for one in pwd.getpwall() if one.pw_name in ("postgres", "nobody"))
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class PostgresqlProcess:
    """One server on loopback. `database()` makes an empty database and returns its URL."""

    def __init__(self) -> None:
        self._folder, self._port, self._made = Path(tempfile.mkdtemp(prefix="pg")), free_port(), 0
        user, data, programs = _other_user(), self._folder / "data", _programs()
        if user:
            os.chown(self._folder, int(str(user["user"])), int(str(user["group"])))
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"],
            check=True, capture_output=True, timeout=WAIT_S, cwd=self._folder, **user,  # type: ignore[call-overload]
        )  # fmt: skip
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(self._port), "-k", self._folder, "-F"],
                stdout=log, stderr=log, cwd=self._folder, start_new_session=True, **user,  # type: ignore[call-overload]
            )  # fmt: skip
        until(self._answers, "PostgreSQL", diagnostic=(self._folder / "log").read_text)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _url(self, name: str) -> str:
        return f"postgresql://tester@127.0.0.1:{self._port}/{name}"

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._made += 1
        name = f"test{self._made}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"create database {name}")  # type: ignore[arg-type]
        return self._url(name)

    def close(self) -> None:
        """End the server, and its clients' connections with it."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(WAIT_S)
        shutil.rmtree(self._folder)
