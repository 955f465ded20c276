"""Calls: what providers can do, what is compiled, what sequences mean. No kernel runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.fa4 import (
    BATCHED,
    PAGED,
    VARLEN,
    Call,
    Fa4Error,
    Sequences,
    compile_key,
    features,
    generated_target,
    offsets,
    provider,
    releases,
    resident,
    shapes,
    supported,
)  # fmt: skip

ROOT = Path(__file__).parents[1]
CALL = Call(provider="upstream", spec="causal", causal=True)


def of(**fields: Any) -> Call:
    return replace(CALL, **fields)


@pytest.mark.parametrize("reason, fields", [
    ("no splits on SM90", {"num_splits": 3}),
    ("no splits on SM90", {"num_splits": 0}),
    ("has no dynamic_causal", {"dynamic_causal": True}),
    ("query heads must be a multiple", {"q_heads": 3, "kv_heads": 2}),
    ("head dims are 8 to 256", {"head_dim": 512}),
    ("head dims are multiples of 8", {"head_dim_v": 100, "layout": VARLEN}),
    ("multiples of 16", {"head_dim": 72}),
    ("no dtype fp8", {"dtype": "fp8"}),
    ("no layout ragged", {"layout": "ragged"}),
    ("no kernels for sm_100", {"arch": "sm_100"}),
    ("SM80's kernels do not compile for sm_90a", {"arch": "sm_80", "layout": VARLEN}),
])
def test_a_call_outside_the_domain_has_its_reason(reason: str, fields: dict[str, Any]) -> None:
    found = supported(of(**fields))
    assert found is not None and found.startswith("upstream: ") and reason in found


@pytest.mark.parametrize("fields", [
    {}, {"layout": VARLEN}, {"layout": BATCHED, "q_heads": 16, "kv_heads": 2},
    {"page_size": 1}, {"page_size": 256}, {"head_dim": 192}, {"dtype": "fp16", "sink": True},
    {"head_dim": 72, "head_dim_v": 72, "layout": VARLEN},
])
def test_a_call_inside_the_domain_has_none(fields: dict[str, Any]) -> None:
    assert supported(of(**fields)) is None


def test_sm80_is_for_an_sm80_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    assert supported(of(arch="sm_80", layout=VARLEN)) is None
    assert "no paged keys" in (supported(of(arch="sm_80")) or "")
    assert "no sink" in (supported(of(arch="sm_80", layout=VARLEN, sink=True)) or "")


def test_an_unknown_provider_is_a_reason() -> None:
    assert "no provider 'fa5'" in (supported(of(provider="fa5")) or "")


def test_what_is_known_only_when_a_kernel_runs_is_not_in_its_key() -> None:
    key = compile_key(of(window_size_left=5))
    assert key == compile_key(of(window_size_left=900, kv_heads=2, q_heads=2, spec="window"))
    assert key == compile_key(of(window_size_left=5), sequences=256)
    others = [
        of(), of(window_size_left=-1), of(window_size_left=5, q_heads=2), of(dtype="fp16"),
        of(window_size_left=5, num_splits=2), of(window_size_left=5, sink=True),
    ]
    keys = {compile_key(other) for other in others} | {compile_key(of(window_size_left=5), 257)}
    assert key not in keys and len(keys) == len(others) + 1


def test_a_number_that_is_compiled_in_is_in_the_key() -> None:
    own = of(mask_mod="maskproof/mm_prefix[window]", params={"window": 4})
    assert compile_key(own) != compile_key(replace(own, params={"window": 5}))
    written = of(mask_mod="generated", spec="window", params={"window": 4})
    assert compile_key(written) == compile_key(replace(written, params={"window": 5}))
    assert compile_key(written) != compile_key(replace(written, spec="causal"))
    assert compile_key(replace(written, spec="full", mask_mod="generated/window")) == (
        compile_key(written)
    )


def test_a_generated_mask_mod_reads_its_parameters_from_tables() -> None:
    target = generated_target(of(spec="sink_window & document", mask_mod="generated"))
    assert target.layouts == (("document_ids", "sink", "window"),) and target.symbols == ()


BATCH = Sequences(
    np.array([2, 0, 3], np.int32), np.array([4, 5, 3], np.int32),
    {
        "cu_seqlens_q": np.array([0, 2, 2, 5], np.int32),
        "ranges": np.arange(18, dtype=np.int32).reshape(3, 3, 2),
        "query_ranges": np.arange(10, dtype=np.int32).reshape(5, 2),
        "prefix_lens": np.array([7, 8, 9], np.int32),
        "document_ids": np.arange(6, dtype=np.int32),
    },
)


def test_selected_sequences_keep_what_is_said_of_them() -> None:
    some = BATCH.select([2, 0])
    assert (some.rows, some.keys, some.cells, len(some)) == (5, 7, 17, 2)
    assert some.tables["cu_seqlens_q"].tolist() == [0, 3, 5]
    assert some.tables["ranges"].tolist() == BATCH.tables["ranges"][[2, 0]].tolist()
    assert some.tables["query_ranges"][:, 0].tolist() == [4, 6, 8, 0, 2]
    assert some.tables["prefix_lens"].tolist() == [9, 7]
    assert some.tables["document_ids"].tolist() == BATCH.tables["document_ids"].tolist()
    assert len(BATCH.select([])) == 0


def test_numbers_arrive_on_the_device_as_they_are() -> None:
    on = resident(BATCH, {"window": 12}, "cpu")
    assert on.cu_seqlens_k.tolist() == offsets(BATCH.seqlens_k).tolist() == [0, 4, 9, 12]
    for name, table in BATCH.tables.items():
        assert np.array_equal(on.tables[name].numpy(), table)
    assert on.scalars["window"].tolist() == [12]
    assert all(part.data_ptr() % 16 == 0 for part in (*on.tables.values(), on.seqlens_q))


def test_fake_tensors_make_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._subclasses import fake_tensor

    from kernels.ahead import fake_tensors

    def touch(device: Any) -> None:
        raise AssertionError(f"{device} was touched")

    monkeypatch.setattr(fake_tensor, "init_gpu_context", touch)
    with fake_tensors():
        assert torch.empty(3, device="cuda").device.type == "cuda"
    with pytest.raises(AssertionError, match="was touched"), fake_tensor.FakeTensorMode():
        torch.empty(3, device="cuda")


def test_tensors_have_the_shapes_of_their_layout() -> None:
    found = {
        layout: {name: shape for name, (shape, _) in shapes(of(layout=layout), BATCH).items()}
        for layout in (PAGED, VARLEN, BATCHED)
    }
    assert found[VARLEN]["out"] == (5, 1, 128) and found[VARLEN]["v"] == (12, 1, 128)
    assert found[BATCHED]["q"] == (3, 3, 1, 128) and found[BATCHED]["lse"] == (3, 1, 3)
    assert found[PAGED]["page_table"] == (3, 1) and found[PAGED]["k"] == (3, 128, 1, 128)


def test_no_solver_and_no_compiler_is_imported_to_describe_a_call() -> None:
    code = (
        "import sys, kernels.fa4 as f, kernels.readout; f.supported(f.Call(provider='upstream', "
        "spec='causal')); "
        "print({'z3', 'torch', 'cutlass', 'triton', 'flash_attn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


COMPILE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from kernels.fa4 import Call, provider
calls = [Call(**fields) for fields in json.load(sys.stdin)]
with provider(calls[0].provider) as source:
    for call in calls:
        source.compile(call, 300)
    print(json.dumps([source.fa4, len(source.interface._flash_attn_fwd.compile_cache.cache)]))
"""


