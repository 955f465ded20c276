"""The commands: what they say of bad input, what they leave behind, and that it replays."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fuzz import backends, replay
from fuzz import run as command
from fuzz.backends import CpuBackend, NoBackend, take
from fuzz.case import CaseError, Sequence, canonical, from_text
from fuzz.diagnose import Diagnoses
from fuzz.findings import FindingError, Signature, file_of, load, path_of
from fuzz.loop import Progress
from fuzz.regions import regions
from fuzz.run import duration, process_start
from fuzz.screen import Screen, figures
from fuzz.sequences import pack
from kernels.fa4 import Call
from kernels.mask_mods import TARGETS
from spec.masks import mask

ROOT = Path(__file__).resolve().parent.parent
CPU = ("--backend", "cpu")


def said(capsys: pytest.CaptureFixture[str], who: str) -> str:
    """The one line on standard error, and nothing else."""
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"{who}: ") and error.count("\n") == 1
    return error


BAD_USAGE = {
    "unknown mask": (("--spec", "windw"), "did you mean 'window'?"),
    "budget": (("--budget", "soon"), "'soon' is not a time such as 60s, 5m or 8h"),
    "no budget": (("--budget", "0s"), "not a time"),
    "provider": (("--provider", "sglang"), "invalid choice: 'sglang'"),
    "provider without a release": (("--provider", "vllm"), "needs --vllm VERSION"),
    "two providers": (("--provider", "upstream", "--vllm", "0.33.0"), "implies --provider vllm"),
    "back end": (("--backend", "tpu"), "invalid choice: 'tpu'"),
    "seed": (("--seed", "-1"), "not a whole number below 2**32"),
    "launches": (("--launches", "0"), "'0' is not a whole number above 0"),
    "max-keys": (("--max-keys", "many"), "'many' is not a whole number above 0"),
    "arch": (("--arch", "sm_70"), "invalid choice: 'sm_70'"),
    "option": (("--fast",), "unrecognized arguments: --fast"),
    "target": (("--target", "rsw"), "no target 'rsw'; there are maskproof/mm_prefix[window]"),
    "file without a spec": (("--target", "x.py::f"), "--spec MASK, once"),
    "another mask": (("--target", "rswa", "--spec", "window"), "is to compute rswa, not window"),
    "no such file": (("--target", "x.py::f", "--spec", "causal"), "x.py: no such file"),
    "aux without a file": (("--aux", "ranges"), "need a target in a file"),
    "fa4": (("--fa4", "x"), "--fa4 needs --vllm"),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, text = BAD_USAGE[case]
    assert command.main([*CPU, "--findings", str(tmp_path), *options]) == 2
    assert text in said(capsys, "fuzz.run")


def test_a_table_that_the_spec_does_not_have_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{ROOT}/tests/test_fuzz_isolation.py::wild"
    assert command.main([*CPU, "--findings", str(tmp_path), "--target", target,
                         "--spec", "causal", "--aux", "prefix_lens"]) == 2
    assert "causal has no such table" in said(capsys, "fuzz.run")


def test_what_is_wrong_with_the_place_is_one_line_and_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_gpu", lambda: False)
    (tmp_path / "file").write_text("")
    (tmp_path / "bad/state").mkdir(parents=True)
    (tmp_path / "bad/state/snapshot.json").write_text("{}")
    places = {
        ("--backend", "gpu"): "no GPU here (no /dev/nvidia*): use --backend cpu",
        ("--findings", f"{tmp_path}/file/x"): "Not a directory",
        ("--findings", f"{tmp_path}/bad"): "not the state of a campaign (schema None instead of 1)",
        ("--json", f"{tmp_path}/none/x.json"): "No such file or directory",
        ("--vllm", "0.22.1"): "has no factory of a mask_mod",
        ("--vllm", f"{tmp_path}/file"): "not a sound wheel",
    }
    for options, text in places.items():
        assert command.main([*CPU, "--findings", str(tmp_path / "f"), *options]) == 3
        assert text in said(capsys, "fuzz.run")


def test_without_the_compiler_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(NoBackend, match="cutlass is not installed"):
        take("cpu", {})


def test_auto_says_which_back_end_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_gpu", lambda: False)
    assert command.main(["--findings", str(tmp_path), "--launches", "1", "--spec", "rswa"]) == 0
    assert "backend: cpu (CPU" in capsys.readouterr().err


SEQUENCE = {"seqlen_q": 1, "seqlen_k": 2, "tables": {}}


def case_text(
    case: object = None, call: object = None, sequence: object = None, **fields: object
) -> str:
    """A good case of `window` as JSON, with some parts changed."""
    plain = {"provider": "upstream", "spec": "window", "params": {"window": 4}}
    return json.dumps({
        "schema": 1, "call": {**plain, **(call or {})},
        "sequences": [{**SEQUENCE, **(sequence or {})}], **fields,
    } if case is None else case)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "a case is JSON"),
    ("[]", "an object with schema"),
    (case_text(schema=2), "a case of schema 2; this version reads 1"),
    (case_text(x=1), "no field 'x'"),
    (case_text(case={"schema": 1, "sequences": [SEQUENCE]}), "`call` of a case must be an object"),
    (case_text(case={"schema": 1, "call": {"provider": "p"}, "sequences": []}), "needs 'spec'"),
    (case_text(sequences={}), "`sequences` of a case must be a list"),
    (case_text(sequences=[]), "needs a sequence at least"),
    (case_text(call={"provider": 1}), "'provider' of a call cannot be 1"),
    (case_text(call={"nope": 1}), "no field 'nope'"),
    (case_text(call={"causal": 1}), "'causal' of a call cannot be 1"),
    (case_text(call={"softcap": float("nan")}), "'softcap' of a call cannot be nan"),
    (case_text(call={"spec": "windw"}), "did you mean 'window'"),
    (case_text(call={"params": {"window": 0}}), "window=0 is outside 1"),
    (case_text(call={"params": {"window": True}}), "'params' of a call cannot be"),
    (case_text(call={"params": {"window": 4, "sink": 4}}), "no parameter 'sink'"),
    (case_text(call={"params": {}}), "no value for window"),
    (case_text(sequence={"seqlen_q": -1}), "seqlen_q of sequence 0 cannot be -1"),
    (case_text(sequence={"tables": []}), "tables of sequence 0 must be an object"),
    (case_text(sequence={"more": 1}), "sequence 0 must have seqlen_q, seqlen_k and tables"),
    (case_text(sequence={"tables": {"ranges": []}}), "sequence 0: has no use for the table ranges"),
    (case_text(sequence={"tables": {"ranges": "x"}}), "ranges of sequence 0 holds 'x'"),
    (case_text(call={"spec": "rswa"}), "sequence 0: lacks the table prefix_lens"),
    (case_text(call={"spec": "rswa"}, sequence={"tables": {"prefix_lens": -1}}), "must satisfy"),
    (case_text(call={"spec": "rswa"}, sequence={"tables": {"prefix_lens": [1]}}), "is a number"),
    (case_text(call={"spec": "mm_prefix"}, sequence={"tables": {"ranges": [1, 2]}}), "2 deep"),
    (case_text(call={"spec": "mm_prefix"}, sequence={"tables": {"ranges": [[1, 2, 3]]}}), "shape"),
])
def test_a_case_that_is_not_one_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(CaseError, match=message) as error:
        from_text(text)
    assert "\n" not in str(error.value)


def test_facts_of_tables_are_checked() -> None:
    def text(*ranges: list[int]) -> str:
        return case_text(call={"spec": "mm_prefix"}, sequence={"tables": {"ranges": list(ranges)}})

    with pytest.raises(CaseError, match="sequence 0: ranges must satisfy"):
        from_text(text([0, 3], [2, 5]))
    good = from_text(text([0, 3], [4, 5], [-1, -1]))
    assert from_text(canonical(good)) == good


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the findings of a known-bad twin."""
    found = tmp_path_factory.mktemp("found") / "with space"
    arguments = [*CPU, "--target", "known-bad/chunk-local-q", "--launches", "2", "--seed", "3",
                 "--findings", str(found), "--json", str(found.parent / "summary.json")]
    assert command.main(arguments) == 1
    return found


