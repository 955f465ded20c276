"""Who may do what: tokens, forms, hosts, sizes, paths, and that nothing shown is markup."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz import serve
from fuzz.service import reads
from fuzz.service.records import record_finding
from fuzz.service.store import opened, url_of
from fuzz.service.web.access import Access, is_loopback
from fuzz.service.web.guard import LARGE, SMALL
from fuzz.service.web.pages import inside
from tests.service_stores import finding
from tests.web_stores import ROOT, TOKEN, Served, serving, stored

pytest_plugins = ["tests.service_fixtures", "tests.web_fixtures"]

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
BEARER = {"authorization": f"Bearer {TOKEN}"}
JSON = {"content_type": "application/json"}
PAGES = ("/", "/?span=all", "/findings", "/findings?state=open&order=count", "/coverage",
         "/coverage?by=everything", "/releases?show=wrong", "/sign-in")


@pytest.fixture
def public(small: Served) -> Iterator[Served]:
    """As if other machines could reach it."""
    with serving(small.store, Access(TOKEN, public=True, names=())) as found:
        yield found


@pytest.fixture
def without_token(small: Served) -> Iterator[Served]:
    with serving(small.store, Access(None)) as found:
        yield found


def state_of(served: Served, name: str) -> str:
    with served.store.reading() as connection:
        found = reads.finding_of(connection, name)
    assert found
    return found["state"]


def judged(served: Served, name: str, body: Any, **headers: str) -> int:
    return served.ask(f"/api/findings/{name}/triage", "POST", json.dumps(body),
                      **{**JSON, **headers}).status


def test_a_decision_needs_the_token(served: Served) -> None:
    name, wanted = stored(served.store), {"decision": "wontfix", "reason": "padded rows"}
    assert judged(served, name, wanted) == 401
    for wrong in ("Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xff"):
        assert judged(served, name, wanted, authorization=wrong) == 401
    assert judged(served, name, wanted, cookie=f"maskproof={TOKEN}") == 401
    assert state_of(served, name) == "new"
    assert judged(served, name, wanted, **BEARER) == 200
    assert state_of(served, name) == "wontfix"
    assert judged(served, name, {"decision": "accept"}, **BEARER) == 409
    assert judged(served, name, {"decision": "reopen"}, **BEARER) == 409
    assert judged(served, name, {"decision": "reopen", "reason": "seen", "by": "Ann"},
                  **BEARER) == 200
    history = json.loads(served.ask(f"/api/findings/{name}").text)["history"]
    assert [row["who"] for row in history] == ["", "API", "Ann (API)"]


def test_a_form_needs_a_session_and_its_key(served: Served) -> None:
    name = stored(served.store)
    path, page = f"/findings/{name}/triage", f"/findings/{name}"
    wanted = {"decision": "accept"}
    assert served.form(path, **wanted).status == 403
    assert served.form("/sign-in", token="no", then="/").status == 403
    cookie = served.sign_in()
    shown = served.ask(page, cookie=cookie).text
    found = re.search(r'name="key" value="(\w+)"', shown)
    assert found and TOKEN not in shown
    assert served.form(path, cookie, **wanted).status == 403
    assert served.form(path, cookie, **wanted, key="0" * 64).status == 403
    assert served.form(path, "", **wanted, key=found[1]).status == 403
    other = f"maskproof={int(time.time()) + 999}.{'0' * 64}"
    assert served.form(path, other, **wanted, key=found[1]).status == 403
    assert state_of(served, name) == "new"
    assert served.form(path, cookie, **wanted, key=found[1]).status == 303
    assert state_of(served, name) == "open"
    again = served.form(path, cookie, decision="wontfix", key=found[1])
    assert again.status == 409 and "a reason is needed" in again.text
    assert served.form(path, cookie, decision="delete", key=found[1]).status == 422
    assert served.form("/sign-out", cookie, key=found[1]).status == 303


def test_a_session_ends(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    name, cookie = stored(served.store), served.sign_in()
    found = re.search(r'name="key" value="(\w+)"', served.ask("/", cookie=cookie).text)
    assert found
    monkeypatch.setattr(time, "time", lambda: 1000.0 + 13 * 3600)
    assert "Sign out" not in served.ask("/", cookie=cookie).text
    path = f"/findings/{name}/triage"
    assert served.form(path, cookie, decision="accept", key=found[1]).status == 403


def test_the_cookie_is_for_this_dashboard_alone(served: Served) -> None:
    said = served.form("/sign-in", token=TOKEN, then="//evil.example/").headers
    assert "httponly" in said["set-cookie"].lower() and "samesite=strict" in \
        said["set-cookie"].lower() and said["location"] == "/"
    assert TOKEN not in said["set-cookie"]


@pytest.mark.parametrize("address", ["//a.example", "/\\a.example", "https://a.example", "",
                                     "/a\r\nSet-Cookie: b=c", "javascript:alert(1)"])
def test_nothing_leads_elsewhere(address: str) -> None:
    assert inside(address) == "/"
    assert inside("/findings?state=new") == "/findings?state=new"


def test_without_a_token_nothing_can_be_changed(without_token: Served) -> None:
    name = stored(without_token.store)
    assert without_token.ask(f"/findings/{name}").status == 200
    assert judged(without_token, name, {"decision": "accept"}, **BEARER) == 403
    assert judged(without_token, name, {"decision": "accept"}, authorization="Bearer ") == 403
    assert without_token.form(f"/findings/{name}/triage", decision="accept", key="").status == 403
    assert without_token.form("/sign-in", token="", then="/").status == 403
    assert state_of(without_token, name) == "new"


def test_what_others_can_reach_is_read_with_the_token_only(public: Served) -> None:
    name = stored(public.store)
    for path in (*PAGES[:-1], f"/findings/{name}", f"/findings/{name}/finding.json"):
        assert public.ask(path).status == 303
    for path in ("/api/findings", f"/api/findings/{name}", "/api/openapi.json", "/metrics"):
        assert public.ask(path).status == 401
        assert public.ask(path, **BEARER).status == 200
    assert public.ask("/static/style.css").status == 200
    assert public.ask(f"/findings?token={TOKEN}").status == 303
    cookie = public.sign_in()
    assert public.ask("/findings", cookie=cookie).status == 200


def test_a_name_that_leads_here_is_not_answered(served: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert served.ask("/", host=host).status == 421
    for host in ("localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"):
        assert served.ask("/", host=host).status == 200


def test_all_that_is_shown_is_escaped(served: Served) -> None:
    document = finding(region=EVIL)
    document |= {
        "kind": f"leak{EVIL}"[:20], "path": EVIL, "text": EVIL, "replay": EVIL, "device": EVIL,
        "picture": [EVIL], "versions": {EVIL: EVIL}, "expected": [EVIL], "got": ["#"],
        "diagnosis": {"sentence": EVIL, "variation": EVIL, "verdict": EVIL},
        "bisect": {"edges": [{"sentence": EVIL}]}, "provider": EVIL,
        "spec": {"name": EVIL, "sentence": EVIL, "formula": EVIL, "params": {EVIL: EVIL}},
    }
    with served.store.writing() as connection:
        record_finding(connection, document, 1000)
    name = document["fingerprint"]
    assert judged(served, name, {"decision": "wontfix", "reason": EVIL, "by": EVIL[:60]},
                  **BEARER) == 200
    check = {"results": [{"target": f"{EVIL}/rswa", "obligation": EVIL, "spec": EVIL,
                          "verdict": "REFUTED", "diagnosis": {"sentence": EVIL}}]}
    assert served.ask("/api/verdicts", "POST", json.dumps(check), **JSON, **BEARER).status == 200
    quoted = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
    for path in (*PAGES, f"/findings/{name}", f"/findings?contains={quoted}",
                 f"/releases?target={quoted}", f"/coverage?spec={quoted}",
                 f"/sign-in?then=/{quoted}", f"/findings?state={quoted}", f"/?{quoted}",
                 f"/nothing/{quoted}"):
        shown = served.ask(path)
        assert shown.status in (200, 404, 422), path
        assert "<script>alert" not in shown.text and "<img" not in shown.text, path
        assert "'unsafe" not in shown.headers["content-security-policy"]
    script = served.ask(f"/findings/{name}/replay.py")
    compile(script.text, "replay.py", "exec")
    assert script.headers["content-disposition"].startswith("attachment")
    file = served.ask(f"/findings/{name}/finding.json")
    assert json.loads(file.text) == json.loads(json.dumps(document))


def test_half_a_character_is_shown_too(small: Served) -> None:
    document = finding()
    document["text"] = document["replay"] = "half \ud800"
    with small.store.writing() as connection:
        record_finding(connection, document, 1000)
    name = document["fingerprint"]
    for path in (f"/findings/{name}", f"/findings/{name}/finding.json"):
        assert small.ask(path).status == 200


def test_every_answer_says_how_it_may_be_used(served: Served) -> None:
    for path in (*PAGES, "/nothing", "/api/findings", "/static/style.css"):
        said = served.ask(path).headers
        assert "default-src 'none'" in said["content-security-policy"], path
        assert said["x-content-type-options"] == "nosniff"
        assert "server" not in said


@pytest.mark.parametrize("path", [
    "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/....//app.py",
    "/static//etc/passwd", "/static/%00", "/static/..\\app.py", "/../../../../etc/passwd",
    "/findings/../../etc/passwd", "/findings/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/findings/0123456789ab/..%2f..%2fapp.py", "/findings/0123456789ab/%2e%2e",
])
def test_no_path_leads_to_a_file(small: Served, path: str) -> None:
    shown = small.ask(path)
    assert shown.status in (400, 404, 422) and "import" not in shown.text
    assert "root:" not in shown.text


@pytest.mark.parametrize("path", [
    "/findings/0123456789ab", "/findings/0123456789ab/finding.json",
    "/findings/0123456789ab/replay.py", "/api/findings/0123456789ab", "/?campaign=none",
    "/coverage?campaign=none", "/api/rates?campaign=none", "/api/nothing", "/nothing",
])
def test_what_is_not_there_is_not_found(served: Served, path: str) -> None:
    assert served.ask(path).status == 404


@pytest.mark.parametrize("path", [
    "/findings?state=closed", "/findings?order=name", "/findings?after=1", "/findings?after=a-b",
    "/findings?after=99999999999999999999-a", "/findings?limit=0", "/findings?limit=100000",
    "/findings?limit=x", "/findings?kind=%00", "/findings?unknown=1", "/findings?order=",
    f"/findings?contains={'a' * 201}", "/?span=years", "/?campaign=%00", "/coverage?by=x",
    "/api/findings?before=;drop", "/api/coverage?by=id", "/api/rates?span=1",
    f"/findings/{'a' * 41}", "/findings/a%27b", "/releases?show=x",
])
def test_bad_parameters_are_refused(served: Served, path: str) -> None:
    answer = served.ask(path)
    assert answer.status == 422 and "Traceback" not in answer.text


def test_unknown_findings_are_not_judged(served: Served) -> None:
    assert judged(served, "0123456789ab", {"decision": "accept"}, **BEARER) == 404
    name = stored(served.store)
    for bad in ({}, {"decision": "delete"}, {"decision": "wontfix", "reason": 3}, [],
                {"decision": "wontfix", "reason": "a\0b"}, {"decision": "accept", "more": 1},
                {"decision": "wontfix", "reason": "\ud800"},
                {"decision": "wontfix", "reason": "a" * 2001}):
        assert judged(served, name, bad, **BEARER) == 422, bad
    assert served.ask(f"/api/findings/{name}/triage", "POST", "{", **JSON, **BEARER).status == 422
    assert served.ask(f"/api/findings/{name}/triage", "DELETE", **BEARER).status == 405


def test_a_check_is_taken_as_data(served: Served) -> None:
    def sent(body: str | bytes, **headers: str) -> int:
        return served.ask("/api/verdicts", "POST", body, **{**JSON, **headers}).status

    good = {"results": [{"target": "vllm-0.33.0/rswa", "obligation": "equals-spec",
                         "spec": "rswa", "verdict": "PROVED"}]}
    assert sent(json.dumps(good)) == 401
    assert sent(json.dumps(good), **BEARER) == 200
    for bad in ('{"results": [{}]}', '{"results": 3}', "[]", '{"results": [{"target": 3}]}',
                "{", b"\x80\x04K\x01."):
        assert sent(bad, **BEARER) in (400, 422), bad
    nul = {"results": [{**good["results"][0], "verdict": "a\0"}]}
    assert sent(json.dumps(nul), **BEARER) == (
        422 if served.store.url.get_backend_name() == "postgresql" else 200)
    assert "vllm-0.33.0" in served.ask("/releases").text


def test_a_large_body_is_not_taken(small: Served) -> None:
    name = stored(small.store)
    path = f"/api/findings/{name}/triage"
    assert small.ask(path, "POST", b" " * (SMALL + 1), **JSON, **BEARER).status == 413
    assert small.ask("/sign-in", "POST", b"a" * (SMALL + 1)).status == 413
    assert small.ask(path, "POST", b"", content_length=str(10**12), **BEARER).status == 413
    assert small.ask(path, "POST", b"", content_length=str(LARGE), **BEARER).status == 413
    assert small.ask("/api/verdicts", "POST", b"", content_length=str(LARGE + 1),
                     **BEARER).status == 413


def test_a_large_body_in_parts_is_not_taken(small: Served) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as link:
        link.sendall(b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
        for _ in range(3):
            link.sendall(part)
        assert b" 413 " in link.recv(4096).splitlines()[0]


def test_a_store_that_is_away_is_said(tmp_path: Path) -> None:
    store = opened(url_of(None, tmp_path / "a"))
    with serving(store, Access(TOKEN)) as found:
        assert found.ask("/").status == 200
        store.close()
        path = Path(store.url.database or "")
        for one in path.parent.glob("store.sqlite*"):
            one.unlink()
        path.mkdir()
        away = found.ask("/")
        assert away.status == 503 and away.headers["retry-after"] == "10"
        assert found.ask("/api/findings").status == 503


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]", "localhost", "127.9.9.9"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.a"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


USAGE = {
    "another address": (["--host", "0.0.0.0"], "a token is needed"),
    "every address": (["--host", "::"], "a token is needed"),
    "a name": (["--name", "fuzz.example"], "a token is needed"),
    "short": (["--token-file", "short"], "at least 16 characters"),
    "no file": (["--token-file", "none"], "No such file"),
    "port": (["--port", "70000"], "is no port"),
    "webhook": (["--webhook", "chat.example"], "it is http://"),
    "key": (["--key", "short"], "--key needs --certificate"),
    "certificate": (["--certificate", "none"], "no such file"),
    "two stores": (["a.toml"], "name a campaign's FILE, or its --store"),
}


@pytest.mark.parametrize("given", USAGE.values(), ids=USAGE)
def test_bad_usage_is_told_in_one_line(
    given: tuple[list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(serve.TOKEN, raising=False)
    opened(url_of("s.sqlite", tmp_path)).close()
    Path("short").write_text("short\n")
    arguments, said = given
    assert serve.main(["--store", str(tmp_path / "s.sqlite"), *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_no_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--store", str(tmp_path / "none.sqlite")]) == 3
    assert "run the campaign first" in capsys.readouterr().err
    assert not (tmp_path / "none.sqlite").exists()


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    opened(url_of(None, tmp_path)).close()
    (tmp_path / "token").write_text(TOKEN + "\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "fuzz.serve", "--store", tmp_path / "store.sqlite", "--port", "0",
         "--token-file", tmp_path / "token"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"dashboard: http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
        assert found
        there = Served(opened(url_of(None, tmp_path)), int(found[1]))
        assert there.ask("/").status == 200 and there.sign_in().startswith("maskproof=")
        busy = subprocess.run(
            [sys.executable, "-m", "fuzz.serve", "--store", tmp_path / "store.sqlite", "--port",
             found[1]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert busy.returncode == 3 and "--port takes another" in busy.stderr
        there.store.close()
    finally:
        process.terminate()
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("", "") and TOKEN not in out + err
