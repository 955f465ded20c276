"""Calls of FA4 mean the mask that is intended, and faults in the code that makes them show."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.dispatch import Flags, of_flags
from kernels.provider import Provider, installed, of_release
from kernels.release import find
from kernels.stand_in import Paths
from proofs.checks import REAL, Row
from proofs.dispatch import NO_BOUND, opened, rows, units
from proofs.dispatch import of_unit as prove_unit
from proofs.element_replay import Disagreement, agrees
from proofs.obligation import Verdict
from proofs.report import explain
from spec.from_text import from_text
from tests.small_vllm import small_vllm

PROVED, REFUTED = Verdict.PROVED, Verdict.REFUTED


def of_unit(provider: Provider, unit: str) -> Row:
    with opened(provider) as mask_mods:
        found = prove_unit(provider, mask_mods, unit)
    return next(row for row in found if row.result.obligation.name == "effective-mask")


def verdicts(found: tuple[Row, ...], name: str = "effective-mask") -> dict[str, Verdict]:
    return {row.result.obligation.target.split("/", 1)[1].removeprefix("dispatch/"):
            row.result.verdict for row in found if row.result.obligation.name == name}


PLAIN = ["plain[causal]", "plain[causal,window]", "plain[bidirectional]",
         "plain[bidirectional,window]"]
MM_PREFIX = ["mm_prefix[window]", "mm_prefix[no-window]", "mm_prefix[clamp]"]


def test_every_call_of_a_right_back_end_is_proved(tmp_path: Path) -> None:
    found = tuple(rows(small_vllm(tmp_path)))
    masks = verdicts(found)
    assert masks == {NO_BOUND: REFUTED, **dict.fromkeys([*PLAIN, *MM_PREFIX, "rswa"], PROVED)}
    assert set(verdicts(found, "no-overflow").values()) == {PROVED}
    for row in found:
        result = row.result
        assert row.replayed == REAL and result.obligation.layer == "dispatch"
        if result.verdict is PROVED:
            assert result.killed == len(result.obligation.mutants) > 0
            assert row.compared is not None and row.compared.cells > 1000
    outside = found[0].result.extra["not_stated"]
    assert "causal=True, window=None, mm_prefix, rswa: the mask_mod rswa alone" in outside
    assert any(line.startswith("causal=False, window=(w, -1): `") for line in outside)


FAULTS = {
    "flag dropped": ("causal=causal, window_size=window", "window_size=window", "plain[causal]"),
    "window dropped": (", window_size=window,", ",", "plain[causal,window]"),
    "sides swapped": ("left, right = (-1, -1) if window_size is None else window_size",
                      "right, left = (-1, -1) if window_size is None else window_size",
                      "plain[causal,window]"),
    "a window one too wide": ("window = (window[0], window[0])",
                              "window = (window[0], window[0] + 1)",
                              "plain[bidirectional,window]"),
    "a window of one side": ("window = (window[0], window[0])", "pass",
                             "plain[bidirectional,window]"),
    "the mask_mod's window one too narrow": ("left = 1 + own[0]", "left = own[0]",
                                             "mm_prefix[window]"),
    "the clamp dropped": ("left if clamp else None", "None", "mm_prefix[clamp]"),
    "the mask_mod dropped": ("mask_mod=mask_mod, aux", "aux", "rswa"),
    "another mask_mod": ("_make_rswa_mask_mod()\n            aux", "None\n            aux", "rswa"),
    "an ignored window of the layer": ("own = self.sliding_window", "own = (-1, -1)",
                                       "mm_prefix[window]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way_to_fa4_is_refuted(name: str, tmp_path: Path) -> None:
    old, new, unit = FAULTS[name]
    row = of_unit(small_vllm(tmp_path, old, new), unit)
    assert row.result.verdict is REFUTED, row.result.reason
    assert row.diagnosis is not None and row.counterexample is not None
    assert row.counterexample.code != row.counterexample.spec
    assert "witness: query" in explain(row)


MISPLACED = {
    "lengths dropped": ("seqused_k=attn_metadata.seq_lens", "seqused_k=None",
                        "seqused_k is left out in place of seq_lens"),
    "a length one short": ("seqused_k=attn_metadata.seq_lens",
                           "seqused_k=attn_metadata.seq_lens - 1",
                           "seqused_k has other values than seq_lens"),
    "other lengths": ("seqused_k=attn_metadata.seq_lens",
                      "seqused_k=attn_metadata.query_start_loc[1:]",
                      "seqused_k has other values than seq_lens"),
    "another sequence's lengths": ("seqused_k=attn_metadata.seq_lens",
                                   "seqused_k=attn_metadata.seq_lens.flip(0)",
                                   "seqused_k has other values than seq_lens"),
    "rows shifted": ("cu_seqlens_q=attn_metadata.query_start_loc",
                     "cu_seqlens_q=attn_metadata.query_start_loc + 1",
                     "cu_seqlens_q has other values than query_start_loc"),
    "another sequence's pages": ("block_table=attn_metadata.block_table",
                                 "block_table=attn_metadata.block_table.roll(1, 0)",
                                 "page_table has other values than block_table"),
    "longest lengths exchanged": ("max_seqlen_q=attn_metadata.max_query_len",
                                  "max_seqlen_q=attn_metadata.max_seq_len",
                                  "max_seqlen_q is max_seq_len in place of max_query_len"),
    "a longest length too short": ("max_seqlen_k=attn_metadata.max_seq_len",
                                   "max_seqlen_k=attn_metadata.max_seq_len - 1",
                                   "max_seqlen_k has other values than max_seq_len"),
    "queries cut by the keys' lengths": ("max_seqlen_k=max_seqlen_k, seqused_k=seqused_k",
                                         "max_seqlen_k=max_seqlen_k, seqused_q=seqused_k, "
                                         "seqused_k=seqused_k",
                                         "seqused_q is seq_lens in place of nothing"),
}


@pytest.mark.parametrize("name", MISPLACED)
@pytest.mark.parametrize("unit", ["plain[causal,window]", "mm_prefix[window]"])
def test_another_sequence_than_the_metadata_s_is_refuted(
    name: str, unit: str, tmp_path: Path
) -> None:
    old, new, said = MISPLACED[name]
    row = of_unit(small_vllm(tmp_path, old, new), unit)
    assert row.result.verdict is REFUTED, row.result.reason
    assert row.diagnosis is not None and said in row.diagnosis.sentence
    assert said in explain(row)


@pytest.mark.parametrize(("old", "new"), [
    ("max_seqlen_k=attn_metadata.max_seq_len", "max_seqlen_k=attn_metadata.max_seq_len + 1"),
    ("block_table=attn_metadata.block_table", "block_table=attn_metadata.block_table[:, :2]"),
])
def test_what_is_computed_from_the_metadata_is_not_judged(
    old: str, new: str, tmp_path: Path
) -> None:
    row = of_unit(small_vllm(tmp_path, old, new), "plain[causal]")
    assert row.result.verdict is Verdict.UNSUPPORTED and "is computed from" in row.result.reason


def test_the_kernel_is_told_what_the_call_is_told(tmp_path: Path) -> None:
    """FA4's own host code is part of the way."""
    provider = small_vllm(tmp_path)
    path = provider.folder / "interface.py"
    first = "    q, k, v, qv = [maybe_contiguous"
    assert path.read_text().count(first) == 1
    path.write_text(path.read_text().replace(first, f"    seqused_q = seqused_k\n{first}"))
    row = of_unit(provider, "plain[causal]")
    assert row.result.verdict is REFUTED, row.result.reason
    assert row.diagnosis is not None
    assert "seqused_q is seq_lens in place of nothing" in row.diagnosis.sentence


