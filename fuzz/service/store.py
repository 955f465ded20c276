"""The store of the service, in SQLite or PostgreSQL: how it is opened, read and written.

`fuzz.service.reads` has what is asked of it. Whoever writes does so inside `Store.writing`, one
transaction, which is in the store as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Table,
    case,
    create_engine,
    event,
    func,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
)

INSERTS = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
# Seconds that one waits for another who writes, and for a server to answer.
PATIENCE = 5
# The number under which one at a time may change the tables of a PostgreSQL store.
MIGRATING = 7_236_481
FILE = "store.sqlite"


class StoreError(Exception):
    """A store that cannot be used; the message is one line."""


class Away(StoreError):
    """A store that cannot be used now, and may be later; the message is one line."""


def url_of(given: str | None, folder: Path) -> URL:
    """The store that a person names, or the one in `folder`. Raises StoreError."""
    if not given:
        return URL.create("sqlite", database=str((folder / FILE).absolute()))
    if "://" not in given:
        return URL.create("sqlite", database=str(Path(given).absolute()))
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise StoreError(f"store {given!r} is no URL") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StoreError(f"store {shown(url)}: it is a path, sqlite:///PATH or postgresql://...")
    if url.drivername == "sqlite" and not url.database:
        raise StoreError("store sqlite: a path is missing, as in sqlite:///store.sqlite")
    return url


def shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


@dataclass(slots=True)
class Store:
    """A store whose tables are there. Make one with `opened`."""

    url: URL
    engine: Engine

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """What is read inside is of one moment. Raises Away."""
        with told(self.url), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, alone with a SQLite file. Raises Away; then nothing was written."""
        with told(self.url), self.engine.connect().execution_options(writing=True) as connection, \
                connection.begin():
            yield connection

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def told(url: URL) -> Iterator[None]:
    """Database errors that come from outside as Away or StoreError."""
    try:
        yield
    except (OperationalError, InterfaceError, InternalError) as error:
        raise Away(f"{shown(url)}: {_line(error)}") from None
    except DBAPIError as error:
        if error.connection_invalidated:
            raise Away(f"{shown(url)}: {_line(error)}") from None
        if type(error) is DatabaseError:
            raise StoreError(f"{shown(url)}: {_line(error)}") from None
        raise


def _line(error: DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__


def opened(url: URL) -> Store:
    """The store, its tables made or brought up to date. Raises Away or StoreError."""
    store = Store(url, engine_of(url))
    try:
        with store.writing() as connection:
            _migrate(connection)
    except BaseException:
        store.close()
        raise
    return store


def engine_of(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return create_engine(url, pool_pre_ping=True, connect_args={
            "connect_timeout": PATIENCE, "application_name": "maskproof"})
    with suppress(OSError):  # what cannot be made is said when the file is opened
        Path(url.database or "").parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": PATIENCE})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _: Any) -> None:
    """Commits are on disk when they return: what the journal need not keep is gone from it."""
    connection.isolation_level = None  # `_begin` says when a transaction begins
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    writing = connection.get_execution_options().get("writing")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATING})
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"the store was made by a later version ({error})") from None


def upsert(
    connection: Connection, table: Table, rows: Sequence[dict[str, Any]], *,
    add: Sequence[str] = (), put: Sequence[str] = (), least: Sequence[str] = (),
    most: Sequence[str] = (),
) -> None:
    """Inserts rows of different keys; of a row that is there adds up, puts anew, and takes the
    least or the most of columns."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key]
    statement = INSERTS[connection.dialect.name](table)
    new, old = statement.excluded, table.c
    said = {
        **{name: old[name] + new[name] for name in add},
        **{name: new[name] for name in put},
        **{name: _chosen(old[name], new[name], first=True) for name in least},
        **{name: _chosen(old[name], new[name], first=False) for name in most},
    }
    if said:
        statement = statement.on_conflict_do_update(index_elements=keys, set_=said)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    # Always in one order, so that of two who write neither waits for the other.
    connection.execute(statement, sorted(rows, key=lambda row: [str(row[key]) for key in keys]))


def _chosen(old: Any, new: Any, *, first: bool) -> Any:
    a, b = func.coalesce(old, new), func.coalesce(new, old)
    return case((a <= b if first else a >= b, a), else_=b)
