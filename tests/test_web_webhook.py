"""The webhook: what it sends, that it sends it at least once, and that nothing waits for it."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fuzz.service.records import AGAIN, GONE, happened, record_replay
from fuzz.service.store import Store
from fuzz.service.taking import Seen
from fuzz.service.web import webhook
from fuzz.service.web.webhook import Webhook, is_address, kept_at
from tests.service_stores import a_state, a_taker, finding, saved
from tests.web_stores import TOKEN, stored

pytest_plugins = ["tests.service_fixtures", "tests.web_fixtures"]


class Receiver:
    """Keeps what it is sent, and answers with the statuses that it is given, then with 200."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.seals: list[str] = []
        self.statuses: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.statuses.pop(0) if outer.statuses else 200
                if status == 200:
                    outer.got.append(json.loads(body))
                    seal = hmac.new(TOKEN.encode(), body, hashlib.sha256).hexdigest()
                    outer.seals.append(self.headers.get(webhook.SIGNATURE, ""))
                    assert outer.seals[-1] in ("", f"sha256={seal}")
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/secret-path"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture
def hook(store: Store, receiver: Receiver, tmp_path: Path,
         monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    for name, seconds in (("LOOK", 0.05), ("FIRST", 0.05), ("PATIENCE", 2.0)):
        monkeypatch.setattr(webhook, name, seconds)
    found = Webhook(store, receiver.address, "http://here", tmp_path / "hooks" / "kept.json",
                    TOKEN)
    yield found
    found.stop()


def until(condition: Any, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_new_and_regressed_findings_are_sent(
    store: Store, hook: Webhook, receiver: Receiver, tmp_path: Path
) -> None:
    stored(store, region="before it began")
    hook.start()
    one = finding(region="<b>")
    saved(tmp_path / "a", one)
    state = a_state(tmp_path / "a")
    a_taker(tmp_path / "a", state, store)
    state.close()
    name = one["fingerprint"]
    for result in (GONE, AGAIN):
        with store.writing() as connection:
            record_replay(connection, name, "vllm-0.33.0", result, "", 2000)
    assert until(lambda: len(receiver.got) == 2)
    first, second = receiver.got
    assert (first["event"], second["event"]) == ("new", "regressed")
    assert first["finding"]["fingerprint"] == name and first["finding"]["region"] == "<b>"
    assert first["url"] == f"http://here/findings/{name}"
    assert first["id"] < second["id"] and first["replay"].startswith("python -m fuzz.replay ")
    assert all(receiver.seals)


def test_what_is_not_taken_is_sent_again_and_in_order(
    store: Store, hook: Webhook, receiver: Receiver
) -> None:
    said: list[str] = []
    hook.says = said.append
    receiver.statuses = [500, 302, 404]
    hook.start()
    names = [stored(store, region=f"region {i}") for i in range(4)]
    assert until(lambda: len(receiver.got) == 4)
    assert [one["finding"]["fingerprint"] for one in receiver.got] == names
    assert until(lambda: len(said) >= 2) and "answers again" in said[1]
    assert "status 500" in said[0] and "secret-path" not in "".join(said)


def test_it_goes_on_where_it_was(
    store: Store, hook: Webhook, receiver: Receiver
) -> None:
    hook.start()
    stored(store, region="first")
    assert until(lambda: len(receiver.got) == 1)
    hook.stop()
    stored(store, region="while it was away")
    again = Webhook(store, receiver.address, "http://here", hook.kept, None)
    again.start()
    assert until(lambda: len(receiver.got) == 2)
    again.stop()
    assert [one["finding"]["region"] for one in receiver.got] == ["first", "while it was away"]
    assert receiver.seals[1] == ""


def test_a_change_that_comes_late_is_sent(store: Store, hook: Webhook, receiver: Receiver) -> None:
    """Of two who write at once the one with the lower number may be the later."""
    stored(store, region="early")
    stored(store, region="late")
    hook.above, hook.sent = 0, {2}
    assert hook.deliver() == 1 and receiver.got[0]["id"] == 1
    assert hook.deliver() == 0


def test_what_was_sent_long_ago_is_forgotten(store: Store, hook: Webhook) -> None:
    hook.sent = set(range(1, 2000))
    hook._keep()
    assert hook.above == 1999 - webhook.BACK and len(hook.sent) == webhook.BACK
    kept = json.loads(hook.kept.read_text())
    assert kept["above"] == hook.above and len(kept["sent"]) == webhook.BACK


def test_an_address_that_does_not_answer_holds_nothing_up(
    store: Store, hook: Webhook, receiver: Receiver
) -> None:
    hook.address = "http://127.0.0.1:9/"
    begun = time.monotonic()
    hook.start()
    name = stored(store)
    with store.writing() as connection:
        happened(connection, name, Seen("vllm-0.33.0"), 1000)
    assert time.monotonic() - begun < 5
    assert until(lambda: hook.tries > 0)
    hook.address = receiver.address
    assert until(lambda: len(receiver.got) == 1)


def test_addresses(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_address("https://chat.example/hook?key=1") and is_address("http://127.0.0.1:1/")
    assert not any(map(is_address, ("file:///etc/passwd", "chat.example", "http://", "ftp://a/")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = {kept_at(store, one) for one in ("http://a/", "http://b/")}
    assert len(kept) == 2 and all(one.is_relative_to(tmp_path) for one in kept)
    assert "secret" not in str(kept_at(store, "http://a/secret"))