def test_a_finding_says_all_that_is_needed(folder: Path) -> None:
    for path in folder.glob("finding-*.json"):
        found = load(path)
        assert path == file_of(folder, found["fingerprint"])
        assert found["kind"] in ("leak", "loss") and found["seed"] == 3 and found["shrunk"]
        assert {"case", "spec", "expected", "got", "picture", "wrong", "versions", "device",
                "backend", "region", "path", "replay", "script", "launch"} <= found.keys()
        assert found["diagnosis"]["verdict"] == "PROVED"
        assert "chunk-local q" in found["diagnosis"]["sentence"]
        assert found["versions"]["flash-attn-4"][0].isdigit()
    assert {path.name for path in folder.iterdir()} - {"state"} == {
        path.name for path in folder.glob("finding-*.json")}


def test_the_summary_counts_everything(folder: Path) -> None:
    said = json.loads((folder.parent / "summary.json").read_text())
    assert said["run"]["launches"] == 2 and said["ended"] == "all launches are done"
    assert {one["fingerprint"] for one in said["findings"]} == {
        load(path)["fingerprint"] for path in folder.glob("finding-*.json")}
    assert all(one["seen"] >= 1 for one in said["findings"])
    (classes,) = said["totals"]["classes"].values()
    assert sum(classes.values()) > 0


