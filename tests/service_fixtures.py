"""Stores for tests, each of them empty, in SQLite and in PostgreSQL. (A pytest plug-in.)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from fuzz.service.store import Store, opened, url_of
from tests import postgres

KINDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    if postgres.MISSING:
        pytest.skip(postgres.MISSING)
    with postgres.running() as running:
        yield running


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> URL:
    if request.param == "sqlite":
        return url_of(None, tmp_path / "store")
    return url_of(request.getfixturevalue("server").fresh(), tmp_path)


@pytest.fixture
def store(url: URL) -> Iterator[Store]:
    found = opened(url)
    yield found
    found.close()
