"""Launches drawn by one process and run by another, several of them at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fuzz import drawing
from fuzz.backends import Announce, Broken, Capacity, CpuBackend, Outcome
from fuzz.diagnose import Diagnoses
from fuzz.drawing import CannotDraw, Drawers, Launch, Plan
from fuzz.findings import stored
from fuzz.investigate import Investigator
from fuzz.loop import Loop, Settings
from fuzz.recipe import from_json
from fuzz.sequences import Sequences
from fuzz.slots import Slots, TooLarge
from fuzz.state import StateError, Syncer, open_state
from fuzz.strategies import Space
from fuzz.targets import Source, call_of
from fuzz.worker import Failure, Worker
from kernels.fa4 import Call
from kernels.mask_mods import TARGETS
from spec.from_file import resolve

TARGET = next(target for target in TARGETS if target.target == "maskproof/mm_prefix[no-window]")
CALL = call_of(TARGET, "sm_90")
SPACE = Space(call=CALL, mask=resolve(TARGET.spec), constants=TARGET.constants, longest=60)
CAPACITY = Capacity(sequences=40, cells=2**16, each=2**12)


def some(count: int) -> Sequences:
    at = np.arange(count, dtype=np.int64)
    return Sequences(at, at + 1, {"ranges": np.full((count, 2, 2), 7, np.int32)})


def test_what_is_put_into_a_slot_is_there_in_a_child() -> None:
    slots = Slots(2, size=4096)
    places = [slots.put(i, some(5 + i)) for i in range(2)]
    if (pid := os.fork()) == 0:
        got = [slots.get(place) for place in places]
        same = all(np.array_equal(one.seqlen_k, some(5 + i).seqlen_k)
                   and np.array_equal(one.tables["ranges"], some(5 + i).tables["ranges"])
                   for i, one in enumerate(got))
        slots.get(places[1]).seqlen_q[0] = 77
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert slots.get(places[1]).seqlen_q[0] == 77 and slots.get(places[0]).seqlen_q[0] == 0


def test_sequences_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TooLarge, match="500 sequences do not fit into 4096 bytes"):
        Slots(1, size=4096).put(0, some(500))


def drawn_by(drawers: Drawers, count: int) -> list[Launch]:
    found, until = [], time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < until
        while drawers.room() and len(drawers.asked) + len(found) < count:
            drawers.ask(len(drawers.asked) + len(found))
        drawers.collect()
        if launch := drawers.next():
            found.append(launch)
            drawers.release(launch)
    return found


def test_launches_come_in_order_and_are_the_same_from_any_process() -> None:
    plan = Plan([SPACE], "key", CAPACITY)
    drawers = Drawers(plan, Slots(6), 3)
    try:
        launches = drawn_by(drawers, 9)
    finally:
        drawers.stop()
    assert [launch.n for launch in launches] == list(range(9))
    again = Plan([SPACE], "key", CAPACITY)
    assert [launch.recipe for launch in launches] == [again.recipe(n) for n in range(9)]
    assert len({repr(launch.recipe) for launch in launches}) == 9
    other = Plan([SPACE], "another key", CAPACITY)
    assert [launch.recipe for launch in launches] != [other.recipe(n) for n in range(9)]
    last = launches[-1]
    assert np.array_equal(last.sequences.seqlen_k, plan.sequences(8, last.recipe).seqlen_k)
    assert sum(last.counts.values()) > 0


def test_a_process_that_draws_may_be_killed() -> None:
    drawers = Drawers(Plan([SPACE], "key", CAPACITY), Slots(6), 2)
    try:
        drawn_by(drawers, 2)
        for process in drawers.processes:
            os.kill(process.pid, signal.SIGKILL)
        assert [launch.n for launch in drawn_by(drawers, 4)] == [0, 1, 2, 3]
    finally:
        drawers.stop()


def test_what_cannot_be_drawn_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(ends: Callable[[], None]) -> Drawers:
        monkeypatch.setattr(drawing, "expand_recipe", lambda *args, **options: ends())
        return Drawers(Plan([SPACE], "key", CAPACITY), Slots(6), 1)

    for ends, text in ((lambda: os._exit(1), "processes that draw it end"),
                       (lambda: 1 / 0, "ZeroDivisionError: division by zero")):
        drawers = plan(ends)
        try:
            with pytest.raises(CannotDraw, match=f"launch 0: {text}"):
                drawn_by(drawers, 1)
        finally:
            drawers.stop()


def test_sequences_are_halved_until_they_fit() -> None:
    plan = Plan([SPACE], "key", CAPACITY)
    whole = plan.sequences(0, plan.recipe(0))
    drawers = Drawers(plan, Slots(2, size=512), 1)
    try:
        (launch,) = drawn_by(drawers, 1)
    finally:
        drawers.stop()
    assert 0 < len(launch.sequences) < len(whole)
    assert np.array_equal(launch.sequences.seqlen_k, whole.seqlen_k[:len(launch.sequences)])


class Deep(CpuBackend):
    """Begins three launches before it waits for the first, and notes how many were begun."""

    depth = 3
    begun = 0
    deepest = 0

    def start(
        self, call: Call, sequences: Sequences, announce: Announce
    ) -> Callable[[], Outcome]:
        type(self).begun += 1
        announce("run")
        wait = super().start(call, sequences, announce)

        def finish() -> Outcome:
            time.sleep(0.05)
            type(self).deepest = max(self.deepest, self.begun)
            type(self).begun -= 1
            self.spoil(sequences)
            outcome = wait()
            return Outcome(outcome.cells, outcome.wrong, run_seconds=float(self.deepest))

        return finish

    def spoil(self, sequences: Sequences) -> None:
        pass


class Deadly(Deep):
    def spoil(self, sequences: Sequences) -> None:
        if sequences.seqlen_k.max(initial=0) >= 41:
            os._exit(9)


class Fatal:
    """What ends its process when it goes, as an event of a broken device does."""

    def __del__(self) -> None:
        os.abort()


class Breaking(Deep):
    def spoil(self, sequences: Sequences) -> None:
        event = Fatal()
        try:
            raise RuntimeError(f"an illegal access beside {type(event).__name__}")
        except RuntimeError as error:
            raise Broken(error) from error


class Once(Deep):
    flag = ""

    def spoil(self, sequences: Sequences) -> None:
        if not Path(self.flag).exists():
            Path(self.flag).touch()
            os._exit(9)


def ran(folder: Path, kind: type[Deep], launches: int) -> Loop:
    backend = kind({TARGET.target: TARGET})
    backend.depth = kind.depth
    backend.capacity = CAPACITY
    backend.warm_up()
    state = open_state(folder)
    slots = Slots(20)
    worker = Worker(backend, slots=slots)
    until = time.monotonic() + 60
    investigator = Investigator(
        worker=worker, source=Source(), folder=folder, until=until, diagnoses=Diagnoses({}),
        origin={"backend": "cpu", "device": "CPU", "seed": 1}, known=set(),
    )
    found = Loop([SPACE], Settings(seed=1, until=until, launches=launches), state, [worker],
                     investigator, drawing=2)
    found.run()
    state.close()
    return found


def test_several_launches_are_under_way_at_once(tmp_path: Path) -> None:
    found = ran(tmp_path, Deep, 12)
    assert found.now["launches"] == 12 and found.now["cells"] > 0
    assert found.now["run_seconds"] > 12  # each adds how many were begun at most until then
    assert not found.state.unfinished and not stored(tmp_path)
    assert sorted(found.workers[0].slots.free) == list(range(20 - 1))


def test_the_launch_that_ends_a_child_is_told_from_those_beside_it(tmp_path: Path) -> None:
    found = ran(tmp_path, Deadly, 12)
    (finding,) = stored(tmp_path).values()
    assert finding["kind"] == "crash" and "status 9" in finding["text"]
    (sequence,) = finding["case"]["sequences"]
    assert 41 <= sequence["seqlen_k"] <= 60
    assert found.now["launches"] == 12 and not found.now.get("infrastructure")
    assert found.now["cells"] > 0  # of launches that only shared a child with the deadly ones


def test_a_death_that_does_not_happen_again_alone_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Once, "flag", str(tmp_path / "flag"))
    found = ran(tmp_path / "folder", Once, 9)
    assert not stored(tmp_path / "folder") and found.now["launches"] == 9
    assert found.now["infrastructure"] == {
        "crash (the child ended early, with status 9): it did not happen again": 1}
    (line,) = (tmp_path / "folder/state/unexplained.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert "status 9" in kept["text"] and 1 <= len(kept["under way"]) <= 3
    plan = found.drawers.plan
    assert from_json(kept["under way"][0]) in [plan.recipe(n) for n in range(9)]


def test_a_launch_runs_when_it_is_written_down(tmp_path: Path) -> None:
    state, syncer = open_state(tmp_path), Syncer()

    def waited() -> bool:
        until = time.monotonic() + 10
        while not syncer.done():
            assert time.monotonic() < until
            time.sleep(0.01)
        return True

    try:
        state.begin("k", 0, {})
        syncer.ask(state)
        assert waited()
        os.kill(syncer.process.pid, signal.SIGKILL)  # another one takes its place
        syncer.ask(state)
        assert waited()
        syncer.path = tmp_path / "gone"  # what a snapshot has taken over need not be waited for
        syncer._send()
        assert waited()
        syncer.path = tmp_path / "lock" / "x"
        (tmp_path / "lock").touch()
        syncer._send()
        with pytest.raises(StateError, match="Not a directory"):
            waited()
    finally:
        syncer.stop()
        state.close()


def test_a_launch_that_was_only_written_down_is_not_blamed(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    state.begin("k", 0, {})
    state.begin("k", 1, {})
    state.run("k", 1, wait=True)
    assert [one["times"] for one in state.unfinished.values()] == [0, 1]
    state.journal.close()
    state.lock.close()
    again = open_state(tmp_path)
    assert [one["times"] for one in again.unfinished.values()] == [0, 1]
    again.close()


def test_what_broke_a_child_is_said_before_it_ends() -> None:
    backend = Breaking({TARGET.target: TARGET})
    backend.warm_up()
    result = Worker(backend).run(CALL, some(3))
    assert isinstance(result, Failure) and result.died
    assert result.text == "RuntimeError: an illegal access beside Fatal"
