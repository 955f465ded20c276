"""The release in which a finding came or went: by proof, by replay, and where neither can tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import bisect as module
from fuzz import diagnose, releases, replay
from fuzz.bisect import BAD, GOOD, UNDECIDED, Told, bisect, document, edges, halved, lines, main
from fuzz.case import Case, Sequence
from fuzz.diagnose import Diagnoses
from fuzz.findings import checked
from fuzz.questions import alike, home
from fuzz.releases import RangeError, named
from fuzz.replay import Replayed
from fuzz.run import CannotRun
from fuzz.targets import Source
from kernels.fa4 import Call
from kernels.release import OWN_FA4, Release
from kernels.target import Target
from tests.findings import dynamic_causal, finding, mm_prefix, rswa, saved
from tests.small_vllm import small_vllm

STATES = {"+": GOOD, "-": BAD, "?": UNDECIDED}
NAMES = "abcdefghijkl"
RSWA = Sequence(seqlen_q=3, seqlen_k=6, tables={"prefix_lens": 1})


def told(text: str) -> list[Told]:
    return [Told(name, STATES[state]) for name, state in zip(NAMES, text, strict=False)]


@pytest.mark.parametrize(("states", "expected"), [
    ("--++", [("fixed", "b", "c", "")]), ("++--", [("broke", "b", "c", "")]), ("++++", []),
    ("----", []), ("????", []), ("+?-", [("broke", "a", "c", "b")]), ("?-?", []),
    ("-+-", [("fixed", "a", "b", ""), ("broke", "b", "c", "")]),
    ("-??+?-", [("fixed", "a", "d", "bc"), ("broke", "d", "f", "e")]),
])
def test_every_change_between_known_neighbours_is_an_edge(states: str, expected: Any) -> None:
    found = [(e.kind, e.before, e.after, "".join(e.between)) for e in edges(told(states))]
    assert found == expected


@pytest.mark.parametrize("states", ["-----+++", "+-------", "?-?+++++", "++????--", "-?????+?"])
def test_halves_find_the_edge_that_all_releases_show(states: str) -> None:
    every = told(states)
    asked: list[str] = []

    def ask(name: str) -> Told:
        asked.append(name)
        return next(one for one in every if one.release == name)

    found = halved(NAMES[:len(states)], ask)
    assert edges([found[n] for n in NAMES[:len(states)] if n in found]) == edges(every)
    assert len(asked) == len({*asked})


def test_halves_ask_few_releases() -> None:
    asked: list[int] = []
    names = [str(i) for i in range(1000)]

    def ask(name: str) -> Told:
        asked.append(int(name))
        return Told(name, BAD if int(name) < 700 else GOOD)

    (edge,) = edges([one for _, one in sorted(halved(names, ask).items(),
                                              key=lambda pair: int(pair[0]))])
    assert (edge.before, edge.after) == ("699", "700") and len(asked) < 15


@pytest.mark.parametrize(("states", "status"), [("-+", 0), ("--", 1), ("?+", 1), ("??", 3)])
def test_status_says_whether_there_is_an_edge(states: str, status: int) -> None:
    found = module.Bisected("proof", "flags", told("-")[0], tuple(told(states)),
                            edges=edges(told(states)))
    assert found.status == status


def test_an_edge_says_which_releases_are_not_known() -> None:
    (edge,) = edges(told("-?+"))
    assert edge.sentence == ("fixed in b or c: a is the last bad release, c the first good one "
                             "(nothing is known of b)")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TREES", raising=False)
    monkeypatch.setattr(releases, "indexed", lambda: ("0.10.1", "0.9.0", "0.25.0", "0.24.0"))
    at_hand = [Release("vllm-0.26", "0.26", Path(), ""), Release("vllm-0.24", "0.24", Path(), "")]
    monkeypatch.setattr(releases.fa4, "releases", lambda: at_hand)


@pytest.mark.parametrize(("text", "expected"), [
    ("0.9..0.26.0", ["0.9.0", "0.10.1", "0.24.0", "0.25.0", "0.26"]),
    ("v0.24.0..0.25.0", ["0.24.0", "0.25.0"]), ("0.25.0..0.25", ["0.25.0"]),
    ("0.26, 0.24.0,0.26", ["0.26", "0.24.0"]), ("../tree", ["../tree"]),
])
def test_a_range_has_the_releases_of_the_index_in_order(
    index: None, text: str, expected: list[str]
) -> None:
    assert named(text) == expected


@pytest.mark.parametrize(("text", "why"), [
    ("0.25..0.24", "write 0.24..0.25"), ("0.1..0.25", "no release 0.1;"), ("a..b", "not a range"),
    ("..", "not a range"), (" , ", "no release is named"),
])
def test_a_range_of_nothing_is_refused(index: None, text: str, why: str) -> None:
    with pytest.raises(RangeError, match=why):
        named(text)


def test_without_an_index_the_releases_at_hand_are_taken(
    index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(releases, "indexed", lambda: None)
    assert named("0.24..0.26", notes.append) == ["0.24", "0.26"]
    monkeypatch.setattr(releases, "indexed", lambda: pytest.fail("no index is asked"))
    monkeypatch.setenv("VLLM_TREES", "trees")
    assert named("0.24..0.26", notes.append) == ["0.24", "0.26"]
    assert [note.partition(":")[0] for note in notes] == [
        "pip's index cannot be asked", "$VLLM_TREES is set"]


def test_versions_are_read_from_what_pip_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        returncode, stderr = 0, ""
        stdout = "vllm (0.3.0)\nAvailable versions: 0.3.0, 0.2.1.post1\n  INSTALLED: 0.1\n"

    monkeypatch.setattr(releases, "_pip", lambda *arguments: Answer)
    releases.indexed.cache_clear()
    assert releases.indexed() == ("0.3.0", "0.2.1.post1")
    Answer.returncode = 1
    releases.indexed.cache_clear()
    assert releases.indexed() is None
    releases.indexed.cache_clear()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Trees as small as a vLLM may be, each made once; a fault is a file, what it says, and what
    takes its place."""
    folder = tmp_path_factory.mktemp("trees")

    def made(name: str, old: str = "", new: str = "", file: str | None = None) -> str:
        root = folder / name
        if not root.exists():
            small_vllm(root, *((old, new) if file is None else ()))
            if file is not None:
                path = root / OWN_FA4 / file
                assert path.read_text().count(old) == 1
                path.write_text(path.read_text().replace(old, new))
        return str(root)

    return made


