"""A PostgreSQL server of its own for tests, on a socket in a folder, from Debian's package."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

USER = "postgres"


def programs() -> Path | None:
    """The folder of the server's programs, if it is installed."""
    beside = shutil.which("initdb")
    folders = [Path(beside).resolve().parent] if beside else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


MISSING = None if programs() else "no PostgreSQL here (Debian: apt-get install postgresql)"


@dataclass(slots=True)
class Server:
    """Its data and its socket are in `folder`."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._run("initdb", "-D", str(self.folder / "data"), "-A", "trust", "-U", USER,
                  "--no-sync", "-E", "UTF8", "--no-locale")

    def _as(self) -> dict[str, object]:
        """The server refuses to run as root."""
        if os.getuid():
            return {}
        who = pwd.getpwnam(USER)
        os.chown(self.folder, who.pw_uid, who.pw_gid)
        return {"user": USER, "group": who.pw_gid, "extra_groups": []}

    def _run(self, name: str, *arguments: str) -> None:
        path = programs()
        assert path is not None
        subprocess.run([path / name, *arguments], check=True, cwd=self.folder,
                       stdout=subprocess.DEVNULL, **self._as())

    def start(self) -> None:
        path = programs()
        assert path is not None
        self.process = subprocess.Popen(
            [path / "postgres", "-D", self.folder / "data", "-k", self.folder,
             "-c", "listen_addresses=", "-c", "fsync=off"],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._as())
        until = time.monotonic() + 30
        while True:
            try:
                return self._connect("postgres").close()
            except psycopg.OperationalError:
                assert time.monotonic() < until and self.process.poll() is None
                time.sleep(0.05)

    def stop(self, how: int = signal.SIGINT) -> None:
        """SIGINT ends every connection and then the server; SIGKILL is a crash."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None

    def _connect(self, name: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(host=str(self.folder), user=USER, dbname=name, autocommit=True)

    def fresh(self) -> str:
        """The URL of a database that is empty."""
        name = f"store_{time.monotonic_ns()}"
        with self._connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{USER}@/{name}?host={self.folder}"


@contextmanager
def running() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="maskproof-pg-"))
    try:
        server = Server(folder)
        server.start()
        yield server
        server.stop()
    finally:
        if "server" in locals():
            server.stop(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
