"""Dashboards for tests. (A pytest plug-in.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.service.store import Store, opened, url_of
from fuzz.service.web.access import Access
from tests.web_stores import CAMPAIGN, ROOT, TOKEN, Served, serving


@pytest.fixture
def served(store: Store) -> Iterator[Served]:
    """With a token, for this machine only."""
    with serving(store, Access(TOKEN)) as found:
        yield found


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Served]:
    """The same over a new SQLite store."""
    store = opened(url_of(None, tmp_path / "small"))
    with serving(store, Access(TOKEN)) as found:
        yield found
    store.close()


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a short campaign that has run on the CPU, and found a fault."""
    file = tmp_path_factory.mktemp("campaign") / "real.toml"
    file.write_text(CAMPAIGN)
    subprocess.run([sys.executable, "-m", "fuzz.campaign", "run", file], cwd=ROOT,
                   capture_output=True, timeout=300)
    return file


@pytest.fixture(scope="session")
def real(campaign: Path) -> Iterator[Served]:
    """A dashboard over the store of that campaign."""
    store = opened(url_of(None, campaign.parent / "real"))
    with serving(store, Access(TOKEN)) as found:
        yield found
    store.close()
