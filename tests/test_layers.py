"""What surrounds the mask_mods: run in processes, kept, and held against an earlier check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kernels import forward
from kernels.provider import Provider, installed
from proofs import layers
from proofs.baseline import against, matrix, refutations
from proofs.checks import Options
from proofs.layers import Unit, check, key, of_unit, units
from proofs.obligation import Limits
from proofs.report import exit_status
from spec.check import main

PROVIDER = installed()
FEW = [unit for unit in units(PROVIDER, ["tiles"])
       if unit.configuration.name in ("causal[128x128,pack=1]", "causal[128x80,pack=4,split]",
                                      "full[128x128,pack=1]")]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "seconds": 0, "cached": None} for one in records]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    cache = tmp_path_factory.mktemp("cache")
    return cache, check(FEW, Options(), cache=cache, processes=2)


def test_processes_say_what_one_says(proved: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = proved
    assert len(FEW) >= 2 and all(one["verdict"] == "PROVED" for one in records)
    assert timeless(records) == timeless([r for unit in FEW for r in of_unit(unit, Options())])
    assert {one["layer"] for one in records} == {"tiles"}
    assert not any(one["cached"] for one in records)


def test_what_is_kept_is_not_proved_again_and_is_marked(
    proved: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, records = proved
    monkeypatch.setattr(layers, "of_unit", lambda unit, options: 1 / 0)
    again = check(FEW, Options(), cache=cache)
    assert all(one["cached"] for one in again) and timeless(again) == timeless(records)
    with pytest.raises(ZeroDivisionError):
        check(FEW, Options(), cache=None, processes=1)


def test_whatever_a_verdict_follows_from_changes_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    some, other = FEW[0].configuration, FEW[1].configuration
    unit = Unit("tiles", Provider("p", "p", tmp_path), some)
    keys = {key(unit, Options())}

    def changed() -> int:
        layers._digests.clear()
        keys.add(key(unit, Options()))
        return len(keys)

    assert changed() == 1
    (tmp_path / "a.py").write_text("x = 2\n")
    assert changed() == 2
    (tmp_path / "b.py").write_text("")
    assert changed() == 3
    (tmp_path / "root/vllm").mkdir(parents=True)
    unit = Unit("tiles", Provider("p", "p", tmp_path / "a", tmp_path / "root"), some)
    assert changed() == 4
    (tmp_path / "root/vllm/backend.py").write_text("causal = False\n")
    assert changed() == 5
    (tmp_path / "root/vllm/backend.py").write_text("causal = True\n")
    assert changed() == 6
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert changed() == 7
    monkeypatch.setattr("proofs.report.versions", lambda: {"z3-solver": "0"})
    assert changed() == 8
    for options in (Options(Limits(rlimit=1)), Options(Limits(timeout=1)),
                    Options(thorough=False), Options(obligations=("coverage",))):
        keys.add(key(unit, options))
    keys.add(key(Unit("tiles", unit.provider, other), Options()))
    assert len(keys) == 13
    assert key(unit, Options(Limits(smtlib=tmp_path))) in keys


def test_no_source_that_a_verdict_follows_from_is_left_out_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a link, in the compiler, and in the release whose kernels stand in (`--fa4`)."""
    root, linked, other, compiler = (tmp_path / name for name in ("root", "linked", "other", "dsl"))
    folder = other / "vllm/vllm_flash_attn/cute"
    for each in (root / "vllm", linked, folder, compiler, (other / forward.BACKEND).parent):
        each.mkdir(parents=True)
    (root / "vllm/v1").symlink_to(linked)
    (linked / "around").symlink_to(root / "vllm")
    sources = [linked / "a.py", compiler / "a.py", other / forward.BACKEND,
               other / forward.INTERFACE, folder / "mask.py"]
    for path in sources:
        path.write_text("x = 1\n")
    monkeypatch.setattr("proofs.compilers.folders", lambda: [compiler])
    unit = Unit("tiles", Provider("p", "p", folder, root), FEW[0].configuration)
    keys = [key(unit, Options())]
    for path in sources:
        path.write_text("x = 2\n")
        layers._digests.clear()
        keys.append(key(unit, Options()))
    layers._digests.clear()
    assert len({*keys}) == 1 + len(sources)


