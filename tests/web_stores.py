"""A dashboard that is served from this process, and what to fill its store with."""

from __future__ import annotations

import hashlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from sqlalchemy import insert

from fuzz import serve
from fuzz.service.records import record_finding
from fuzz.service.schema import documents, findings
from fuzz.service.store import Store
from fuzz.service.web.access import Access
from fuzz.service.web.app import application
from tests.service_stores import finding

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "token-of-a-test-0123"
BAD = "known-bad/chunk-local-q"
CAMPAIGN = f"""
[campaign]
name = "real"
backend = "cpu"
seed = 5
launches = 6
findings = "real"
tracked = ["0.33.0"]

[[target]]
names = ["{BAD}"]
max_keys = 32

[[target]]
names = ["mm_prefix[window]", "rswa"]
max_keys = 64
"""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Served:
    """A dashboard at a port of this machine."""

    store: Store
    port: int

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", body: str | bytes | None = None,
            **headers: str) -> Answer:
        """Sends the path as it is, with nothing put right."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            link.putrequest(method, path, skip_host="host" in headers)
            data = body.encode() if isinstance(body, str) else body
            if data is not None and "content_length" not in headers:
                link.putheader("Content-Length", str(len(data)))
            for name, value in headers.items():
                link.putheader(name.replace("_", "-"), value)
            link.endheaders(data)
            found = link.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()},
                          found.read().decode())
        finally:
            link.close()

    def form(self, path: str, cookie: str = "", **fields: str) -> Answer:
        return self.ask(path, "POST", urlencode(fields), cookie=cookie,
                        content_type="application/x-www-form-urlencoded")

    def sign_in(self, token: str = TOKEN) -> str:
        """The cookie of a browser that has signed in."""
        return self.form("/sign-in", token=token, then="/").headers["set-cookie"].split(";")[0]


Serve = Callable[..., Served]


@contextmanager
def serving(store: Store, access: Access) -> Iterator[Served]:
    listening = serve.listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(application(store, access), log_level="warning",
                                           access_log=False, ws="none",
                                           server_header=False))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield Served(store, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)


def stored(store: Store, at: int = 1000, **more: Any) -> str:
    """A finding in a store; its fingerprint."""
    given = finding(**more)
    with store.writing() as connection:
        record_finding(connection, given, at)
    return given["fingerprint"]


def many(store: Store, count: int) -> None:
    """Findings of many kinds in a store, the last 1000 with documents."""
    kinds, states = ("leak", "loss", "double", "hang"), ("new", "open", "fixed", "wontfix")
    document = finding()

    def name(i: int) -> str:
        return hashlib.sha256(str(i).encode()).hexdigest()[:12]

    rows = [{
        "fingerprint": name(i), "family": name(i // 3), "kind": kinds[i % 4],
        "region": f"region {i % 97}", "release": f"vllm-0.{20 + i % 14}.0",
        "target": f"vllm-0.{20 + i % 14}.0/rswa", "spec": ("rswa", "mm_prefix")[i % 2],
        "path": f"cpu target {i % 311} for rswa", "diagnosis": "equals it without a term" * (i % 5),
        "state": states[i % 4], "reason": "", "fixed_in": "", "results": {}, "count": i % 1009,
        "first_seen": 1000 + i // 2, "last_seen": 5000 + i // 3,
    } for i in range(count)]
    with store.writing() as connection:
        connection.execute(insert(findings), rows)
        connection.execute(insert(documents), [
            {"fingerprint": row["fingerprint"], "digest": "", "document": document}
            for row in rows[-1000:]])
