"""Whatever a launch does to its child, the campaign goes on; whatever ends it, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split

import cutlass.cute as cute
import numpy as np
import pytest

from fuzz import investigate
from fuzz import run as command
from fuzz.backends import CpuBackend, Refused, guarded
from fuzz.case import Sequence
from fuzz.findings import stored
from fuzz.loop import Loop, campaign_key
from fuzz.replay import replay
from fuzz.sequences import Sequences, pack
from fuzz.state import COMPACT, State, StateError, merge, open_state
from fuzz.targets import Source
from fuzz.worker import CRASH, HANG, SKIP, Deadlines, Failure, Worker
from kernels.fa4 import Call
from spec.masks import mask
from tests.mask_mods_under_test import answer
from tests.test_fuzz_shrink import campaign

HERE = str(Path(__file__).resolve())
ROOT = Path(__file__).resolve().parent.parent
CAUSAL = Call(provider="upstream", spec="causal")


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] <= q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q))


@cute.jit
def endless(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    total = q_idx[0]
    while total != kv_idx[0]:
        total = total ^ 2
    return answer(total > 0)


@cute.jit
def wild(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    # In a table of less than a page, 1024 elements on is in the page that ends the process.
    return answer(aux_tensors[0][q_idx[0] // 6 * 1024] > -2)


@cute.jit
def untraceable(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    raise ValueError("not today")


class Planted(CpuBackend):
    """A back end that misbehaves on a launch whose first sequence has so many queries."""

    def check(self, call, sequences: Sequences, announce):
        announce("run")
        match int(sequences.seqlen_q[0]):
            case 1:
                os._exit(3)
            case 2:
                raise ZeroDivisionError("by\nnothing")
            case 3:
                raise Refused("not a call for me")
            case 4:
                time.sleep(60)
            case 5:
                os.kill(os.getpid(), signal.SIGKILL)
            case 6:
                announce("compile")
                time.sleep(60)
        return super().check(call, sequences, announce)


def lengths(queries: int) -> Sequences:
    return pack(mask("causal"), [Sequence(seqlen_q=queries, seqlen_k=9)])


@pytest.mark.parametrize(("queries", "kind", "text", "died"), [
    (1, CRASH, "ended early, with status 3", True),
    (2, CRASH, "ZeroDivisionError: by nothing", False),
    (3, SKIP, "not a call for me", False),
    (4, HANG, "did not end within 0.5 s", True),
    (5, CRASH, "SIGKILL", True),
    (6, HANG, "did not end within 0.3 s", True),
])
def test_what_ends_a_child_is_a_failure_here(
    queries: int, kind: str, text: str, died: bool
) -> None:
    worker = Worker(Planted({}), Deadlines(compile=0.3, run=0.5))
    found = worker.run(CAUSAL, lengths(queries))
    assert isinstance(found, Failure) and (found.kind, found.died) == (kind, died)
    assert text in found.text
    assert (worker.pid == 0) is died
    assert isinstance(worker.run(CAUSAL, lengths(3)), Failure)  # and the next one is served
    worker.stop()


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_table_ends_where_its_memory_does() -> None:
    table = np.arange(15, dtype=np.int32).reshape(5, 3)
    for at_end in (True, False):
        copy = guarded(table, at_end=at_end)
        assert np.array_equal(copy, table)
        edge = copy.ctypes.data + (table.nbytes if at_end else 0)
        assert edge % 4096 == 0


def planted(folder: Path, *names: str, **options: object):
    source = Source(targets=tuple(f"{HERE}::{name}" for name in names), against="prefix_lm",
                    aux=("prefix_lens",))
    return campaign(folder, source, **options)


def test_a_hang_and_a_crash_are_findings_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(investigate, "QUICK", 0.4)
    monkeypatch.setattr(investigate, "SHRINKING", 2.5)
    began = time.monotonic()
    with planted(tmp_path, "endless", "wild", "causal", launches=3, seconds=40,
                 deadlines=Deadlines(run=1)) as run:
        run.run()
    assert time.monotonic() - began < 45
    found = {one["path"].rpartition("::")[2].split()[0]: one for one in stored(tmp_path).values()
             if one["kind"] in (HANG, CRASH)}
    assert found["endless"]["kind"] == HANG and found["wild"]["kind"] == CRASH
    assert "SIGSEGV" in found["wild"]["text"] and "within" in found["endless"]["text"]
    assert len(found["wild"]["case"]["sequences"]) == 1
    # The other target ran, and was compared with prefix_lm, which it is not.
    assert run.now["cells"] > 0
    assert any("::causal" in one["path"] for one in stored(tmp_path).values())
    assert replay(found["wild"]).again


def test_code_that_cannot_be_traced_is_a_finding(tmp_path: Path) -> None:
    with planted(tmp_path, "untraceable", launches=2) as run:
        run.run()
    (found,) = stored(tmp_path).values()
    assert found["kind"] == CRASH and "not today" in found["text"]


def test_a_death_that_does_not_happen_again_is_a_fault_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = Worker.send, []

    def once(self: Worker, *launch: object) -> None:
        send(self, *launch)
        if not sent:
            os.kill(self.pid, signal.SIGKILL)
            sent.append(launch)

    monkeypatch.setattr(Worker, "send", once)
    with campaign(tmp_path, Source(), launches=3) as run:
        run.run()
    assert not stored(tmp_path)
    assert list(run.now["infrastructure"]) == [
        "crash (the child was ended by SIGKILL): it did not happen again"]


def test_the_same_fault_is_counted_and_not_stored_again(tmp_path: Path) -> None:
    name = "known-bad/chunk-local-q"
    with campaign(tmp_path, Source(), name, launches=6) as run:
        run.run()
    first = stored(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("finding-*")}
    with campaign(tmp_path, Source(), name, launches=6) as run:
        run.run()
        total = dict(run.state.totals["findings"])
    assert stored(tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert set(total) == set(first) and max(total.values()) >= 10


def test_a_finding_that_was_cut_off_before_it_was_small_is_looked_into_again(
    tmp_path: Path
) -> None:
    arguments = ["--backend", "cpu", "--target", "known-bad/no-window-term", "--launches", "6",
                 "--seed", "3", "--findings", str(tmp_path)]
    assert command.main(arguments) == 1
    (path,) = tmp_path.glob("finding-*.json")
    small = json.loads(path.read_text())
    path.write_text(json.dumps({**small, "shrunk": False, "case": {
        **small["case"], "sequences": [{"seqlen_q": 90, "seqlen_k": 90, "tables": {"ranges": []}}],
    }}))
    assert command.main(arguments) == 1
    again = json.loads(path.read_text())
    assert again["shrunk"] and again["case"] == small["case"]


def test_a_campaign_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes: list[object] = []
    begin = State.begin
    monkeypatch.setattr(State, "begin", lambda self, key, n, recipe: (
        recipes.append((n, recipe)), begin(self, key, n, recipe)))

    def ran(folder: Path, launches: int) -> dict[str, object]:
        with campaign(folder, Source(), launches=launches) as run:
            run.run()
            return json.loads(json.dumps(run.state.totals))

    whole = ran(tmp_path / "whole", 8)
    at_once, recipes[:] = list(recipes), []
    ran(tmp_path / "parts", 3)
    parts = ran(tmp_path / "parts", 5)
    assert recipes == at_once
    timeless = ("compile_seconds", "run_seconds", "kernel_seconds", "kernels")
    assert {k: v for k, v in parts.items() if k not in timeless} == {
        k: v for k, v in whole.items() if k not in timeless}


def cut_off(folder: Path, times: int) -> None:
    """Leaves the folder as campaigns do that end, all of a sudden, in their first launch."""
    with campaign(folder, Source()) as run:
        key = campaign_key(run.spaces, run.settings.seed, run.workers[0].backend)
        for _ in range(times):
            run.state.begin(key, 0, {})
            run.state.run(key, 0, wait=True)


def test_a_launch_that_was_cut_off_is_begun_again_first(tmp_path: Path) -> None:
    cut_off(tmp_path, 1)
    with campaign(tmp_path, Source(), launches=2) as run:
        assert [item["n"] for item in run.state.unfinished.values()] == [0]
        run.run()
        assert not run.state.unfinished and list(run.state.position.values()) == [2]


def test_a_launch_that_ends_the_campaign_twice_is_not_begun_again(tmp_path: Path) -> None:
    cut_off(tmp_path, 2)
    with campaign(tmp_path, Source(), launches=2) as run:
        run.run()
        assert list(run.now["infrastructure"]) == ["launch 0 ended the campaign 2 times"]
        assert not run.state.unfinished and list(run.state.position.values()) == [3]


def test_a_journal_may_end_anywhere(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    state.begin("k", 0, {})
    state.end("k", 0, {"launches": 1, "skipped": {"why": 2}})
    state.begin("k", 1, {})
    journal = state._journal()
    whole = journal.read_bytes()
    state.journal.close()
    state.lock.close()
    for cut in range(len(whole)):
        journal.write_bytes(whole[:cut])
        again = open_state(tmp_path)
        ended = whole[:cut].count(b'"end"') and whole[:cut].count(b"\n") >= 2
        assert again.totals == ({"launches": 1, "skipped": {"why": 2}} if ended else {})
        again.add({})  # what is written now is not glued to what was cut off
        again.journal.close()
        again.lock.close()
        assert all(json.loads(line) for line in journal.read_bytes().splitlines())


def test_a_long_journal_becomes_part_of_the_snapshot(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    for n in range(3):
        state.begin("k", n, "x" * (COMPACT // 2))
        state.end("k", n, {"launches": 1})
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 2 * COMPACT
    state.close()
    again = open_state(tmp_path)
    assert again.totals == {"launches": 3} and again.position == {"k": 3}
    again.close()


def test_one_campaign_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    with pytest.raises(StateError, match="another campaign"):
        open_state(tmp_path)
    state.close()
    open_state(tmp_path).close()


def test_sums_of_any_depth() -> None:
    total = {"a": 1, "b": {"c": 2}}
    merge(total, {"a": 2, "b": {"c": 1, "d": 5}, "e": {"f": 1}})
    assert total == {"a": 3, "b": {"c": 3, "d": 5}, "e": {"f": 1}}


def ends(folder: Path) -> int:
    """Launches that the journal says have ended."""
    return sum(path.read_bytes().count(b'{"end"') for path in (folder / "state").glob("journal-*"))


def until(holds, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fuzz.run", "--backend", "cpu", "--findings", str(folder),
            *options]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def test_kill_9_of_child_and_parent_loses_nothing(tmp_path: Path) -> None:
    parent = started(tmp_path, "--budget", "60s", "--seed", "5")
    until(lambda: ends(tmp_path) >= 3)
    for child in children(parent.pid):  # the one that runs launches, and the one that draws them
        os.kill(child, signal.SIGKILL)
    before = ends(tmp_path)
    until(lambda: ends(tmp_path) >= before + 3)
    left = children(parent.pid)
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(alive, left)), 5)
    lines = [json.loads(line) for path in (tmp_path / "state").glob("journal-*")
             for line in path.read_bytes().split(b"\n")[:-1]]
    ended = sum("end" in line for line in lines)
    resumed_and_interrupted(tmp_path, ended)


def resumed_and_interrupted(folder: Path, ended: int) -> None:
    """The next start goes on; and when it is interrupted, it sums up and leaves no child."""
    summary = folder / "summary.json"
    before = ends(folder)
    parent = started(folder, "--budget", "60s", "--json", str(summary))
    until(lambda: ends(folder) >= before + 2)
    left = children(parent.pid)
    parent.send_signal(signal.SIGINT)
    out, error = parent.communicate(timeout=10)
    assert parent.returncode == 0 and "interrupted after" in out and "no finding" in out
    assert error == "" and not any(map(alive, left))
    said = json.loads(summary.read_text())
    assert said["seed"] == 5
    assert said["totals"]["launches"] == ended + said["run"]["launches"] > ended
    assert sum(said["totals"]["infrastructure"].values()) == 1


def test_it_ends_soon_after_its_time_even_in_a_hang(tmp_path: Path) -> None:
    began = time.monotonic()
    parent = started(tmp_path, "--budget", "20s", "--deadline", "90", "--spec", "causal",
                     "--target", f"{HERE}::endless")
    # Well before the launch's own deadline; a busy machine takes its time to import.
    out, error = parent.communicate(timeout=60)
    assert time.monotonic() - began >= 20
    assert parent.returncode == 3 and "the time is over" in out
    assert error == "fuzz.run: no launch came to an end: the time is over\n"
    with campaign(tmp_path, Source(), launches=0) as run:
        assert isinstance(run, Loop)
        assert {one["times"] for one in run.state.unfinished.values()} == {0}