OFF_BY_ONE = "(kv_idx < prefix) |", "(kv_idx <= prefix) |"
NO_MASK_MOD = "mask_mod = _make_rswa_mask_mod()", "mask_mod = None"
TILES = "n_block_min = cutlass.max(n_idx_left // self.tile_n, 0)", \
    "n_block_min = cutlass.max(n_idx_left // self.tile_n + 1, 0)"


def of_mask_mod(tree: str) -> dict[str, Any]:
    call = Call(provider="vllm-tree", spec="rswa", mask_mod="vllm-tree/rswa",
                params={"window": 1})
    return finding(call, "kv <= q and (kv <= prefix_lens[b] or q == kv)", RSWA,
                   source=Source(vllm=tree), backend="cpu", device="CPU")


def test_a_fault_of_a_mask_mod_that_comes_and_goes(trees: Callable[..., str]) -> None:
    right, wrong = trees("right"), trees("wrong", *OFF_BY_ONE)
    again = trees("again", "left is not None", "left != None")
    found = bisect(of_mask_mod(wrong), [right, wrong, again, str(Path(right) / "nothing")])
    assert (found.by, found.question, found.status) == ("proof", "mask_mod", 0)
    assert [one.state for one in found.told] == [GOOD, BAD, GOOD, UNDECIDED]
    assert [one.verdict for one in found.told] == ["PROVED", "REFUTED", "PROVED", "UNSUPPORTED"]
    assert [one.agrees for one in found.told] == [True, True, True, None]
    assert found.told[1].replay is not None and found.told[1].replay["seen"] == 1
    assert found.told[1].replay["wrong"] == 3 and found.told[0].replay["wrong"] == 0
    assert found.told[1].diagnosis is not None
    assert [(e.kind, e.before, e.after) for e in found.edges] == [
        ("broke", right, wrong), ("fixed", wrong, again)]
    assert not found.monotone
    assert any("not monotone: it changes 2 times" in line for line in lines({
        **of_mask_mod(wrong)}, found))