def test_a_finding_replays_from_its_shell_line_and_from_its_script(folder: Path) -> None:
    found = load(next(folder.glob("finding-*.json")))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/bin"}
    lines = [found["replay"], found["script"]]
    assert str(folder) in shlex.split(lines[0])[-1]
    started = [subprocess.Popen(line, shell=True, env=env, text=True, stdout=subprocess.PIPE)
               for line in lines]
    for process in started:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "there again" in out and "+" in out and "chunk-local q" in out


def test_a_fault_that_is_mended_is_gone(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = load(next(folder.glob("finding-*.json")))
    call = {**found["case"]["call"], "mask_mod": "maskproof/mm_prefix[no-window]"}
    mended = tmp_path / "finding-mended.json"
    mended.write_text(json.dumps({**found, "case": {**found["case"], "call": call}}))
    assert replay.main([str(mended)]) == 0
    assert ": gone" in capsys.readouterr().out
    assert replay.main([str(mended), "--provider", "nobody"]) == 2
    assert "write upstream, or a release" in said(capsys, "fuzz.replay")
    call["mask_mod"] = "maskproof/none"
    mended.write_text(json.dumps({**found, "case": {**found["case"], "call": call}}))
    assert replay.main([str(mended)]) == 3
    assert "no target 'maskproof/none' here" in said(capsys, "fuzz.replay")


@pytest.mark.parametrize(("change", "text"), [
    ("cut", "not a finding: "), ("list", "not a finding"), ("schema", "a finding of schema 7"),
    ("kind", "a finding without 'kind'"), ("case", "a bad case or source: a case of schema 9"),
    ("source", "a bad case or source"), ("none", "No such file or directory"),
])
def test_a_finding_that_is_none_is_one_line(
    change: str, text: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = next(folder.glob("finding-*.json")).read_text()
    whole = json.loads(source)
    changed = {
        "cut": source[:300], "list": "[]", "schema": json.dumps({**whole, "schema": 7}),
        "kind": json.dumps({k: v for k, v in whole.items() if k != "kind"}),
        "case": json.dumps({**whole, "case": {"schema": 9}}),
        "source": json.dumps({**whole, "source": {"nowhere": 1}}),
    }
    path = tmp_path / "finding-x.json"
    if change in changed:
        path.write_text(changed[change])
    with pytest.raises(FindingError):
        load(path)
    assert replay.main([str(path)]) == 2
    line = said(capsys, "fuzz.replay")
    assert text in line and line.startswith(f"fuzz.replay: {path}: ")
    if change in changed:  # a folder that holds it cannot be resumed
        assert command.main([*CPU, "--findings", str(tmp_path), "--launches", "1"]) == 3
        assert text in said(capsys, "fuzz.run")


def test_regions_name_the_parts_of_the_formula() -> None:
    rule = mask("mm_prefix")
    at = pack(rule, [Sequence(seqlen_q=4, seqlen_k=8, tables={"ranges": ((2, 5),)})])
    places = {(0, 0): "inside causal term, outside window term and range term",
              (0, 4): "inside causal term and window term and range term",
              (0, 5): "inside window term and range term, outside causal term",
              (3, -1): "whole rows"}
    cells = {"b": np.zeros(5, int), "h": np.zeros(5, int),
             "q_idx": np.array([q for q, _ in places] + [0]),
             "kv_idx": np.array([kv for _, kv in places] + [0])}
    cells["b"][-1] = -1
    found = regions(rule, {"window": 2}, at, cells)
    assert found == [*places.values(), "behind the last row"]
    assert regions(mask("full"), {}, at, cells)[0] == "full"


def test_stop_on_first_looks_for_a_new_one(folder: Path, tmp_path: Path) -> None:
    """A folder that holds findings does not end a campaign before it began."""
    for path in folder.glob("finding-*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    summary = tmp_path / "summary.json"
    assert command.main([*CPU, "--stop-on-first", "--launches", "5", "--findings", str(tmp_path),
                         "--json", str(summary)]) == 1
    assert json.loads(summary.read_text())["run"]["launches"] == 5


def test_workers_share_the_launches(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    assert command.main([*CPU, "--workers", "2", "--launches", "20", "--findings",
                         str(tmp_path / "f"), "--json", str(summary)]) == 0
    said = json.loads(summary.read_text())
    assert said["run"]["launches"] == 20 and said["run"]["kernels"] > 5


def test_a_fingerprint_is_provider_path_kind_and_region() -> None:
    plain = Call(provider="upstream", spec="causal", mask_mod="m")
    paths = {path_of(call, "gpu") for call in (
        plain, Call(provider="upstream", spec="causal", mask_mod="m", causal=True),
        Call(provider="upstream", spec="causal", mask_mod="m", window_size_left=-1),
        Call(provider="upstream", spec="causal", mask_mod="m", window_size_left=5),
        Call(provider="upstream", spec="causal", mask_mod="m", arch="sm_80"),
    )}
    assert len(paths) == 5
    assert path_of(plain, "gpu") == path_of(
        Call(provider="upstream", spec="causal", mask_mod="m", q_heads=4, page_size=16), "gpu")
    base = ("upstream", "p", "leak", "r")
    signatures = [Signature(*base), *(Signature(*base[:i], "x", *base[i + 1:]) for i in range(4))]
    assert len({one.fingerprint for one in signatures}) == 5
    assert Signature(*base) == Signature(*base)


def test_calls_outside_what_the_cpu_runs_are_refused_with_a_reason() -> None:
    backend = CpuBackend({target.target: target for target in TARGETS})
    name = TARGETS[0].target
    reasons = [backend.refuses(Call(provider="upstream", spec="mm_prefix", **given)) for given in (
        {}, {"mask_mod": name, "causal": True}, {"mask_mod": name, "window_size_left": 0},
        {"mask_mod": "nothing"}, {"mask_mod": name})]
    assert [None if reason is None else reason.split(",")[0] for reason in reasons] == [
        "the call has no mask_mod", *["built-in flags are not part of a mask_mod and act on a GPU "
                                      "only"] * 2,
        f"no target 'nothing' here; there are {name.split(',')[0]}", None]


def test_times() -> None:
    times = {"60s": 60, "5m": 300, "8h": 28800, "2d": 172800, "90": 90, "1.5h": 5400}
    assert {text: duration(text) for text in times} == times


def test_a_process_knows_when_it_began() -> None:
    import time

    assert 0 < time.monotonic() - process_start() < 24 * 3600


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = {"launches": 3, "sequences": 4000, "cells": 2.5e9, "kernels": 2, "compile_seconds": 1.5,
           "run_seconds": 7, "skipped": {"why": 2}}
    at = Progress({}, now, 2.0, 1, "shrinking")
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", "300")
        Screen().progress(at)
        assert ("findings 1 | shrinking" in stream.getvalue()) is shown
        assert "\n" not in stream.getvalue()
    text = " | ".join(figures(now, 2.0))
    assert text == ("3 launches | 4k sequences (2k/s) | 2.5G cells (1.25G/s) | "
                    "compiled 2 kernels in 1.5 s | ran 7.0 s | of it the kernels 0.0 s | "
                    "skipped 2: why")


def test_where_z3_is_missing_diagnosis_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    targets = {target.target: target for target in TARGETS}
    assert Diagnoses(targets).of("maskproof/known-bad/chunk-local-q", 5) is None


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    compiler = {"__init__", "compiled", "gpu"}
    modules = sorted({path.stem for path in (ROOT / "fuzz").glob("*.py")} - compiler)
    assert len(modules) > 15
    code = (f"import sys\nfor name in {modules!r}: __import__('fuzz.' + name)\n"
            "print(*[name for name in ('z3', 'torch', 'cutlass') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert done.stdout.strip() == ""


def test_help_teaches() -> None:
    text = command.parser().format_help()
    for option in ("--backend", "--budget", "--vllm", "--provider", "--spec", "--seed",
                   "--launches", "--max-keys", "--arch", "--workers", "--stop-on-first",
                   "--findings", "--json", "exit status", "fuzz.replay"):
        assert option in text
    assert "exit status" in replay.parser().format_help()


def test_an_interrupt_is_raised_before_a_campaign_and_noted_in_it() -> None:
    interrupt = command.Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt(2, None)
    assert interrupt.came
    during = command.Interrupt(noted=True)
    during(2, None)
    assert during.came