def test_a_fault_inside_apply_mask_is_an_error(tmp_path: Path) -> None:
    provider = small_vllm(tmp_path)
    path = provider.folder / "mask.py"
    right, wrong = "row_idx + local_row_offset_right", "row_idx + 1 + local_row_offset_right"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    with opened(provider) as mask_mods:
        (row,) = prove_unit(provider, mask_mods, "plain[causal,window]")
    assert row.result.verdict is Verdict.ERROR and "apply_mask of local keeps" in row.result.reason


def test_what_cannot_be_taken_apart_is_unsupported(tmp_path: Path) -> None:
    provider = small_vllm(tmp_path, "if attn_metadata.rswa_prefix_lens is not None:",
                          "if get_current_vllm_config_or_none.rswa:")
    with opened(provider) as mask_mods:
        (row,) = prove_unit(provider, mask_mods, "plain[causal]")
    assert row.result.verdict is Verdict.UNSUPPORTED
    assert "forward cannot be taken apart" in row.result.reason


def test_a_stand_in_s_value_is_unsupported(tmp_path: Path) -> None:
    provider = small_vllm(tmp_path, "if attn_metadata.rswa_prefix_lens is not None:",
                          "if AttentionBackend.rswa:")
    with opened(provider) as mask_mods:
        (row,) = prove_unit(provider, mask_mods, "plain[causal]")
    assert row.result.verdict is Verdict.UNSUPPORTED
    assert "the value of vllm.v1.attention.backend.AttentionBackend.rswa" in row.result.reason


