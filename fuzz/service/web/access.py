"""Who may read the dashboard, and who may change something: one token, compared in constant time.

The token comes in the header `Authorization: Bearer TOKEN`, or once through the sign-in form, which
leaves a signed cookie. It is never part of an address, and nothing writes it down.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from dataclasses import dataclass

from starlette.requests import HTTPConnection

COOKIE = "maskproof"
SHORTEST = 16
# Seconds for which a browser stays signed in.
SIGNED_IN = 12 * 3600
LOCAL = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address; a name counts only if it is localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Access:
    """`public`: others can reach it, and reading needs the token as well. `names` are the hosts
    that it answers to, without ports; none: any. `secure`: it is reached by TLS only."""

    token: str | None = None
    public: bool = False
    names: tuple[str, ...] = LOCAL
    secure: bool = False

    def answers_to(self, host: str) -> bool:
        """A page elsewhere whose name leads here is no way to read what only this machine may."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return not self.names or name.lower() in self.names

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(
            given.encode("utf-8", "replace"), self.token.encode())

    def bearer(self, request: HTTPConnection) -> bool:
        """Whether the request itself carries the token."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.is_token(given.strip())

    def signed_in(self, request: HTTPConnection) -> bool:
        """Whether the browser has signed in, and not too long ago."""
        until, _, seal = request.cookies.get(COOKIE, "").partition(".")
        fresh = until.isascii() and until.isdigit() and len(until) < 12 and int(until) > time.time()
        return fresh and self.token is not None and hmac.compare_digest(
            seal.encode("utf-8", "replace"), self._seal("session", until).encode())

    def may_read(self, request: HTTPConnection) -> bool:
        return not self.public or self.bearer(request) or self.signed_in(request)

    def session(self) -> str:
        """The cookie of a browser that has signed in now."""
        until = str(int(time.time()) + SIGNED_IN)
        return f"{until}.{self._seal('session', until)}"

    def form_key(self, request: HTTPConnection) -> str:
        """What a form of this session carries, so that no other site can send one in its name."""
        return self._seal("form", request.cookies.get(COOKIE, "")) if self.token else ""

    def is_form_key(self, request: HTTPConnection, given: str) -> bool:
        return self.signed_in(request) and hmac.compare_digest(
            given.encode("utf-8", "replace"), self.form_key(request).encode())

    def _seal(self, purpose: str, text: str) -> str:
        key = (self.token or "").encode()
        return hmac.new(key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()
