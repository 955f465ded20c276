"""The command: exit codes, one clear line for what a person did wrong, and what it finds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec import check
from spec.check import main
from tests import faulty_mask_mods as module
from tests.faulty_mask_mods import FAULTS, Fault

FILE = module.__file__
CAUSAL = [f"{FILE}::causal", "--against", "causal"]
WINDOW = [f"{FILE}::window", "--against", "window"]
PREFIX = [f"{FILE}::prefix_lm", "--against", "prefix_lm"]


def results(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status and the rows by obligation."""
    file = tmp_path / "results.json"
    status = main([*arguments, "--json", str(file)])
    return status, {row["obligation"]: row for row in json.loads(file.read_text())["results"]}


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that exit status 2 comes with."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec.check: ") and err.count("\n") == 1 and "\x1b" not in err
    return err


BAD = {
    "no such file": (["nosuch.py::mask", "--against", "causal"], "nosuch.py: no such file"),
    "not Python": ([f"{__file__[:-3]}::mask", "--against", "causal"], "no such file"),
    "a folder": ([f"{Path(FILE).parent}::mask", "--against", "causal"], "not a Python file"),
    "no name": ([FILE, "--against", "causal"], "a target is path/to/file.py::name"),
    "no such factory": ([f"{FILE}::causl", *CAUSAL[1:]], "did you mean causal"),
    "no such module": (["nosuch.module:mask", *CAUSAL[1:]], "no module named 'nosuch'"),
    "no such attribute": (["json:mask", *CAUSAL[1:]], "no function 'mask'"),
    "not a function": ([f"{FILE}::NUMBER", *CAUSAL[1:]], "NUMBER is int, not a function"),
    "a factory that raises": ([f"{FILE}::broken", *CAUSAL[1:]],
                              "the factory raised ValueError: no window of 4"),
    "a factory of nothing": ([f"{FILE}::nothing", *CAUSAL[1:]], "returned NoneType, not a mask"),
    "another signature": ([f"{FILE}::flex", *CAUSAL[1:]],
                          "is a FlexAttention mask_mod, not FA4's: FA4 calls mask_mod(batch_idx"),
    "a factory without its argument": (WINDOW, "needs window_size: --call window_size=VALUE"),
    "a branch on a symbol": (
        [f"{FILE}::branching", *WINDOW[1:], "--call", "window_size=@window"],
        "Cannot use a Runtime value",
    ),
    "no spec": (CAUSAL[:1], "--against MASK"),
    "an unknown spec": ([CAUSAL[0], "--against", "causall"], "did you mean 'causal'?"),
    "an unknown part": ([CAUSAL[0], "--against", "causal & nope"], "no mask 'nope'"),
    "a composition that does not parse": ([CAUSAL[0], "--against", "causal & ("],
                                          "cannot parse 'causal & ('"),
    "a composition of comparisons": ([CAUSAL[0], "--against", "kv <= q & kv < 3"], "parentheses"),
    "a number as a mask": ([CAUSAL[0], "--against", "kv + 1"], "True or False is needed"),
    "an unknown name in a mask": ([CAUSAL[0], "--against", "kv <= reach"], "`reach` is neither"),
    "no such spec file": ([CAUSAL[0], "--against", "nosuch.toml"], "nosuch.toml: No such file"),
    "an unknown parameter": ([*WINDOW, "--bind", "sink=3"], "window has no parameter 'sink'"),
    "a binding out of range": ([*WINDOW, "--bind", "window=0"], "window=0 is outside 1 .. 214748"),
    "a binding beyond int32": ([*WINDOW, "--bind", "window=2147483648"], "is outside"),
    "no number": ([*WINDOW, "--bind", "window=wide"], "write window=NUMBER"),
    "hardly a number": ([*WINDOW, "--bind", "window=--5"], "write window=NUMBER"),
    "no binding": ([*WINDOW, "--bind", "window"], "write window=NUMBER"),
    "bound twice": ([*WINDOW, "--bind", "window=4", "--bind", "window=5"], "window is given twice"),
    "an unknown argument": ([*WINDOW, "--call", "window=4"], "window(window_size, fault) takes no"),
    "an argument twice": ([*WINDOW, *["--call", "window_size=4"] * 2], "is given twice"),
    "no argument": ([*WINDOW, "--call", "window_size"], "write name=value"),
    "a list as argument": ([*WINDOW, "--call", "window_size=[4]"], "a value is an int"),
    "an unknown symbol": ([*WINDOW, "--call", "window_size=@reach"],
                          "window has no such parameter; it has @window"),
    "a symbol of another spec": ([*WINDOW, "--call", "window_size=@chunk"], "it has @window"),
    "a coordinate as symbol": ([*WINDOW, "--call", "window_size=@seqlen_k"], "it has @window"),
    "an unknown table": ([*PREFIX, "--aux", "prefixes"],
                         "there are cu_seqlens_q, document_ids, dynamic_causal, prefix_lens, "
                         "query_ranges, ranges\n"),
    "an unknown table of a mask with a parameter": (
        [*WINDOW, "--aux", "windows"], "; a tensor of one element may hold window\n"),
    "no number of ranges": ([CAUSAL[0], "--against", "mm_prefix"], "--bind num_ranges=2"),
    "a release as target": (["0.33.0"], "a release of vLLM is --vllm 0.33.0"),
    "a tag as target": (["v0.33.0", *CAUSAL[1:]], "--vllm 0.33.0"),
    "a wheel as target": (["vllm-0.33.0.whl"], "--vllm vllm-0.33.0.whl"),
    "a folder as target": ([str(Path(FILE).parent)], "a source tree of vLLM is --vllm /"),
    "a table twice": ([*PREFIX, "--aux", "prefix_lens,prefix_lens"], "prefix_lens is given twice"),
    "a target twice": ([CAUSAL[0], *CAUSAL], "is given twice"),
    "a target and a release": ([*CAUSAL, "--vllm", "0.33.0"], "not both"),
    "a spec without a target": (["--against", "causal"], "--against needs a target"),
    "tables without a target": (["--aux", "ranges"], "--aux needs a target"),
    "a binding without a target": (["--bind", "window=4"], "--bind needs a target"),
    "an FA4 without a release": (["--fa4", "."], "--fa4 needs --vllm"),
    "a layer": (["--layer", "kernel"], "invalid choice: 'kernel'"),
    "no steps": (["--rlimit", "0"], "'0' is not a whole number above 0"),
    "no time": (["--timeout", "soon"], "'soon' is not a whole number above 0"),
    "an unknown option": (["--quick"], "unrecognized arguments: --quick"),
    "part of an option": (["--rlim", "5"], "unrecognized arguments"),
    "a JSON file in no folder": (["--json", "/no/such/folder/x.json"], "No such file or directory"),
    "a JSON file that is a folder": (["--json", "."], "Is a directory"),
    "a JUnit file that is a folder": (["--junit", "."], "Is a directory"),
    "a query folder that is a file": (["--smtlib", __file__], "File exists"),
    "no such wheel": (["--vllm", "nosuch.whl"], "no such file: nosuch.whl"),
    "no vLLM": (["--vllm", str(Path(FILE).parent)], "has no vllm/v1/attention/backends"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_usage_is_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = BAD[what]
    assert words in refused(capsys, *arguments)


def test_a_corrupt_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = written(tmp_path, "vllm-0.33.0-cp38-abi3-manylinux1_x86_64.whl", "no zip")
    assert "is not a sound wheel" in refused(capsys, "--vllm", wheel)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "not a TOML file"),
        ('name = "mine"', "lacks 'mask'"),
        ('name = "mine"\nmask = "causal & ("', "cannot parse"),
        ('name = "mine"\nmask = "kv <= reach"', "`reach` is neither"),
        ('name = "mine"\nmask = "causal"\nassume = ["q <"]', "cannot parse"),
        ('name = "mine"\nmask = "causal"\nparams.reach = {low = 5, high = 1}', "low <= high"),
        ('name = "mine"\nmask = "causal"\ncolour = "red"', "unknown key 'colour'"),
    ],
)
def test_a_bad_spec_file_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "mine.toml", text)
    said = refused(capsys, CAUSAL[0], "--against", file)
    assert words in said and "mine.toml" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nosuch_module", "importing it raised ModuleNotFoundError"),
        ("def f(:", "SyntaxError: line 1"),
        ("raise SystemExit(7)", "SystemExit"),
    ],
)
def test_a_file_that_does_not_import_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "mine.py", text)
    assert words in refused(capsys, f"{file}::mask", "--against", "causal")


