"""What stands before every page: a request's host, size and token, and an answer's headers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fuzz.service.web.access import Access

# Bytes of a request: of a form or a decision, and of the JSON of a check.
SMALL, LARGE = 64 * 2**10, 16 * 2**20
# Seconds in which a request has to arrive.
ARRIVING = 30.0
IMPORTS = "/api/verdicts"
OPEN = ("/sign-in", "/static/")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class TooLarge(Exception):
    """A request with more bytes than are taken."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Passes on what may pass. A request's body is whole before the application sees it."""

    app: ASGIApp
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = {name for name, _ in message["headers"]}
                added = {**HEADERS, "Cache-Control": "no-store"}
                message["headers"] = [*message["headers"], *(
                    (name.lower().encode(), value.encode()) for name, value in added.items()
                    if name.lower().encode() not in said)]
            await send(message)

        refused = self._refused(HTTPConnection(scope))
        if refused is None:
            try:
                async with asyncio.timeout(ARRIVING):
                    receive = await self._whole(scope, receive)
            except TooLarge:
                refused = answer(scope, 413, "the request is too large")
            except TimeoutError:
                refused = answer(scope, 408, "the request did not arrive in time")
        await (refused or self.app)(scope, receive, sent)

    def _refused(self, request: HTTPConnection) -> Response | None:
        if not self.access.answers_to(request.headers.get("host", "")):
            return answer(request.scope, 421, "this is not served under that host name")
        path = request.url.path
        if path.startswith(OPEN) or self.access.may_read(request):
            return None
        if is_for_machines(path):
            return answer(request.scope, 401, "a token is needed: Authorization: Bearer TOKEN")
        return RedirectResponse(f"/sign-in?then={quote(path)}", 303)

    async def _whole(self, scope: Scope, receive: Receive) -> Receive:
        limit = LARGE if scope["path"] == IMPORTS else SMALL
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if not said.isdigit() or int(said) > limit:
            raise TooLarge
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise TooLarge
        given = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def whole() -> Message:
            return given.pop() if given else await receive()

        return whole


def is_for_machines(path: str) -> bool:
    return path.startswith(("/api/", "/metrics"))


def answer(scope: Scope, status: int, text: str) -> Response:
    if status == 401:
        return JSONResponse({"detail": text}, status, {"WWW-Authenticate": "Bearer"})
    if is_for_machines(scope["path"]):
        return JSONResponse({"detail": text}, status)
    return PlainTextResponse(text + "\n", status)
