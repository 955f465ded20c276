"""Tells an address of findings that became new or regressed, as JSON, in order, at least once.

What was delivered is kept in a small file; a receiver tells a second delivery by its `id`. Whatever
the address does, nothing waits for it: it is tried again after a growing time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from fuzz.case import digest
from fuzz.service.store import Store, StoreError, shown
from fuzz.service.web.queries import last_change, news
from fuzz.state import write

# Seconds between two looks, for an answer, and between two tries: the first, the longest.
LOOK, PATIENCE, FIRST, LONGEST = 3.0, 10.0, 2.0, 300.0
# Two who write at once may store their changes out of order: so many before the last are looked at.
BACK = 500
SIGNATURE = "X-Maskproof-Signature"


def is_address(text: str) -> bool:
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def kept_at(store: Store, address: str) -> Path:
    """The file that says what of a store was delivered to an address."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "maskproof" / "webhooks" / f"{digest(shown(store.url) + address)}.json"


def message(row: Mapping[str, Any], base: str) -> dict[str, Any]:
    """What is sent of a change. `base` is the dashboard's own address."""
    document = row["document"] or {}
    name = row["fingerprint"]
    return {
        "schema": 1, "id": row["id"], "at": row["at"], "event": row["after"],
        "reason": row["reason"], "url": f"{base}/findings/{name}",
        "replay": document.get("replay") or f"python -m fuzz.replay finding-{name}.json",
        "picture": document.get("picture") or [],
        "finding": {key: row[key] for key in (
            "fingerprint", "family", "kind", "region", "release", "target", "spec", "path",
            "diagnosis", "count", "first_seen", "last_seen")},
    }


@dataclass(slots=True)
class Webhook:
    """Delivers in a thread of its own from `start` on; the first time, what changes from then on.
    Changes up to number `above` are done, of the later ones those that were `sent`."""

    store: Store
    address: str
    base: str
    kept: Path
    key: str | None = None
    says: Callable[[str], None] = lambda text: None
    above: int = 0
    sent: set[int] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)
    tries: int = 0
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises Away or StoreError."""
        try:
            given = json.loads(self.kept.read_text())
            self.above, self.sent = int(given["above"]), set(map(int, given["sent"]))
        except (OSError, ValueError, KeyError, TypeError):
            with self.store.reading() as connection:
                self.above = last_change(connection)
        self._keep()
        self.thread = threading.Thread(target=self._run, daemon=True, name="webhook")
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join(PATIENCE + 1)

    def _run(self) -> None:
        wait = 0.0
        while not self.ended.wait(wait):
            try:
                self.deliver()
                if self.tries:
                    self.says("the webhook answers again")
                self.tries, wait = 0, LOOK
            except (requests.RequestException, StoreError, OSError) as error:
                if not self.tries:
                    self.says(f"the webhook is tried again later ({self._why(error)})")
                wait = min(FIRST * 2**min(self.tries, 20), LONGEST)
                self.tries += 1

    def _why(self, error: Exception) -> str:
        """Without the address, in which there may be a secret."""
        if isinstance(error, requests.HTTPError) and error.response is not None:
            return f"status {error.response.status_code}"
        return str(error) if isinstance(error, StoreError) else type(error).__name__

    def deliver(self) -> int:
        """Sends what was not sent; returns how much. Raises on the first that is not taken."""
        with self.store.reading() as connection:
            rows = [row for row in news(connection, self.above, 2 * BACK)
                    if row["id"] not in self.sent]
        for row in rows:
            self._send(message(row, self.base))
            self.sent.add(row["id"])
            self._keep()
        return len(rows)

    def _send(self, given: Mapping[str, Any]) -> None:
        body = json.dumps(given).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "maskproof"}
        if self.key is not None:
            seal = hmac.new(self.key.encode(), body, hashlib.sha256).hexdigest()
            headers[SIGNATURE] = f"sha256={seal}"
        answer = requests.post(self.address, data=body, headers=headers, timeout=PATIENCE,
                               allow_redirects=False)
        if answer.status_code >= 300:
            raise requests.HTTPError(f"status {answer.status_code}", response=answer)

    def _keep(self) -> None:
        """What was sent long before the last is not looked at again."""
        self.above = max(self.above, max(self.sent, default=0) - BACK)
        self.sent = {number for number in self.sent if number > self.above}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        write(self.kept, json.dumps({"above": self.above, "sent": sorted(self.sent)}))