def test_a_bad_name_shows_no_traceback_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spec.check", "nosuch.py::x", "--against", "causal"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(FILE).parent.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spec.check: nosuch.py: no such file\n"


@pytest.mark.releases
@pytest.mark.parametrize(("version", "words"), [
    ("0.0.0.1", "finds no wheel of vllm 0.0.0.1"),
    ("0.11.0", "has no factory of a mask_mod"),
])
def test_a_version_without_mask_mods_is_one_line(
    version: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, "--vllm", version)


UNSUPPORTED = {
    "floats": "llvm.sitofp: not in the vocabulary",
    "endless": "llvm.add: a loop whose number of turns is not a constant",
    "assembly": "llvm.inline_asm: assembly 'popc.b32 $0, $1;' is not in the vocabulary",
    "of_the_launch": "seqlen_info.seqlen_k_padded: not modelled",
    "of_the_thread": "nvvm.read.ptx.sreg.tid.x: not in the vocabulary",
    "writing": "llvm.store: writes to an aux tensor",
    "raising": "ValueError: not today",
    "prefix_lm": "no aux tensor was given",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_no_proof_can_be_made_about_is_unsupported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aux = ["--aux", "prefix_lens"] if name == "writing" else []
    status, found = results(tmp_path, f"{FILE}::{name}", "--against", "causal", *aux)
    row = found["equals-spec"]
    assert (status, row["verdict"]) == (3, "UNSUPPORTED")
    assert UNSUPPORTED[name] in row["reason"] and "\n" not in row["reason"]
    assert "llvm." not in row["reason"] or re.match(r"(near )?\w+\.py:\d+: ", row["reason"])
    assert row["reason"] in capsys.readouterr().out


def test_too_few_tables_are_unsupported(tmp_path: Path) -> None:
    target = [f"{FILE}::rswa_without_prefix", "--against", "rswa", "--aux", "prefix_lens"]
    status, found = results(tmp_path, *target)
    assert (status, found["equals-spec"]["verdict"]) == (3, "UNSUPPORTED")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: " ".join((f.name, *f.call)))