def test_what_is_undecided_is_not_kept(tmp_path: Path) -> None:
    starved = Options(Limits(rlimit=1))
    records = check(FEW[:1], starved, cache=tmp_path / "cache", processes=1)
    assert {one["verdict"] for one in records} == {"UNKNOWN"}
    assert not list(tmp_path.rglob("*.json"))
    file = tmp_path / "file"
    file.write_text("")
    assert check(FEW[:1], Options(), cache=file / "x", processes=1)  # nowhere to keep it


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '[{"verdict": "PROVED"}]', "{}", "null"])
def test_a_cache_that_is_damaged_is_none(
    text: str, proved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / f"{key(FEW[0], Options())}.json").write_text(text)
    assert timeless(check(FEW[:1], Options(), cache=tmp_path, processes=1)) == timeless(
        [one for one in proved[1] if one["target"] == FEW[0].name])


def test_a_release_without_its_files_is_not_passed_over(tmp_path: Path) -> None:
    provider = Provider("vllm-0", "p", tmp_path, tmp_path)
    for layer in ("metadata", "dispatch"):
        assert len(layers.needed(layer)) >= 1 and all("/" in name for name in layers.needed(layer))
    (only,) = of_unit(Unit("metadata", provider), Options())
    assert only["verdict"] == "UNSUPPORTED" and "there is no vllm/" in only["reason"]


def test_a_process_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "of_unit", lambda unit, options: os._exit(3))
    records = check(FEW[:2], Options(), processes=1)
    assert [one["verdict"] for one in records] == ["ERROR", "ERROR"]
    assert records[0]["target"] == FEW[0].name and "ended" in records[0]["reason"]


SLOW = """
import sys, time
from pathlib import Path
from proofs import layers
from proofs.checks import Options
from tests.test_layers import FEW

proved = layers.of_unit

def slow(unit, options):
    if unit != FEW[0]:
        time.sleep(60)
    return proved(unit, options)

layers.of_unit = slow
layers.check(FEW, Options(), lambda text: print(text, flush=True), Path(sys.argv[1]), 2)
"""


