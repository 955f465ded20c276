"""Findings of built-in flags as a GPU writes them, and their replay through releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import bisect
from fuzz import run as command
from fuzz.findings import stored
from kernels.fa4 import releases
from tests.findings import rswa

pytestmark = pytest.mark.gpu
TARGET = "rswa beside causal=True"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    release = next(each for each in releases() if each.version == "0.33.0")
    folder = tmp_path_factory.mktemp("rswa")
    status = command.main([
        "--backend", "gpu", "--budget", "40s", "--findings", str(folder), "--vllm",
        str(release.root), "--target", TARGET, "--stop-on-first"])
    assert status == 1
    name, found = next(iter(stored(folder).items()))
    return folder / f"finding-{name}.json", found


def test_what_is_made_for_tests_is_what_a_gpu_writes(written: tuple[Path, dict[str, Any]]) -> None:
    _, found = written
    made = rswa()
    del made["diagnosis"]  # None, but where z3 is
    assert {name: type(value) for name, value in made.items()}.items() <= {
        name: type(value) for name, value in found.items()}.items()
    assert found["kind"] == made["kind"]
    layout = found["case"]["call"]["layout"]
    assert found["path"].startswith(made["path"].replace("paged", layout))
    flags = "spec", "mask_mod", "causal", "window_size_left", "dynamic_causal", "provider"
    call, own = (one["case"]["call"] for one in (found, made))
    assert {name: call[name] for name in flags} == {name: own[name] for name in flags}


def test_it_is_bisected_by_replay(
    written: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = written
    here = sorted({each.version or "" for each in releases()})
    out = tmp_path / "out.json"
    status = bisect.main([str(path), "--releases", ",".join(here), "--by", "replay", "--repeat",
                          "5", "--json", str(out)])
    said = json.loads(out.read_text())
    told = {one["release"]: one for one in said["releases"]}
    assert told["vllm-0.33.0"]["state"] == "bad" and status in (0, 1)
    assert told["vllm-0.33.0"]["replay"]["faulty"] == 5
    for version in {"0.25.1", "0.26.0"} & {*here}:  # where their FA4 imports
        assert told[f"vllm-{version}"]["state"] in ("good", "undecided")
    if "0.24.0" in here:  # it has no R-SWA
        assert told["vllm-0.24.0"]["state"] == "undecided"
    assert "5 of 5 runs" in capsys.readouterr().out