def test_a_usual_fault_is_refuted_and_named(fault: Fault, tmp_path: Path) -> None:
    status, found = results(tmp_path, *fault.arguments)
    row = found["equals-spec"]
    assert (status, row["verdict"], row["expected"]) == (1, "REFUTED", "PROVED")
    assert row["witness"] is not None
    if fault.diagnosis is None:
        assert row["diagnosis"] is None
    else:
        assert fault.diagnosis in row["diagnosis"]["sentence"]
        assert row["diagnosis"]["verdict"] == "PROVED"


def test_an_overflow_within_reach_of_a_long_context_is_a_fault(tmp_path: Path) -> None:
    status, found = results(tmp_path, f"{FILE}::causal_scaled", *CAUSAL[1:])
    verdicts = {name: row["verdict"] for name, row in found.items()}
    assert (status, verdicts) == (1, {"equals-spec": "UNKNOWN", "no-overflow": "REFUTED"})


def test_a_spec_may_bound_the_lengths_and_so_the_overflow(tmp_path: Path) -> None:
    short = written(tmp_path, "short.toml",
                    'name = "short"\nmask = "causal"\n'
                    'assume = ["seqlen_k <= 8192", "seqlen_q <= 8192"]')
    status, found = results(tmp_path, f"{FILE}::causal_scaled", "--against", short)
    assert status == 0 and "seqlen_k <= 8192" in found["no-overflow"]["assumptions"]


def test_a_read_of_the_next_row_is_out_of_bounds(tmp_path: Path) -> None:
    fault = next(f for f in FAULTS if f.name == "prefix_of_the_next")
    _, found = results(tmp_path, *fault.arguments)
    assert found["reads-in-bounds"]["verdict"] == "REFUTED"


