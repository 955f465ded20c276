"""The test that a refutation prints: it fails today, and passes on the repaired code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proofs.replay import ReplayError, visible
from spec.check import main
from tests import faulty_mask_mods as module
from tests.faulty_mask_mods import FAULTS, Fault

FILE = Path(module.__file__)
ROOT = FILE.parent.parent
CELL = {"b": 0, "h": 0, "q_idx": 1, "kv_idx": 1, "seqlen_q": 2, "seqlen_k": 2, "offset_q": 0,
        "offset_k": 0}


def chosen(name: str, part: str = "") -> Fault:
    return next(f for f in FAULTS if f.name == name and part in str(f.call))


def pasted(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The printed test, as a person copies it."""
    assert main(arguments) == 1
    _, text = capsys.readouterr().out.split("a test that fails today:\n", 1)
    lines = text.strip("\n").splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("    assert visible"))
    return "\n".join(lines[:end + 1]) + "\n"


def outcome(folder: Path, text: str) -> str:
    """The last line of pytest on `text`, in a process of its own."""
    file = folder / "test_pasted.py"
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore",
               "--rootdir", str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip().splitlines()[-1]


def test_the_printed_test_fails_and_passes_when_the_code_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(FILE.read_text().replace("__file__", "''"))
    text = pasted(capsys, [f"{mine}::causal_strict", "--against", "causal"])
    assert outcome(tmp_path, text).startswith("1 failed")
    mine.write_text(mine.read_text().replace("kv_idx[0] < q_idx[0]", "kv_idx[0] <= q_idx[0]"))
    assert outcome(tmp_path, text).startswith("1 passed")


@pytest.mark.parametrize("fault", [
    chosen("window", "off by one"), chosen("packed_window", "one lane"),
    chosen("packed_window", "last vector"), chosen("causal_of_other_heads"),
    chosen("causal_of_other_sequences"), chosen("prefix_of_the_first"),
    chosen("rswa_without_prefix"), chosen("document_local"),
], ids=lambda f: " ".join((f.name, *f.call)))
def test_a_printed_test_of_every_kind_fails(
    fault: Fault, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {}
    exec(pasted(capsys, fault.arguments), namespace)
    (test,) = [value for name, value in namespace.items() if name.startswith("test_")]
    assert callable(test)
    with pytest.raises(AssertionError):
        test()


def test_a_printed_test_knows_the_tables_of_a_spec_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "groups.toml"
    spec.write_text('name = "groups"\nmask = "group[kv] == wanted[b] or kv == 0"\n'
                    'tables.group = {dims = "seqlen_k"}\ntables.wanted = {dims = "num_seqs"}\n')
    target = [f"{FILE}::groups", "--against", str(spec), "--aux", "group,wanted"]
    namespace: dict[str, object] = {}
    exec(pasted(capsys, target), namespace)
    (test,) = [value for name, value in namespace.items() if name.startswith("test_")]
    assert callable(test)
    with pytest.raises(AssertionError):
        test()


def test_one_cell_of_real_code_can_be_asked_for() -> None:
    target = f"{FILE}::causal"
    assert visible(target, against="causal", cell=CELL, tables={})
    assert not visible(target, against="causal", cell={**CELL, "q_idx": 0}, tables={})
    packed = {"target": f"{FILE}::packed_window", "call": ["window_size=@window"]}
    cell = {**CELL, "window": 1}
    assert visible(**packed, against="window", cell=cell, tables={})
    assert not visible(**packed, against="window", cell={**cell, "kv_idx": 0}, tables={})


def test_a_known_bad_twin_can_be_asked_for() -> None:
    cell = {**CELL, "kv_idx": 0, "window": 1}
    tables = {"query_ranges": [[-1, -1], [-1, -1]], "cu_seqlens_q": [0, 2]}
    assert visible("maskproof/known-bad/no-window-term", cell=cell, tables=tables)
    assert not visible("maskproof/mm_prefix[window]", cell=cell, tables=tables)


def test_a_target_that_is_not_there_is_named() -> None:
    with pytest.raises(ReplayError, match="no target 'maskproof/nope'; there are maskproof/mm_pre"):
        visible("maskproof/nope", cell=CELL, tables={})


@pytest.mark.releases
def test_the_printed_test_of_a_release_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = pasted(capsys, ["--vllm", "0.24.0", "--layer", "mask_mod"])
    assert outcome(tmp_path, told).startswith("1 failed")