def test_the_installed_fa4_takes_minus_one_for_a_distance() -> None:
    (row,) = rows(installed())
    assert row.result.verdict is REFUTED and row.replayed == REAL
    assert row.diagnosis is not None and "no key is visible" in row.diagnosis.sentence
    assert "the mask_mod is the whole mask" in row.result.extra["meaning"]
    assert units(installed()) == [NO_BOUND]


@pytest.mark.parametrize("wrong", ["kv < q", "kv <= q + 1", "q - kv <= 3"])
def test_an_effective_mask_that_apply_mask_does_not_keep_is_found(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = installed()
    with provider.served():
        one = of_flags(provider, Flags(True, None, None, False, False), Paths([]))
        cells = agrees(provider, one)
        assert cells is not None and cells > 300
        monkeypatch.setattr("proofs.element_replay.bounded", lambda how, reads: from_text(wrong))
        with pytest.raises(Disagreement, match="keeps another cell"):
            agrees(provider, replace(one, mask=from_text(wrong)))


@functools.cache
def of_version(version: str) -> tuple[Row, ...]:
    return tuple(rows(of_release(find(version))))


DYNAMIC = ["dynamic_causal[window]", "dynamic_causal[no-window]"]
WRONG = {
    "0.33.0": [NO_BOUND, "rswa"],
    "0.28.0": [NO_BOUND, "rswa"],
    "0.27.1": [NO_BOUND, "rswa", *MM_PREFIX],
    "0.26.0": [NO_BOUND],
    "0.24.0": [NO_BOUND, *MM_PREFIX[:2], *DYNAMIC],
}


@pytest.mark.releases
@pytest.mark.parametrize("version", WRONG)
def test_faults_enter_and_leave(version: str) -> None:
    found = verdicts(of_version(version))
    assert sorted(name for name, v in found.items() if v is REFUTED) == sorted(WRONG[version])
    assert set(found.values()) == {PROVED, REFUTED}
    assert {*PLAIN, *DYNAMIC, *MM_PREFIX[:2]} <= found.keys()
    assert set(verdicts(of_version(version), "no-overflow").values()) == {PROVED}


SAID = {
    ("0.33.0", "rswa"): "the mask_mod is never called under causal=True: the mask is causal",
    ("0.24.0", "dynamic_causal[no-window]"):
        "the tensor dynamic_causal is never read under causal=False: the mask is full",
    ("0.24.0", "dynamic_causal[window]"): "the tensor dynamic_causal is never read",
    ("0.33.0", NO_BOUND): "every key is visible",
}


@pytest.mark.releases
@pytest.mark.parametrize(("version", "unit"), SAID)
def test_a_fault_is_named_in_one_sentence(version: str, unit: str) -> None:
    (row,) = [row for row in of_version(version) if row.result.obligation.target.endswith(unit)
              and row.result.obligation.name == "effective-mask"]
    assert row.diagnosis is not None and SAID[version, unit] in row.diagnosis.sentence


@pytest.mark.releases
def test_the_two_providers_mean_different_things_by_a_mask_mod_under_causal() -> None:
    row = of_version("0.33.0")[0]
    assert "the mask_mod is never called and the mask is `kv <= q`" in row.result.extra["meaning"]
    assert row.replayed == REAL