SOUND = {
    "a mask_mod": (CAUSAL, "N = 2147483392"),
    "a composition": ([CAUSAL[0], "--against", "full & (kv <= q)"], "N = 2147483392"),
    "a symbol": ([*WINDOW, "--call", "window_size=@window"], "window symbolic"),
    "a number on both sides": ([*WINDOW, "--call", "window_size=5", "--bind", "window=5"],
                               "window=5"),
    "a number for the spec alone": (
        [*WINDOW, "--call", "window_size=@window", "--bind", "window=5"], "window=5"),
    "the largest window": ([WINDOW[0], "--call", "window_size=2147483647", *CAUSAL[1:]], "N ="),
    "packed": ([f"{FILE}::packed_window", *WINDOW[1:], "--call", "window_size=@window"],
               "32 keys a call"),
    "tables": ([*PREFIX, "--aux", "prefix_lens"], "N ="),
    "chunks": ([f"{FILE}::chunked", "--call", "chunk=@chunk", "--against",
                "q // chunk == kv // chunk"], "chunk symbolic"),
    "a module": (["tests.faulty_mask_mods:causal", *CAUSAL[1:]], "N ="),
}


@pytest.mark.parametrize("what", SOUND)
def test_sound_code_is_proved_with_its_bounds(what: str, tmp_path: Path) -> None:
    arguments, bounds = SOUND[what]
    status, found = results(tmp_path, *arguments)
    assert status == 0
    assert {row["verdict"] for row in found.values()} == {"PROVED"}
    assert bounds in found["equals-spec"]["bounds"]
    assert all(row["mutants"]["total"] > 0 for row in found.values())


GROUPS = """
name = "groups"
mask = "group[kv] == wanted[b]"
tables.group = {dims = "seqlen_k"}
tables.wanted = {dims = "num_seqs"}
"""


def test_a_mask_with_tables_of_its_own(tmp_path: Path) -> None:
    spec = written(tmp_path, "groups.toml", GROUPS)
    right = results(tmp_path, f"{FILE}::groups", "--against", spec, "--aux", "group,wanted")
    assert right[0] == 0 and "reads-in-bounds" in right[1]
    wrong = results(tmp_path, f"{FILE}::groups", "--against", spec, "--aux", "wanted,group")
    assert wrong[0] == 1 and wrong[1]["equals-spec"]["verdict"] == "REFUTED"


def test_numbers_that_differ_between_code_and_spec_are_a_fault(tmp_path: Path) -> None:
    status, found = results(tmp_path, *WINDOW, "--call", "window_size=5", "--bind", "window=7")
    assert status == 1
    assert found["equals-spec"]["diagnosis"]["sentence"] == "equals window with window = 5"


@pytest.mark.parametrize(("text", "verdict", "status"), [
    ('assume = ["seqlen_k <= 0"]', "VACUOUS", 3),
    ('assume = ["kv < 5 and 5 < kv"]', "VACUOUS", 3),
    ('assume = ["kv < 5"]', "PROVED", 0),
])
def test_contradictory_assumptions_prove_nothing(
    text: str, verdict: str, status: int, tmp_path: Path
) -> None:
    spec = written(tmp_path, "mine.toml", f'name = "mine"\nmask = "causal"\n{text}')
    got, found = results(tmp_path, CAUSAL[0], "--against", spec)
    assert (got, found["equals-spec"]["verdict"]) == (status, verdict)


OWN = {
    "a parameter in a tensor": (
        'name = "strided"\nmask = "causal & ((q - kv) % step == 0)"\n'
        "params.step = {low = 1, high = 64}", "strided", "step"),
    "a table by a name of the catalogue": (
        'name = "by_batch"\nmask = "document_ids[b, q] == document_ids[b, kv]"\n'
        'assume = ["seqlen_q <= seqlen_k"]\n'
        'tables.document_ids = {dims = "num_seqs, seqlen_k"}', "document_of_batch", "document_ids"),
}


@pytest.mark.parametrize("what", OWN)
def test_names_of_ones_own_in_aux_tensors(what: str, tmp_path: Path) -> None:
    text, name, aux = OWN[what]
    spec = written(tmp_path, "mine.toml", text)
    status, found = results(tmp_path, f"{FILE}::{name}", "--against", spec, "--aux", aux)
    assert (status, {row["verdict"] for row in found.values()}) == (0, {"PROVED"})


