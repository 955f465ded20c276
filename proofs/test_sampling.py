"""Five points of a block: proved enough, or not, as counting every small block says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kernels.provider import Provider, installed, of_release
from kernels.release import find
from kernels.sampling import points, switched_on
from proofs.checks import Row
from proofs.obligation import Limits, Verdict
from proofs.sampling import Configuration, Subject, configurations, of_configuration
from spec import masks
from spec.term import Term
from spec.tiles import Tile
from spec.to_numpy import to_numpy

PROVIDER = installed()
SMALL = Tile(5, 4)


def of(provider: Provider, mask: str, tile: Tile = Tile(128, 80)) -> list[Row]:
    with provider.served():
        return of_configuration(provider, Configuration(mask, tile))


def verdicts(rows: list[Row]) -> dict[str, Verdict]:
    return {f"{row.result.obligation.name} {row.result.obligation.spec}": row.result.verdict
            for row in rows}


def test_five_points_are_enough_for_a_diagonal() -> None:
    rows = of(PROVIDER, "causal")
    assert verdicts(rows) == {"no-overflow causal": Verdict.PROVED,
                              "sampling-sound causal": Verdict.PROVED}
    assert all(row.result.killed and row.compared is not None for row in rows)


def test_a_window_has_to_be_wide_enough() -> None:
    rows = of(PROVIDER, "window")
    refuted, proved = rows[1:]
    assert refuted.result.verdict is Verdict.REFUTED and refuted.diagnosis is not None
    assert proved.result.verdict is Verdict.PROVED and proved.result.killed
    assert refuted.diagnosis.variation in proved.result.obligation.spec


def unsound(subject: Subject, window: int) -> bool:
    """Whether counting finds a block of a short sequence that five points get wrong."""
    axis = np.arange(14)
    claims: list[Term] = [subject.sound(subject.points.cells)]
    for seqlen_q in range(1, 10):
        for seqlen_k in range(1, 14):
            q, kv = np.meshgrid(axis[:seqlen_q], axis[:seqlen_k], indexing="ij")
            env = {"q_idx": q, "kv_idx": kv, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
                   "m_block": q // SMALL.tile_m, "n_block": kv // SMALL.tile_n, "window": window}
            if not all(np.all(to_numpy(claim, env)) for claim in claims):
                return True
    return False


def test_the_smallest_window_is_the_one_that_counting_finds() -> None:
    with PROVIDER.served():
        subject = Subject("t", masks.find("window"), SMALL, points(PROVIDER, SMALL), Limits())
    smallest = subject.smallest_window()
    assert smallest is not None and smallest > 1
    assert [window for window in range(1, 13) if unsound(subject, window)][-1] == smallest - 1


FAULTS = {
    "a corner one key short": ("n_right = n_base + self.tile_mn[1] - 1",
                               "n_right = n_base + self.tile_mn[1] - 2"),
    "a corner one row short": ("m_base + self.tile_mn[0] - 1, seqlen_q - 1",
                               "m_base + self.tile_mn[0] - 2, seqlen_q - 1"),
    "a point past the end": ("n_right = cutlass.min(n_base + self.tile_mn[1] - 1, seqlen_k - 1)",
                             "n_right = cutlass.min(n_base + self.tile_mn[1] - 1, seqlen_k)"),
}


@pytest.mark.parametrize("name", [*FAULTS, "a partial block taken as full"])
def test_a_fault_in_the_source_is_found(name: str, tmp_path: Path) -> None:
    shutil.copytree(PROVIDER.folder, tmp_path / "cute")
    path = tmp_path / "cute" / "compute_block_sparsity.py"
    old, new = FAULTS.get(name, ("Boolean(has_unmasked and (not has_masked))",
                                 "Boolean(has_unmasked)"))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    found = verdicts(of(Provider("faulty", PROVIDER.cute, tmp_path / "cute"), "causal"))
    wanted = Verdict.REFUTED if name in FAULTS else Verdict.UNSUPPORTED
    assert found["sampling-sound causal"] is wanted, found


def test_the_installed_fa4_switches_it_on_for_nothing() -> None:
    assert switched_on(PROVIDER) == {} and configurations(PROVIDER) == []


@pytest.mark.releases
def test_what_a_release_switches_it_on_for() -> None:
    release = of_release(find("0.33.0"))
    with release.served():
        found = configurations(release)
    assert {c.mask for c in found} == {
        "mm_prefix", "mm_prefix_no_window", "mm_prefix_clamped", "rswa"}
    rows = of(release, "mm_prefix_no_window", Tile(128, 128))
    assert set(verdicts(rows).values()) == {Verdict.PROVED}
    assert Verdict.REFUTED in verdicts(of(release, "rswa", Tile(128, 128))).values()