@pytest.mark.parametrize(("faulty", "verdict", "state", "says"), [
    (0, "REFUTED", BAD, "refuted, and the finding's own case is right there"),
    (1, "PROVED", UNDECIDED, "proved, and the case is wrong"),
])
def test_proof_and_replay_that_disagree_are_told(
    trees: Callable[..., str], monkeypatch: pytest.MonkeyPatch, faulty: int, verdict: str,
    state: str, says: str,
) -> None:
    right, wrong = trees("right"), trees("wrong", *OFF_BY_ONE)
    monkeypatch.setattr(replay, "replay", lambda *args, **kwargs: Replayed(
        bool(faulty), "", 1, faulty, faulty, faulty, 18))
    given = of_mask_mod(wrong)
    found = bisect(given, [right, wrong])
    (one,) = [one for one in found.told if one.verdict == verdict]
    assert one.state == state and one.agrees is False and says in (one.reason or "")
    assert any(says in line for line in lines(given, found)[-3:])


def test_a_fault_of_the_release_s_own_call(trees: Callable[..., str]) -> None:
    right, wrong = trees("right"), trees("dropped", *NO_MASK_MOD)
    call = Call(provider="vllm-tree", spec="rswa", causal=True, params={"window": 1})
    given = finding(call, "causal", RSWA, source=Source(vllm=wrong))
    found = bisect(given, [wrong, right])
    assert found.question == "dispatch"
    assert [one.state for one in found.told] == [BAD, GOOD]
    assert found.told[0].replay is None and "equals" in (found.told[0].diagnosis or "")
    said = document(given, found)
    assert (said["last_bad"], said["first_good"]) == (wrong, right)
    assert (said["last_good"], said["first_bad"]) == (None, None)
    assert json.loads(json.dumps(said))["edges"][0]["kind"] == "fixed"


def test_a_fault_of_tiles(trees: Callable[..., str]) -> None:
    right, wrong = trees("right"), trees("tiles", *TILES, "block_info.py")
    call = Call(provider="vllm-tree", spec="window", window_size_left=2, window_size_right=0,
                params={"window": 3})
    given = finding(call, "kv == q", Sequence(seqlen_q=3, seqlen_k=6), source=Source(vllm=wrong))
    found = bisect(given, [right, wrong])
    assert found.question == "tiles"
    assert [one.state for one in found.told] == [GOOD, BAD]
    assert "coverage" in found.told[1].obligation
    assert found.edges[0].kind == "broke"


def test_a_call_that_no_release_makes_is_asked_as_it_is_given(trees: Callable[..., str]) -> None:
    right = trees("right")
    call = Call(provider="vllm-tree", spec="causal", window_size_left=-1, window_size_right=0)
    given = finding(call, "kv < 0", Sequence(seqlen_q=2, seqlen_k=3), source=Source(vllm=right))
    found = bisect(given, [right])
    assert (found.question, found.status) == ("flags", 1)
    assert "no key is visible" in (found.told[0].diagnosis or "")
    assert lines(given, found)[-1] == "bad in every release that is known (1 of 1)"


def test_what_a_release_does_wrong_elsewhere_is_not_the_finding_s_fault(
    trees: Callable[..., str]
) -> None:
    wrong = trees("dropped", *NO_MASK_MOD)
    call = Call(provider="vllm-tree", spec="rswa", window_size_left=2, window_size_right=0,
                params={"window": 1})
    given = finding(call, "q - kv <= 2 and kv <= q", RSWA, source=Source(vllm=wrong))
    assert bisect(given, [wrong]).question == "flags"


def of_kernel(tree: str, kind: str = "lse") -> dict[str, Any]:
    call = Call(provider="vllm-tree", spec="causal", causal=True)
    made = finding(call, "full", Sequence(seqlen_q=2, seqlen_k=3), source=Source(vllm=tree))
    return {**made, "kind": kind}


