"""The GPU back end, with a plain kernel in place of FA4's: what it refuses, runs and says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fuzz import gpu
from fuzz.backends import KINDS, Backend, Broken, CpuBackend, Refused
from fuzz.bound import Bound
from fuzz.case import Sequence, stated
from fuzz.drawing import drawn
from fuzz.gpu import LEAST, GpuBackend, outcome
from fuzz.loop import Loop, Settings
from fuzz.sequences import Sequences, pack
from fuzz.strategies import MOST_ROWS, Space, cases, choices_of
from fuzz.targets import FLAGS, VARIANTS, built_in, generated, in_turn
from fuzz.worker import CRASH, Failure, Worker
from kernels.fa4 import VARLEN, Call, compile_key, supported
from kernels.mask_mods import TARGETS
from kernels.readout import Reader, Reading
from kernels.readout import Wrong as Cell
from spec.from_file import resolve
from spec.masks import MASKS
from tests.reference_kernel import Kernel

RIGHT = {target.target: target for target in TARGETS if not target.expected}
NAME = "maskproof/mm_prefix[window]"
CALL = Call(provider="upstream", spec="mm_prefix", mask_mod=NAME, params={"window": 3},
            head_dim=16, head_dim_v=16, page_size=16, kv_heads=2, q_heads=4)


class Plain(Kernel):
    """The plain kernel as a provider: `layout` is what its mask_mods read."""

    def mask_mod(self, call: Call) -> tuple[Any, tuple[str, ...]]:
        return None, ("query_ranges", "cu_seqlens_q")

    def compile(self, call: Call, sequences: int) -> None:
        if call.dtype == "fp16":
            raise NotImplementedError("no fp16\nhere")


def backend(**faults: Any) -> GpuBackend:
    found = GpuBackend(RIGHT)
    found.readers["upstream"] = Reader(Bound(Plain(**faults), RIGHT), device="cpu")
    return found


def sequences(*lengths: tuple[int, int]) -> Sequences:
    some = [Sequence(seqlen_q=q, seqlen_k=k, tables={"ranges": ((1, 4), (6, 6))})
            for q, k in lengths]
    return pack(resolve("mm_prefix"), some)


def silent(stage: str) -> None:
    pass


def test_it_has_all_that_a_back_end_has() -> None:
    wanted = [name for name in Backend.__dict__ if name in dir(CpuBackend) and name[0] != "_"]
    for name in wanted:
        ours = inspect.getattr_static(GpuBackend, name)
        if callable(ours):
            theirs = inspect.getattr_static(CpuBackend, name)
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters)
    assert {"domain", "refuses", "ready", "start", "probe", "warm_up"} <= set(wanted)


def test_a_right_kernel_is_right_and_stages_are_announced() -> None:
    stages: list[str] = []
    found = backend().check(CALL, sequences((5, 9), (3, 20), (1, 1), (4, 0)), stages.append)
    assert (found.wrong.total, found.cells) == (0, (45 + 60 + 1) * 2)
    assert (stages, found.kernels) == (["compile", "run"], 1)


def test_a_kernel_is_compiled_once() -> None:
    device = backend()
    counts = [device.check(call, sequences((5, 9)), silent).kernels
              for call in (CALL, CALL, replace(CALL, layout=VARLEN))]
    assert counts == [1, 0, 1]


def test_few_sequences_are_filled_up_with_empty_ones() -> None:
    device = backend()
    at = device._given(device.readers["upstream"].source, CALL, sequences((5, 9), (3, 20)))
    assert len(at) == LEAST and at.rows == 8 and at.cells == 45 + 60
    assert at.tables["ranges"].shape == (LEAST, MOST_ROWS, 2)
    assert (at.tables["ranges"][2:] == -1).all()


def test_a_planted_leak_comes_back_as_one_cell() -> None:
    def leak(b: int, visible: Any) -> Any:
        changed = visible.clone()
        if b == 1:
            changed[:, 0, 19] = True
        return changed

    found = backend(mask=leak).check(CALL, sequences((5, 9), (3, 20)), silent)
    cells = [(int(b), int(q), int(kv), KINDS[int(kind)]) for b, q, kv, kind in zip(
        found.wrong.b, found.wrong.q_idx, found.wrong.kv_idx, found.wrong.kind, strict=True)]
    assert set(cells) == {(1, 0, 19, "leak")} and found.wrong.total == len(cells) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_wrong_cell_is_carried_over(kind: str) -> None:
    reading = Reading(10, 2, 1, (Cell(3, 1, 4, -1, kind),), {kind: 7}, {3: 7}, 0.0, 0.0, "")
    found = outcome(reading, 1.0, 1)
    assert [int(column[0]) for column in found.wrong.cells.values()] == [3, 1, 4, -1]
    assert (KINDS[int(found.wrong.kind[0])], found.wrong.total) == (kind, 7)
    assert len(outcome(replace(reading, wrong=(), counts={}), 0, 0).wrong) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"mask_mod": "maskproof/mm"}, "no target 'maskproof/mm' here"),
    "heads": ({"q_heads": 3}, "query heads must be a multiple of key heads"),
    "provider": ({"provider": "elsewhere"}, "no provider 'elsewhere'"),
    "architecture": ({"arch": "sm_100"}, "no kernels for sm_100"),
    "when compiled": ({"dtype": "fp16"}, "NotImplementedError: no fp16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_outside_the_domain_are_refused_with_the_reason(case: str) -> None:
    fields, reason = REFUSED[case]
    with pytest.raises(Refused) as said:
        backend().check(replace(CALL, **fields), sequences((5, 9)), silent)
    assert reason in str(said.value) and "\n" not in str(said.value)


def test_what_a_kernel_ends_with_ends_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: GpuBackend, call: Call, at: Sequences, announce: Callable[..., None]) -> None:
        announce("run")
        raise Broken(RuntimeError("an illegal memory access was encountered"))

    monkeypatch.setattr(GpuBackend, "start", start)
    worker = Worker(GpuBackend(RIGHT))
    first = worker.run(CALL, sequences((5, 9)))
    assert first == Failure(
        CRASH, "run", "RuntimeError: an illegal memory access was encountered", died=True)
    assert worker.pid == 0


def test_a_broken_read_out_keeps_its_reason() -> None:
    with pytest.raises(Broken, match="far off"):
        backend(spoil=_raises).check(CALL, sequences((5, 9)), silent)


def _raises(given: Any) -> None:
    raise ValueError("far off")


def test_spaces_take_the_plainest_of_each_target_first() -> None:
    targets = {**RIGHT, **built_in(RIGHT)}
    calls = in_turn(targets.values(), gpu=True)
    assert len(calls) == len(targets) * len(VARIANTS)
    assert [target for target, _ in calls[:len(targets)]] == list(targets.values())
    assert len(in_turn(targets.values(), gpu=False)) == len(targets)


def test_every_variant_is_another_kernel_and_most_are_supported() -> None:
    calls = [call for _, call in in_turn([RIGHT[NAME]], gpu=True)]
    assert len({compile_key(call) for call in calls}) == len(VARIANTS)
    assert sum(supported(call) is None for call in calls) >= len(VARIANTS) - 3  # splits


def test_built_in_windows_are_those_that_the_spec_is_given() -> None:
    for target, call in in_turn(built_in(RIGHT).values(), gpu=True):
        assert call.mask_mod is None and set(call.params) == set(resolve(call.spec).params)
        if call.window_size_left is not None and call.window_size_left >= 0:
            assert call.window_size_left == call.params["window"] - 1
        assert bool(target.expected) == ("known-bad" in target.target)
    assert len(built_in(RIGHT)) == len(FLAGS)


@pytest.mark.parametrize("name", [NAME, "maskproof/rswa", "upstream/built-in/window"])
def test_what_is_compiled_in_is_not_drawn(name: str) -> None:
    target = {**RIGHT, **built_in(RIGHT)}[name]
    (_, call), *_ = in_turn([target], gpu=True)
    space = Space(call=call, mask=resolve(call.spec),
                  constants={**target.constants, **call.params})
    case = _first(cases(space))
    assert case.call.params.keys() == resolve(call.spec).params.keys() - {"num_ranges"}
    assert all(case.call.params[key] == value for key, value in call.params.items())
    assert choices_of(space, case)


def _first(strategy: Any) -> Any:
    return drawn(strategy, 1, 2)[0]


def test_a_kernel_is_given_only_what_it_has_compiled_in() -> None:
    seen: list[Call] = []

    class Noting(Plain):
        launch: Callable[..., None] = lambda self, call, on, **given: seen.append(call)

    rswa = Call(provider="upstream", spec="rswa", mask_mod="maskproof/rswa", params={"window": 5})
    Bound(Noting(), RIGHT).launch(rswa, None)  # type: ignore[arg-type]
    Bound(Noting(), RIGHT).launch(CALL, None)  # type: ignore[arg-type]
    made = generated("same_range")
    own = Call(provider="upstream", spec="same_range", mask_mod=made.target)
    Bound(Noting(), {made.target: made}).launch(own, None)  # type: ignore[arg-type]
    assert [call.params for call in seen] == [{}, {"window": 3}, dict(made.constants)]


def test_a_campaign_goes_where_kernels_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call for _, call in in_turn([RIGHT[NAME]], gpu=True)[:4]]
    device, running = GpuBackend(RIGHT), {1, 2}
    device.ahead = {repr(call): (i, 1 + i // 2) for i, call in enumerate(calls)}
    device.seconds = np.zeros(len(calls))
    monkeypatch.setattr(gpu, "_is_running", lambda child: child in running)
    mask = resolve("mm_prefix")
    found = Loop(
        spaces=[Space(call=call, mask=mask) for call in calls],
        settings=Settings(seed=1, until=0.0), state=SimpleNamespace(position={}),
        workers=[SimpleNamespace(backend=device, slots=None)], investigator=None,
    )  # type: ignore[arg-type]

    def spaces(count: int) -> list[int | None]:
        found.looked = 0.0
        return [n if n is None else n % len(calls) for n in (found._next() for _ in range(count))]

    assert spaces(2) == [None, None]
    device.seconds[2] = 3.0
    assert spaces(3) == [2, 2, 2]
    running.remove(1)  # it ended before it compiled the first two
    assert spaces(8) == [0, 1, 0, 1, 0, 1, 2, 0]  # what comes late catches up
    device.seconds[3] = 1.0
    assert spaces(5) == [3, 3, 3, 1, 3]


def test_warm_up_compiles_ahead_and_makes_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device, ahead = GpuBackend(RIGHT, workers=3), list[Any]()
    prepared: list[Any] = []
    reader = SimpleNamespace(
        source=Bound(Plain(), RIGHT),
        prepare=lambda call, at, short: prepared.append((call, at))
        or (call.page_size == 1 and 1 / 0))
    monkeypatch.setattr(gpu, "forked", lambda work: ahead.append(work) or len(ahead))
    monkeypatch.setattr(gpu, "_is_running", lambda child: True)
    monkeypatch.setattr(GpuBackend, "_reader", lambda self, provider: reader)
    monkeypatch.setattr(gpu.os, "nice", lambda by: None)
    monkeypatch.setattr(gpu.signal, "alarm", lambda seconds: None)
    device.warm_up()
    calls = [call for _, call in in_turn(RIGHT.values(), gpu=True) if not device.refuses(call)]
    assert len(ahead) == 3 and not any(map(device.ready, calls)) and device.ready(CALL)
    ahead[1]()
    assert [call for call, _ in prepared] == calls[1::3]  # what cannot be compiled is passed over
    assert [device.ready(call) for call in calls] == [i % 3 == 1 for i in range(len(calls))]
    assert all((len(at) >= LEAST) != call.few and at.rows == 0 for call, at in prepared)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("name", sorted(MASKS))
def test_tables_of_no_sequence_have_their_ranks(name: str) -> None:
    mask = MASKS[name]
    found = gpu.none(mask)
    assert len(found) == 0 and {n: t.ndim for n, t in found.tables.items()} == {
        n: len(t.dims) for n, t in stated(mask).items()}


def test_random_data_is_asked_now_and_then_and_when_it_was_wrong(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MEASURED", 3)
    device = backend()
    asked: list[int] = []
    reader, answers = device.readers["upstream"], [True, True, False, False, True]

    def measure(call: Call, at: Any) -> Any:
        asked.append(len(at))
        return SimpleNamespace(agrees=answers[len(asked) - 1], worst_sequence=3)

    reader.measure = measure
    kinds = [{KINDS[kind] for kind in device.check(CALL, sequences((5, 9)), silent).wrong.kind}
             for _ in range(9)]
    turns = [i for i, found in enumerate(kinds) if found]
    assert turns == [6, 7] and kinds[6] == {"numerics"}
    assert len(asked) == len(answers) and set(asked) == {LEAST}


def test_random_data_tells_a_kernel_that_is_wrong_in_numbers_alone() -> None:
    device = backend(weigh=lambda b, weights: weights**1.5)
    found = device.check(CALL, sequences((5, 9), (3, 20)), silent).wrong
    assert {KINDS[kind] for kind in found.kind} == {"numerics"} and found.total == 1
    assert not backend().check(CALL, sequences((5, 9), (3, 20)), silent).wrong.total


def test_the_machine_is_unwell_where_there_is_no_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        assert "the GPU is unwell" in (GpuBackend(RIGHT).probe() or "")


def test_arrays_of_no_wrong_cell_have_their_types() -> None:
    found = outcome(Reading(1, 1, 1, (), {}, {}, 0.0, 0.0, ""), 0.0, 0).wrong
    assert all(column.dtype == np.int64 for column in (*found.cells.values(), found.kind))