def test_a_check_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was proved is kept as soon as it is; only what was under way is proved again."""
    root = Path(__file__).resolve().parent.parent
    child = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], cwd=root, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    # A unit is kept before the next is told, and here no other ends.
    assert child.stdout.readline().startswith(FEW[0].name)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("[!.]*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = (Path("/proc") / str(child.pid) / f"task/{child.pid}/children").read_text().split()
    child.kill()
    child.wait()
    while any(running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert workers and not any(running(pid) for pid in workers)
    records = check(FEW, Options(), cache=tmp_path, processes=1)
    assert [one["cached"] for one in records] == [
        one["target"] == FEW[0].name for one in records]
    assert all(one["verdict"] == "PROVED" for one in records)


def running(pid: str) -> bool:
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def one(target: str, verdict: str, expected: str = "PROVED", **more: Any) -> dict[str, Any]:
    return {"target": target, "layer": "tiles", "arch": "sm_90", "obligation": "coverage",
            "spec": "causal", "verdict": verdict, "expected": expected, "diagnosis": None,
            "reason": "", "explanation": f"{target} is wrong", **more}


def test_only_what_is_new_or_worse_is_told() -> None:
    known = [one("v/a", "REFUTED"), one("v/b", "PROVED"), one("v/c", "REFUTED"),
             one("v/d", "UNKNOWN"), one("v/gone", "PROVED"), one("w/elsewhere", "PROVED")]
    now = [one("v/a", "REFUTED"), one("v/b", "REFUTED"), one("v/c", "PROVED"),
           one("v/d", "REFUTED"), one("v/e", "UNSUPPORTED"), one("v/f", "PROVED")]
    told, lines = against(now, known)
    assert [record["target"] for record in told if record["verdict"] != "PROVED"] == [
        "v/b", "v/d", "v/e"]
    assert lines == [
        "known: v/a coverage: REFUTED", "worse: v/b coverage: REFUTED, PROVED before",
        "became right: v/c coverage: REFUTED before",
        "worse: v/d coverage: REFUTED, UNKNOWN before", "new: v/e coverage: UNSUPPORTED",
        "no longer checked: v/gone coverage"]


@pytest.mark.parametrize("now", ["ERROR", "UNSUPPORTED", "UNKNOWN", "VACUOUS"])
def test_no_verdict_where_there_was_one_is_told(now: str) -> None:
    told, lines = against([one("v/a", now)], [one("v/a", "REFUTED")])
    assert len(told) == 1 and exit_status(told) == 3
    assert lines == [f"worse: v/a coverage: {now}, REFUTED before"]
    told, lines = against([one("v/a", "UNKNOWN")], [one("v/a", "ERROR")])
    assert not told and lines == ["known: v/a coverage: UNKNOWN"]


def test_a_twin_that_is_no_longer_refuted_is_told_though_a_baseline_knows_it() -> None:
    twin = one("v/twin", "REFUTED", "REFUTED")
    told, lines = against([{**twin, "verdict": "PROVED"}], [twin])
    assert len(told) == 1 and lines == ["worse: v/twin coverage: PROVED, REFUTED before"]


def test_releases_stand_beside_each_other() -> None:
    said = {"diagnosis": {"sentence": "never | read"}}
    text = matrix([one("vllm-0.24.0/tiles/x", "REFUTED", **said),
                   one("vllm-0.33.0/tiles/x", "PROVED"),
                   one("flash-attn-4-4.0.0b36/tiles/y", "UNSUPPORTED", reason="no")])
    *_, head, _, first, second = text.splitlines()
    assert head == (
        "| target | obligation | vllm-0.24.0 | vllm-0.33.0 | flash-attn-4-4.0.0b36 |")
    assert first == (
        r"| tiles/x | coverage | REFUTED: never \| read | PROVED |  |")
    assert second == "| tiles/y | coverage |  |  | UNSUPPORTED: no |"


def test_refutations_of_releases_are_written_down() -> None:
    text = refutations([one("vllm-0.24.0/tiles/x", "REFUTED"), one("vllm-0.33.0/tiles/x", "PROVED"),
                        one("maskproof/a", "REFUTED"),
                        one("vllm-0.33.0/known", "REFUTED", "REFUTED")])
    assert "vllm-0.24.0/tiles/x is wrong" in text and text.count("## ") == 1
    assert "`python -m spec.check --vllm 0.24.0 --layer tiles`" in text
    assert "There are none." in refutations([])


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not what --json writes"), ('{"results": [{"target": 1}]}', "not what --json writes"),
    ("[]", "not what --json writes"), (None, "No such file or directory"),
])
def test_a_baseline_that_is_none_is_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "known.json"
    if text is not None:
        file.write_text(text)
    assert main(["--baseline", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_check_is_right_against_itself_and_a_lost_fault_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.faulty_mask_mods import FAULTS

    fault = FAULTS[0].arguments
    file = tmp_path / "known.json"
    assert main([*fault, "--json", str(file)]) == 1
    assert main([*fault, "--baseline", str(file)]) == 0
    assert "known: " in capsys.readouterr().out
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "results": []}))
    assert main([*fault, "--baseline", str(file)]) == 1
    assert "new: " in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["x.py::y", "--against", "causal", "--flash-attn"], "not both"),
    (["--layer", "tiles"], "--layer needs --vllm or --flash-attn"),
    (["--flash-attn", "--layer", "mask_mod"], "has no mask_mods"),
    (["--layer", "roof", "--vllm", "0.33.0"], "invalid choice: 'roof'"),
    (["--fast", "--layer", "tiles", "--flash-attn"], "--fast is about mask_mods alone"),
    (["--flash-attn", "--layer", "sampling"], "nothing there to check for --layer sampling"),
    (["--fa4", "x", "--vllm", "0.33.0", "--vllm", "0.32.0"], "--fa4 needs --vllm, once"),
])
def test_what_cannot_be_asked_together_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.releases
def test_the_page_of_findings_is_what_a_check_writes(tmp_path: Path) -> None:
    file = tmp_path / "findings.md"
    assert main(["--vllm", "0.33.0", "--layer", "dispatch", "--refutations", str(file)]) == 1
    page = (Path(__file__).resolve().parent.parent / "docs/findings.md").read_text()
    parts = file.read_text().split("\n## ")[1:]
    assert len(parts) >= 2 and all(part.strip() in page for part in parts)
