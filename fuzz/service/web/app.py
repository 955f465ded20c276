"""The dashboard as an ASGI application over one store."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from fuzz.service.store import Store, StoreError
from fuzz.service.web import api, pages
from fuzz.service.web.access import Access
from fuzz.service.web.guard import Guard, is_for_machines
from fuzz.service.web.rendering import HERE, page

# Seconds after which a store that was away may be asked again.
AGAIN = "10"


def application(store: Store, access: Access) -> FastAPI:
    """It reads `store`, which stays the caller's to close."""
    app = FastAPI(
        title="maskproof", version="1", docs_url=None, redoc_url=None,
        openapi_url="/api/openapi.json",
        description="Findings of the fuzzing service. What changes something needs the token.",
    )
    app.state.store, app.state.access = store, access
    app.include_router(api.router)
    app.include_router(api.plain)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_middleware(Guard, access=access)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _bad)
    app.add_exception_handler(StoreError, _away)
    app.add_exception_handler(PoolTimeout, _away)
    return app


def _told(request: Request, status: int, text: str, **headers: str) -> Response:
    if is_for_machines(request.url.path):
        answer: Response = JSONResponse({"detail": text}, status)
    else:
        answer = page(request, "error.html", {
            "status": status, "title": HTTPStatus(status).phrase, "text": text}, status=status)
    answer.headers.update(headers)
    return answer


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _told(request, error.status_code, str(error.detail), **(error.headers or {}))


def _bad(request: Request, error: Exception) -> Response:
    """Says which parameter is bad and why, and gives nothing back of what was sent."""
    assert isinstance(error, RequestValidationError)
    said = [f"{'.'.join(str(part) for part in one['loc'][1:]) or one['loc'][0]}: {one['msg']}"
            for one in error.errors()[:5]]
    return _told(request, 422, "; ".join(said))


def _away(request: Request, error: Exception) -> Response:
    text = str(error) if isinstance(error, StoreError) else "the store has no time"
    return _told(request, 503, f"The store cannot be read now: {text}",
                 **{"Retry-After": AGAIN})