@pytest.mark.parametrize("kind", ["lse", "leak"])
def test_a_fault_of_the_kernel_alone_needs_a_gpu(
    trees: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fuzz.backends.has_gpu", lambda: False)
    right = trees("right")
    path = saved(tmp_path, of_kernel(right, kind))
    assert main([str(path), "--releases", right]) == 3
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "there is no GPU here" in told[0]
    assert ("flags PROVED, tiles PROVED, builtin PROVED" in told[0]) == (kind == "leak")


@pytest.fixture
def flaky(trees: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels that are wrong in so many of the runs of each tree: found by GPU replay alone."""
    shares: dict[str, float] = {}

    def run(given: Mapping[str, Any], backend: str, repeat: int) -> Replayed:
        wrong = round(shares[Path(given["tree"]).name] * repeat)
        return Replayed(bool(wrong), "", repeat, wrong, wrong, 4, 6)

    def moved(self: Any, place: Any, at: Any, backend: str) -> dict[str, Any]:
        return {**self.given, "tree": str(place.release.root)}

    monkeypatch.setattr("fuzz.backends.has_gpu", lambda: True)
    monkeypatch.setattr(replay, "replay", run)
    monkeypatch.setattr(module.Asked, "_moved", moved)
    return shares


def test_a_flaky_fault_is_gone_only_where_that_is_no_chance(
    trees: Callable[..., str], flaky: dict[str, float]
) -> None:
    right, wrong = trees("right"), trees("wrong", *OFF_BY_ONE)
    flaky |= {"right": 0.0, "wrong": 0.1}
    given = of_kernel(wrong)
    few = bisect(given, [wrong, right], repeat=10)
    assert [one.state for one in few.told] == [BAD, UNDECIDED] and few.status == 1
    assert few.told[1].chance == pytest.approx(0.9 ** 10)
    assert "raise --repeat" in (few.told[1].reason or "")
    many = bisect(given, [wrong, right], repeat=50)
    assert (many.by, many.question) == ("replay", None)
    assert [one.state for one in many.told] == [BAD, GOOD] and many.edges[0].kind == "fixed"
    assert any("5 of 50 runs" in line for line in lines(given, many))


def test_what_does_not_happen_again_at_home_is_not_bisected(
    trees: Callable[..., str], flaky: dict[str, float]
) -> None:
    flaky["right"] = 0.0
    with pytest.raises(CannotRun, match="right in 3 of 3 runs where it was found"):
        bisect(of_kernel(trees("right")), [trees("right")])


def test_a_replay_takes_the_mask_mod_and_the_kernels_of_the_release(
    trees: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = trees("right"), trees("wrong", *OFF_BY_ONE)
    found = bisect(of_mask_mod(wrong), [right, wrong], by="replay", repeat=2)
    assert found.question is None
    assert [one.state for one in found.told] == [GOOD, BAD]
    assert found.told[1].replay is not None and found.told[1].replay["faulty"] == 2
    case, source, signature = checked(of_mask_mod(wrong))
    asked = module.Asked(of_mask_mod(wrong), case, source, "leak", 1, lambda text: None)
    place = home(Source(vllm=right), case.call)
    target = Target(target="vllm-tree/rswa", spec="rswa", make=lambda at: at)
    at = module_opened({"vllm-tree/rswa": target})
    assert asked._moved(place, at, "cpu")["source"]["vllm"] == right
    assert "no such mask_mod" in asked._moved(place, module_opened({}), "cpu")
    monkeypatch.setattr("kernels.fa4.release_of", lambda name: replace(
        place.release, root=Path("elsewhere")))
    assert "$VLLM_TREES/<version>" in asked._moved(place, at, "gpu")


def module_opened(targets: Mapping[str, Target]) -> Any:
    from fuzz.questions import Opened

    return Opened("no FA4", targets)


def test_the_mask_mod_of_another_release_is_the_one_of_the_same_part() -> None:
    def target(name: str, spec: str, **constants: int) -> Target:
        return Target(target=f"vllm-9/{name}", spec=spec, make=lambda at: at, constants=constants)

    call = Call(provider="vllm-1", spec="mm_prefix", mask_mod="vllm-1/mm_prefix[window,ranges=2]",
                params={"window": 2})
    one = Sequence(seqlen_q=1, seqlen_k=9, tables={"ranges": ((1, 2), (3, 4), (5, 6))})
    case, place = Case(call, (one,)), home_of("vllm-9")
    few, many = (target(f"mm_prefix[window,ranges={n}]", "mm_prefix", num_ranges=n)
                 for n in (2, 8))
    other, newer = target("rswa", "rswa"), target("mm_prefix[window]", "mm_prefix")
    no = target("mm_prefix[no-window]", "mm_prefix_no_window")

    def of(*targets: Target) -> Target | None:
        return alike(case, {each.target: each for each in targets}, place)

    assert of(other, few, many) is few
    assert of(other, no, newer) is newer and of(no, many) is many and of(other, no) is None
    renamed = replace(case, call=replace(call, mask_mod="vllm-1/mm_prefix[window]"))
    assert alike(renamed, {t.target: t for t in (few, many)}, place) is many


def home_of(name: str) -> Any:
    from fuzz.questions import Place

    return Place(name, Release(name, None, Path(), ""))


def test_a_broken_finding_and_a_bad_range_are_usage(
    tmp_path: Path, trees: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json"), "--releases", "0.1..0.2"]) == 2
    path = saved(tmp_path, of_kernel(trees("right")))
    assert main([str(path), "--releases", "2..1"]) == 2
    assert main([str(path)]) == 2
    assert main([str(path), "--releases", "1..2", "--all", "--fast"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_flags_of_a_finding_are_diagnosed(trees: Callable[..., str], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(provider="upstream", spec="causal", window_size_left=-1, window_size_right=0)
    path = saved(tmp_path, finding(call, "kv < 0", Sequence(seqlen_q=2, seqlen_k=3)))
    assert json.loads(path.read_text())["diagnosis"] is None
    assert diagnose.main([str(path)]) == 0
    said = json.loads(path.read_text())["diagnosis"]
    assert "no key is visible" in said["sentence"] and said["verdict"] == "PROVED"
    right = Call(provider="upstream", spec="causal", causal=True)
    assert Diagnoses({}).of_call(right, 20) is None
    path = saved(tmp_path, finding(right, "full", Sequence(seqlen_q=2, seqlen_k=3)))
    assert diagnose.main([str(path)]) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Diagnoses({}).of_call(call, 20) is None
    assert diagnose.main([str(path)]) == 3


@pytest.mark.releases
def test_kernels_of_another_release_are_not_taken_for_its_own() -> None:
    assert module.not_its_own("vllm-0.33.0") is None
    assert "its kernels cannot be run" in (module.not_its_own("vllm-0.24.0") or "")
    assert "do not import" in (module.not_its_own("vllm-0.0.1") or "")


RELEASED = [
    ("dynamic causal", dynamic_causal, {}, "fixed", "0.24.0", "0.25.1"),
    ("dynamic causal, window", dynamic_causal, {"window": 3}, "fixed", "0.25.1", "0.26.0"),
    ("mm_prefix", mm_prefix, {}, "fixed", "0.24.0", "0.25.1"),
    ("rswa", rswa, {}, "broke", "0.26.0", "0.27.1"),
]
KEPT = "0.24.0,0.25.1,0.26.0,0.27.1,0.28.0,0.33.0"


@pytest.mark.releases
@pytest.mark.parametrize(("name", "make", "more", "kind", "before", "after"), RELEASED)
def test_the_release_that_fixed_or_broke_it_is_named(
    name: str, make: Any, more: dict[str, Any], kind: str, before: str, after: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = saved(tmp_path, make(**more)), tmp_path / "out.json"
    assert main([str(path), "--releases", KEPT, "--json", str(out)]) == 0
    said = json.loads(out.read_text())
    (edge,) = said["edges"]
    assert (edge["kind"], edge["before"], edge["after"]) == (
        kind, f"vllm-{before}", f"vllm-{after}")
    assert edge["sentence"] in capsys.readouterr().out
    absent = [one["release"] for one in said["releases"] if one["verdict"] == "ABSENT"]
    assert absent == (["vllm-0.24.0"] if name == "rswa" else [])
    assert all(one["state"] == UNDECIDED for one in said["releases"] if one["verdict"] == "ABSENT")


@pytest.mark.releases
@pytest.mark.parametrize(("make", "sentence"), [
    (rswa, "the mask_mod is never called under causal=True: the mask is causal"),
    (dynamic_causal, "the tensor dynamic_causal is never read under causal=False"),
    (mm_prefix, "equals mm_prefix without the window term, with chunk-local q"),
])
def test_findings_from_a_machine_without_z3_are_diagnosed_later(make: Any, sentence: str) -> None:
    said = diagnose.diagnosis(make())
    assert said is not None and sentence in said["sentence"] and said["verdict"] == "PROVED"