def test_contradictory_facts_of_a_table_prove_nothing(tmp_path: Path) -> None:
    spec = written(tmp_path, "mine.toml",
                   'name = "mine"\nmask = "kv <= q or flag[b] == 0"\n'
                   'tables.flag = {dims = "num_seqs", facts = ["flag[b] < 0", "0 < flag[b]"]}')
    status, found = results(tmp_path, CAUSAL[0], "--against", spec)
    assert (status, {row["verdict"] for row in found.values()}) == (3, {"VACUOUS"})


def test_names_of_the_proofs_are_free_for_a_spec(tmp_path: Path) -> None:
    spec = written(tmp_path, "mine.toml", 'name = "mine"\nmask = "kv <= q + N - N"\n'
                                          "params.N = {low = 1, high = 5}")
    status, found = results(tmp_path, CAUSAL[0], "--against", spec)
    assert status == 0 and "N = 2147483392" in found["equals-spec"]["bounds"]


def test_a_starved_solver_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert main(["--rlimit", "1", "--json", str(file)]) == 3
    assert {row["verdict"] for row in json.loads(file.read_text())["results"]} == {"UNKNOWN"}


def test_a_solver_that_gives_up_on_a_mutant_is_not_at_fault(tmp_path: Path) -> None:
    arguments, _ = SOUND["chunks"]
    status, found = results(tmp_path, *arguments, "--rlimit", "2000")
    row = found["equals-spec"]
    assert (status, row["verdict"]) == (3, "UNKNOWN")
    assert "gave up" in row["reason"] or "limit" in row["reason"]


def test_a_twin_that_is_proved_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from kernels import mask_mods

    good = next(t for t in mask_mods.TARGETS if t.target.endswith("rswa"))
    twin = replace(good, target="maskproof/known-bad/rswa", expected={"equals-spec": "REFUTED"})
    monkeypatch.setattr(mask_mods, "TARGETS", (twin,))
    assert main([]) == 1
    monkeypatch.setattr(mask_mods, "TARGETS", (good,))
    assert main([]) == 0


def test_fast_leaves_out_what_takes_long(tmp_path: Path) -> None:
    status, found = results(tmp_path, *PREFIX, "--aux", "prefix_lens", "--fast")
    assert status == 0 and set(found) == {"equals-spec", "no-overflow"}
    assert {row["replayed"] for row in found.values()} == {None}


def test_the_mask_mod_of_the_readme_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    [command] = re.findall(r"^python -m spec\.check (my_masks\.py.*)", text, re.M)
    written(tmp_path, "my_masks.py", code)
    monkeypatch.chdir(tmp_path)
    status, found = results(tmp_path, *command.split())
    assert (status, {row["verdict"] for row in found.values()}) == (0, {"PROVED"})


def test_a_mask_mod_of_counted_ranges_needs_no_number_where_it_is_given_rows() -> None:
    assert main([*CAUSAL[:1], "--against", "mm_prefix", "--aux", "query_ranges,cu_seqlens_q"]) == 1


LISTING = """
import sys
from spec.check import main
status = main(["--list"])
assert not {"torch", "z3", "cutlass", "numpy"} & sys.modules.keys(), sorted(sys.modules)
sys.exit(status)
"""


def test_the_list_needs_no_compiler_and_no_solver() -> None:
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("maskproof/mm_prefix[window]", "known bad", "sink_window"):
        assert name in done.stdout
    bad = [line for line in done.stdout.splitlines() if line.endswith("known bad")]
    assert len({line.index("known bad") for line in bad}) == len({*map(len, bad)}) == 1


def test_an_empty_cache_is_listed_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kernels.release.cached", lambda: [])
    assert main(["--list"]) == 0
    assert "--vllm VERSION):\n  none\nmasks" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "names"), [
    ("ranges", ("ranges",)),
    ("query_ranges, cu_seqlens_q", ("query_ranges", "cu_seqlens_q")),
    ("ranges[b, i, 2],window[1]", ("ranges", "window")),
])
def test_tables_are_named_with_or_without_their_shape(text: str, names: tuple[str, ...]) -> None:
    assert check._names(text) == names