def compiled(cache: Path, *calls: Call) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=300,
        input=json.dumps([asdict(call) for call in calls]),
        env={**os.environ, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_whole_kernels_compile_without_a_gpu_and_are_kept(tmp_path: Path) -> None:
    calls = [
        of(), of(layout=VARLEN, q_heads=4), of(layout=BATCHED, dtype="fp16"), of(page_size=16),
        of(mask_mod="maskproof/mm_prefix[window]", params={"window": 5}, causal=False),
        of(mask_mod="generated", spec="sink_window", params={"window": 5, "sink": 2}),
    ]
    compiled(tmp_path, *calls)
    objects = sorted(tmp_path.rglob("*.o"))
    assert len(objects) >= len(calls)
    compiled(tmp_path, *calls)
    assert sorted(tmp_path.rglob("*.o")) == objects


@pytest.mark.releases
def test_a_release_says_what_it_can() -> None:
    has = features("vllm-0.33.0")
    assert has.dynamic_causal and has.splits_on_sm90 and has.largest_head_dim == 512
    assert supported(of(provider="vllm-0.33.0", num_splits=3)) is None
    assert "vllm-0.33.0" in [release.name for release in releases()]


@pytest.mark.releases
def test_a_release_that_does_not_import_borrows_kernels() -> None:
    call = of(provider="vllm-0.24.0", mask_mod="vllm-0.24.0/mm_prefix[window,ranges=2]")
    with provider("vllm-0.24.0") as source:
        assert source.fa4.startswith("FA4 of vllm-") and "0.24.0" not in source.fa4
        made, layout = source.mask_mod(call)
        assert layout == ("ranges",) and source.mask_mod(call)[0] is made
    with provider("vllm-0.33.0") as source:
        assert source.fa4 == "FA4 of vllm-0.33.0"
        own = replace(call, mask_mod="vllm-0.33.0/mm_prefix[window]", params={"window": 3})
        assert source.mask_mod(own)[1] == ("query_ranges", "cu_seqlens_q")
        assert source.mask_mod(own)[0].__wrapped__.__cute_hash__


def test_an_unknown_mask_mod_names_those_that_there_are() -> None:
    with (
        provider("upstream") as source,
        pytest.raises(Fa4Error, match=r"no mask_mod .*maskproof/rswa"),
    ):
        source.mask_mod(of(mask_mod="maskproof/none"))


def test_a_mask_mod_needs_its_parameters() -> None:
    with provider("upstream") as source, pytest.raises(Fa4Error, match="needs a value for window"):
        source.mask_mod(of(mask_mod="maskproof/mm_prefix[window]"))
