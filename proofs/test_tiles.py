"""Tile ranges of real FA4 are proved, and faults planted in its source are refuted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.provider import Provider, installed, of_release
from kernels.release import find
from proofs.checks import Row
from proofs.obligation import Verdict
from proofs.tiles import Configuration, configurations, of_configuration
from spec.tiles import Tile

PROVIDER = installed()


def of(provider: Provider, configuration: Configuration) -> dict[str, Row]:
    with provider.served():
        rows = of_configuration(provider, configuration)
    return {row.result.obligation.name: row for row in rows}


def verdicts(provider: Provider, configuration: Configuration) -> dict[str, Verdict]:
    return {name: row.result.verdict for name, row in of(provider, configuration).items()}


@pytest.mark.parametrize("mode", ["full", "causal", "local", "local-left", "local-right"])
@pytest.mark.parametrize("pack", [1, 4])
def test_ranges_of_the_installed_fa4_are_proved(mode: str, pack: int) -> None:
    found = of(PROVIDER, Configuration(mode, Tile(128, 80, pack)))
    assert found.keys() == {"coverage", "interior-unmasked", "no-overflow"}
    for row in found.values():
        assert row.result.verdict is Verdict.PROVED and row.result.killed, row.result.reason
        assert row.compared is not None and row.compared.cells > 1000


def test_splits_partition_the_range_for_every_number_of_them() -> None:
    found = verdicts(PROVIDER, Configuration("local", Tile(128, 64, 4), split=True))
    assert found == dict.fromkeys(("splits-partition", "no-overflow"), Verdict.PROVED)


def test_a_mode_that_is_not_there_is_refused() -> None:
    (row,) = of(PROVIDER, Configuration("dynamic_causal", Tile(128, 128))).values()
    assert row.result.verdict is Verdict.UNSUPPORTED and "flag per sequence" in row.result.reason


def test_every_configuration_has_the_tile_that_fa4_chooses() -> None:
    tiles = {(c.mode, c.tile.tile_n) for c in configurations(PROVIDER)}
    assert ("causal", 80) in tiles and ("local", 64) in tiles and ("local", 128) in tiles


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("mode", ["full", "causal", "local"])
def test_the_range_of_another_architecture_is_proved(arch: str, mode: str) -> None:
    found = of(PROVIDER, Configuration(mode, Tile(128, 64, 4), arch=arch))
    assert found.keys() == {"coverage", "no-overflow"}
    for row in found.values():
        obligation = row.result.obligation
        assert row.result.verdict is Verdict.PROVED and row.result.killed, row.result.reason
        assert obligation.arch == arch and "is not lifted" in obligation.bounds
        assert row.compared is not None and row.compared.cells > 1000


@pytest.mark.parametrize(("file", "old", "new", "verdict"), [
    ("block_info.py", "n_idx_right = n_idx if const_expr(self.is_causal)",
     "n_idx_right = n_idx - 1 if const_expr(self.is_causal)", Verdict.REFUTED),
    ("flash_fwd_sm100.py", "self.is_causal,\n            self.is_local,\n            self.is_split",
     "self.is_local,\n            self.is_local,\n            self.is_split", Verdict.UNSUPPORTED),
])
def test_a_fault_of_another_architecture_shows(
    file: str, old: str, new: str, verdict: Verdict, tmp_path: Path
) -> None:
    shutil.copytree(PROVIDER.folder, tmp_path / "cute")
    path = tmp_path / "cute" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    faulty = Provider("faulty", PROVIDER.cute, tmp_path / "cute")
    found = of(faulty, Configuration("causal", Tile(256, 128), arch="sm_100"))
    assert found["coverage"].result.verdict is verdict, found["coverage"].result


RIGHT = "n_idx_right = n_idx if const_expr(self.is_causal) else n_idx + self.window_size_right"
PER_SPLIT = "else (n_block_max - n_block_min + num_splits - 1) // num_splits"
FAULTS = {
    "an end too low": ("block_info.py", RIGHT, RIGHT + " - 1", "local", False, "coverage"),
    "a beginning too high": (
        "block_info.py", "n_block_min = cutlass.max(n_idx_left // self.tile_n, 0)",
        "n_block_min = cutlass.max(cute.ceil_div(n_idx_left, self.tile_n), 0)", "local", False,
        "coverage"),
    "max for min": (
        "block_info.py", "n_block_max = min(n_block_max, cute.ceil_div(n_idx_right, self.tile_n))",
        "n_block_max = max(n_block_max, cute.ceil_div(n_idx_right, self.tile_n))", "causal", False,
        "coverage"),
    "masked tiles begin too late": (
        "block_info.py", "return cutlass.max(n_block_min, n_idx_right // self.tile_n)",
        "return cutlass.max(n_block_min, n_idx_right // self.tile_n + 1)", "causal", False,
        "interior-unmasked"),
    "a tile twice": (
        "flash_fwd_sm90.py", "                n_block_max -= 1\n", "", "causal", False, "coverage"),
    "splits that overlap": (
        "block_info.py", "n_block_max = cutlass.min(n_block_min + num_n_blocks_per_split, ",
        "n_block_max = cutlass.min(n_block_min + num_n_blocks_per_split + 1, ", "causal", True,
        "splits-partition"),
    "a last split too short": (
        "block_info.py", PER_SPLIT, "else (n_block_max - n_block_min) // num_splits", "causal",
        True, "splits-partition"),
}


SAID = {
    "an end too low":
        "one key on the right, at the window's right bound, lies in no tile that is visited; it "
        "holds with `window_size_right + 1` for `window_size_right` in n_block_max",
    "a beginning too high":
        "up to 127 keys on the left, at the window's left bound, lie in no tile that is visited",
    "max for min":
        "on the witness tiles up to 1 are visited, though 0 is the last that holds a key; it holds "
        "with `min` for `max` in n_block_max",
    "masked tiles begin too late":
        "a tile without an element mask holds up to 126 keys on the right of the causal bound",
    "a tile twice": "on the witness visits 0 and 1 take the same tile",
    "splits that overlap": "on the witness split 0 is tiles 0 to 2, the next begins at 1",
    "a last split too short": "on the witness split 1 is tiles 0 to 0, the last ends at 0, and the "
                              "whole range is 0 to 1",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_source_is_refuted_and_named(name: str, tmp_path: Path) -> None:
    file, old, new, mode, split, obligation = FAULTS[name]
    shutil.copytree(PROVIDER.folder, tmp_path / "cute")
    path = tmp_path / "cute" / file
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    faulty = Provider("faulty", PROVIDER.cute, tmp_path / "cute")
    rows = of(faulty, Configuration(mode, Tile(128, 128), split))
    row = rows[obligation]
    assert row.result.verdict is Verdict.REFUTED, row.result
    assert row.diagnosis is not None and row.diagnosis.sentence.startswith(SAID[name])
    proved = Verdict.PROVED if "witness" not in SAID[name] or "holds with" in SAID[name] else \
        Verdict.UNKNOWN
    assert row.diagnosis.verdict is proved
    assert all(each.diagnosis is None for each in rows.values()
               if each.result.verdict is not Verdict.REFUTED)


@pytest.mark.releases
@pytest.mark.parametrize("mode", ["dynamic_causal", "dynamic_causal-local"])
@pytest.mark.parametrize("split", [False, True])
def test_flags_per_sequence_keep_every_visible_tile(mode: str, split: bool) -> None:
    found = verdicts(of_release(find("0.33.0")), Configuration(mode, Tile(128, 128, 4), split))
    assert set(found.values()) == {Verdict.PROVED} and len(found) == 3 + split
