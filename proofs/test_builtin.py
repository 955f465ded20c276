"""Built-in masks of real FA4 are proved, and faults planted in its source are refuted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.provider import Provider, installed, of_release
from kernels.release import find
from proofs.builtin import Configuration, configurations, of_configuration
from proofs.checks import Row
from proofs.obligation import Verdict
from spec.tiles import Tile

PROVIDER = installed()
SMALL = Tile(64, 32)


def of(provider: Provider, configuration: Configuration) -> list[Row]:
    with provider.served():
        return of_configuration(provider, configuration)


def verdicts(rows: list[Row]) -> dict[str, set[Verdict]]:
    found: dict[str, set[Verdict]] = {}
    for row in rows:
        found.setdefault(row.result.obligation.name, set()).add(row.result.verdict)
    return found


PROVED = {Verdict.PROVED}


@pytest.mark.parametrize("mode", ["full", "causal", "local", "local-left", "local-right"])
@pytest.mark.parametrize("pack", [1, 4])
def test_elements_of_the_installed_fa4_are_proved(mode: str, pack: int) -> None:
    rows = of(PROVIDER, Configuration(mode, Tile(128, 80, pack)))
    found = verdicts(rows)
    assert all(verdict == PROVED for verdict in found.values()), found
    wanted = {"ownership", "no-overflow", "element-mask"}
    assert found.keys() == wanted | ({"row-limit"} if pack > 1 and mode != "full" else set())
    for row in rows:
        assert row.result.killed and row.compared is not None and row.compared.cells > 1000
        assert 0 < row.compared.visible < row.compared.cells


@pytest.mark.parametrize("pack", [1, 4])
def test_any_mask_mod_is_called_on_its_own_cell(pack: int) -> None:
    found = verdicts(of(PROVIDER, Configuration("mask_mod", Tile(64, 32, pack), wrapped=True)))
    assert found == dict.fromkeys(
        ("ownership", "wrapped-index", "no-overflow", "reads-in-bounds", "element-mask"), PROVED)


def test_what_is_taken_for_granted_is_named() -> None:
    rows = of(PROVIDER, Configuration("mask_mod", SMALL, wrapped=True))
    bounds = {row.result.obligation.bounds for row in rows}
    assert any("exact unsigned division" in text for text in bounds)
    packed = of(PROVIDER, Configuration("causal", Tile(64, 32, 4)))
    assert any("another lane" in row.result.obligation.bounds for row in packed)


def test_every_configuration_has_the_tile_that_fa4_chooses() -> None:
    with PROVIDER.served():
        some, every = configurations(PROVIDER), configurations(PROVIDER, full=True)
    assert {c.tile.tile_n for c in some if c.mode == "local"} == {64, 128}
    assert set(some) <= set(every) and {c.tile.pack for c in every} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("mode", ["local", "mask_mod"])
def test_the_older_kernel_is_proved_too(mode: str) -> None:
    configuration = Configuration(mode, Tile(128, 64, 8), mode == "mask_mod", "sm_80")
    rows = of(PROVIDER, configuration)
    assert all(verdict == PROVED for verdict in verdicts(rows).values())
    assert {row.result.obligation.arch for row in rows} == {"sm_80"}


def test_the_kernel_with_tensor_memory_is_proved_as_far_as_it_is_modelled() -> None:
    rows = of(PROVIDER, Configuration("local", Tile(128, 64, 2), arch="sm_100"))
    assert all(verdict == PROVED for verdict in verdicts(rows).values())
    assert {row.result.obligation.arch for row in rows} == {"sm_100"}
    (row,) = of(PROVIDER, Configuration("mask_mod", Tile(128, 128), True, "sm_100"))
    assert row.result.verdict is Verdict.UNSUPPORTED and "apply_mask_sm100" in row.result.reason


FAULTS = {
    "a column map of one column in eight": (
        "col_limit // 8 * 2 + min(col_limit % 8, 2)", "col_limit // 8 * 2 + min(col_limit % 8, 1)",
        Configuration("full", SMALL), "element-mask"),
    "a diagonal one too low": (
        "1 + self.seqlen_k - n_block * self.tile_n - self.seqlen_q - thr_col_offset",
        "self.seqlen_k - n_block * self.tile_n - self.seqlen_q - thr_col_offset",
        Configuration("causal", SMALL), "element-mask"),
    "a window one too wide": (
        "causal_row_offset - 1 - self.window_size_left",
        "causal_row_offset - 2 - self.window_size_left", Configuration("local-left", SMALL),
        "element-mask"),
    "a window one too narrow": (
        "causal_row_offset + self.window_size_right",
        "causal_row_offset + self.window_size_right - 1", Configuration("local-right", SMALL),
        "element-mask"),
    "max for min": (
        "col_limit_right = cutlass.min(col_limit_right, seqlenk_col_limit)",
        "col_limit_right = cutlass.max(col_limit_right, seqlenk_col_limit)",
        Configuration("causal", SMALL), "element-mask"),
    "keys past the end": (
        "m = max((s + 1) * MASK_R2P_CHUNK_SIZE - limit, 0)",
        "m = max((s + 1) * MASK_R2P_CHUNK_SIZE - limit - 1, 0)", Configuration("full", SMALL),
        "element-mask"),
    "heads counted as queries": (
        ") // self.qhead_per_kvhead_packgqa\n                causal_row_offset",
        ")\n                causal_row_offset", Configuration("causal", Tile(64, 32, 4)),
        "row-limit"),
    "the row of another lane": (
        "mma_m_idx, r % threads_per_row, width=threads_per_row",
        "mma_m_idx, (r + 1) % threads_per_row, width=threads_per_row",
        Configuration("causal", Tile(64, 32, 4)), "row-limit"),
    "another head": (
        "head_offset = global_row_idx % self.qhead_per_kvhead_packgqa",
        "head_offset = (global_row_idx + 1) % self.qhead_per_kvhead_packgqa",
        Configuration("mask_mod", Tile(64, 32, 4), wrapped=True), "element-mask"),
    "rows that are not wrapped": (
        "_, row_for_mod = divmod(row_for_mod, fastdiv_mods[0])", "pass",
        Configuration("mask_mod", SMALL, wrapped=True), "reads-in-bounds"),
}


def planted(provider: Provider, folder: Path, old: str, new: str) -> Provider:
    shutil.copytree(provider.folder, folder / "cute")
    path = folder / "cute" / "mask.py"
    text = path.read_text()
    assert old in text
    # The SM90 method comes first; later ones may have the same words.
    path.write_text(text.replace(old, new))
    return Provider("faulty", provider.cute, folder / "cute")


SAID = {
    "a column map of one column in eight": "hides up to 6 keys before the end of the sequence",
    "a diagonal one too low": "hides one key too many on the right, at the causal bound",
    "a window one too wide": "keeps one key too many on the left of the window's left bound",
    "a window one too narrow":
        "hides one key too many on the right, at the window's right bound",
    "max for min": "has no bound on the right: the causal bound is missing",
    "keys past the end": "keeps up to 7 keys past the end of the sequence",
    "heads counted as queries":
        "packed rows are taken for queries: their number is not divided by the heads",
    "the row of another lane": "a row is given the query of another row of its thread",
    "another head": "on the witness the mask_mod is asked about head ",
    "rows that are not wrapped":
        "the mask_mod is asked about a query that does not exist, and all else exists",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_source_is_refuted_and_named(name: str, tmp_path: Path) -> None:
    old, new, configuration, obligation = FAULTS[name]
    rows = of(planted(PROVIDER, tmp_path, old, new), configuration)
    assert Verdict.REFUTED in verdicts(rows)[obligation], verdicts(rows)
    for row in rows:
        assert (row.diagnosis is not None) == (row.result.verdict is Verdict.REFUTED)
    said = [row.diagnosis for row in rows if row.diagnosis is not None]
    assert all(each.sentence.startswith(SAID[name]) for each in said), said
    seen_on_the_witness = name == "another head"
    assert {each.verdict for each in said} == {
        Verdict.UNKNOWN if seen_on_the_witness else Verdict.PROVED}


def test_what_no_bound_explains_is_told_of_the_witness(tmp_path: Path) -> None:
    right = FAULTS["a diagonal one too low"][0]
    rows = of(planted(PROVIDER, tmp_path, right, f"{right} + m_block * 2"),
              Configuration("causal", SMALL))
    said = [row.diagnosis for row in rows if row.result.verdict is Verdict.REFUTED]
    assert len(said) == 2
    for each in said:
        assert each is not None and each.verdict is Verdict.UNKNOWN
        assert each.sentence.endswith("beyond the causal bound on the right")


@pytest.mark.releases
@pytest.mark.parametrize("mode", ["dynamic_causal", "dynamic_causal-local"])
def test_flags_per_sequence_are_kept(mode: str) -> None:
    rows = of(of_release(find("0.33.0")), Configuration(mode, Tile(128, 64, 4)))
    assert all(verdict == PROVED for verdict in verdicts(rows).values())


@pytest.mark.releases
def test_a_flag_that_is_dropped_is_refuted(tmp_path: Path) -> None:
    release = of_release(find("0.33.0"))
    old = "col_limit_right if self.dynamic_causal else seqlenk_col_limit"
    faulty = planted(release, tmp_path, old, "col_limit_right")
    found = verdicts(of(faulty, Configuration("dynamic_causal", SMALL)))
    assert Verdict.REFUTED in found["element-mask"], found
