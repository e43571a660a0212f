"""Opens the database: SQLite (WAL) or PostgreSQL, at the revision that this version needs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from dlrover_hooks.errors import DatabaseFailed, MissingExtra, UsageError

CONNECTIONS = 16
"""Of one process; 16 more for a short time."""
WAIT_S = 10.0
"""A write waits so long for that of another process, and a request for a connection."""
_UPGRADE_LOCK = 0x6272_6169
"""Any number of its own: PostgreSQL's advisory lock of those that upgrade."""
_HINTS = (
    ("readonly", "make the file and its folder writable for the Brain's user, or give --database another one"),
    ("read-only", "connect to the primary server, not to a standby of it"),
    ("disk is full", "make room on the disk of the database"),
    ("No space left", "make room on the disk of the database"),
    ("no such table", "run: dlrover-hooks brain upgrade"),
    ("does not exist", "create the database, then run: dlrover-hooks brain upgrade"),
)


class Database:
    """One process's connections to the database at `url`. Threads share it; every call blocks its thread.

    Args:
        url: a file, `sqlite:///FILE`, or `postgresql://USER:PASSWORD@HOST/NAME`.
        clock: seconds since 1970, for SQLite, whose processes share a machine; PostgreSQL uses its server's clock.

    Raises `UsageError` for another kind of URL, `MissingExtra` without PostgreSQL's driver. Connects at the first use.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self.url = _parsed(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._clock, self._one_writer = clock, threading.Lock()
        self._engine = self._made()
        if self.sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._writer = self._engine.execution_options(writes=True)

    @property
    def name(self) -> str:
        """The URL without the password."""
        return self.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def now(self, connection: sa.Connection) -> float:
        """Seconds since 1970, the same for all processes on this database."""
        if self.sqlite:
            return self._clock()
        return float(connection.execute(sa.text("select extract(epoch from clock_timestamp())")).scalar_one())

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that only reads. Raises `DatabaseFailed`."""
        with self._translated(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction, committed at the end. Raises `DatabaseFailed`; then nothing was changed.

        SQLite has one writer: its threads wait here, in order, instead of in SQLite, which polls.
        """
        with self._one_writer if self.sqlite else contextlib.nullcontext(), self._translated():  # noqa: SIM117
            with self._writer.begin() as connection:
                yield connection

    # ---- revisions ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the tables of an empty database; check the revision and that it can be written.

        Raises `UsageError` for another revision, `DatabaseFailed`.
        """
        with self.reading() as connection:
            found, empty = _revision(connection), not sa.inspect(connection).get_table_names()
        if found is None and empty:
            self.upgrade()
        elif found != head():
            older = found is None or found in {one.revision for one in _scripts().walk_revisions()}
            raise UsageError(
                f"the database {self.name} has revision {found or 'none'}, this version needs {head()}",
                hint=f"run: dlrover-hooks brain upgrade --database {self.name}"
                if older
                else "it was upgraded by a newer version of dlrover-hooks: install that one here",
            )
        with self.writing() as connection:
            connection.execute(sa.text("update job set look_at = look_at where id = -1"))

    def upgrade(self) -> tuple[str | None, str]:
        """Bring the tables to the newest revision. Returns the one before and the one after. Several may call it."""
        with self.writing() as connection:
            if not self.sqlite:
                connection.execute(sa.text(f"select pg_advisory_xact_lock({_UPGRADE_LOCK})"))
            before = _revision(connection)
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return before, head()

    # ---- connections -------------------------------------------------------------------------------------------------

    def _made(self) -> sa.Engine:
        connect: dict[str, Any] = {"timeout": WAIT_S, "check_same_thread": False} if self.sqlite else {}
        if not self.sqlite:
            connect = {"connect_timeout": int(WAIT_S)}
        try:
            return sa.create_engine(
                self.url, connect_args=connect, pool_size=CONNECTIONS, max_overflow=CONNECTIONS, pool_timeout=WAIT_S,
                pool_pre_ping=not self.sqlite, poolclass=sa.QueuePool, json_serializer=_json,
                json_deserializer=msgspec.json.decode,
            )  # fmt: skip
        except ImportError as error:
            raise MissingExtra(
                "a PostgreSQL database needs psycopg", hint="pip install 'dlrover-hooks[brain-postgresql]'"
            ) from error

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            hint = next((hint for part, hint in _HINTS if part in said), "see the log of the database")
            raise DatabaseFailed(f"the database {self.name} failed: {said}", hint=hint) from error


def head() -> str:
    """The newest revision."""
    return str(_scripts().get_current_head())


def _parsed(text: str) -> URL:
    try:
        url = make_url(text if "://" in text else f"sqlite:///{text}")
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise ArgumentError("neither SQLite nor PostgreSQL")
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise UsageError(
            f"--database: it names no database ({str(error).partition(' from ')[0]})",
            hint="give a file, or postgresql://USER:PASSWORD@HOST/NAME",
        ) from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise UsageError("--database: a database in memory is lost with its process", hint="give a file")
    return url


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # sqlite3 would begin transactions by itself, and DDL outside of them
    connection.execute(f"pragma busy_timeout = {int(WAIT_S * 1000)}")
    connection.execute("pragma foreign_keys = on")
    connection.execute("pragma synchronous = normal")  # a power cut takes the last moments, never the consistency
    if connection.execute("pragma query_only").fetchone() == (0,):
        with contextlib.suppress(connection.OperationalError):  # read-only: the first write says so
            connection.execute("pragma journal_mode = wal")


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("begin immediate" if writes else "begin")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _revision(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
