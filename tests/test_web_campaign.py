"""A campaign beside its dashboard: what is found is seen while it runs, and both end together."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.service.campaign_file import load
from fuzz.service.store import Store, opened, url_of
from tests.web_stores import BAD, ROOT, Served

FILE = f"""
[campaign]
name = "live"
backend = "cpu"
budget = "5m"

[[target]]
names = ["{BAD}"]
max_keys = 32
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def figure(served: Served, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", served.ask("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_findings_are_seen_while_a_campaign_runs(tmp_path: Path) -> None:
    file, number = tmp_path / "live.toml", free_port()
    file.write_text(FILE)
    process = subprocess.Popen(
        [sys.executable, "-m", "fuzz.campaign", "run", file, "--serve", "--port", str(number)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"dashboard: http://127.0.0.1:{number}/\n"
        store: Store = opened(url_of(None, tmp_path / "findings"))
        there, until = Served(store, number), time.monotonic() + 120
        while (found := figure(there, 'maskproof_findings{state="new"}')) == 0:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.5)
        assert found >= 1 and figure(there, 'maskproof_cells_total{campaign="live"}') > 0
        assert "equals mm_prefix_no_window with chunk-local q" in there.ask("/").text
        assert ">runs<" in there.ask("/").text
        store.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and f"python -m fuzz.serve {file}" in err
    with pytest.raises(ConnectionRefusedError):
        there.ask("/")


def test_the_example_is_a_campaign() -> None:
    found = load(ROOT / "examples" / "laptop.toml")
    assert found.backend == "cpu" and [one.source.vllm for one in found.targets] == [
        "0.24.0", "0.33.0", None]
    assert "fuzz.campaign run examples/laptop.toml --serve" in found.path.read_text()
