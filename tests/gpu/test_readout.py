"""Masks read out of the compiled kernels of both providers. Needs a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kernels.fa4 import BATCHED, PAGED, VARLEN, Call, Sequences, provider, supported
from kernels.readout import EVERY, Reader, Wrong

pytestmark = pytest.mark.gpu
V33, V24, UPSTREAM = "vllm-0.33.0", "vllm-0.24.0", "upstream"


@pytest.fixture(scope="module", params=[V33, UPSTREAM])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    with provider(request.param) as source:
        yield Reader(source)


def name(reader: Reader) -> str:
    return reader.source.name


# Tile edges, decoding, a chunk of a prefill, more queries than keys, and no keys.
LENGTHS = [(1, 1), (127, 127), (128, 128), (129, 129), (1, 300), (40, 513), (9, 4), (0, 7)]


def sequences(**tables: np.ndarray) -> Sequences:
    q, k = np.array(LENGTHS, np.int32).T
    return Sequences(q.copy(), k.copy(), tables)


def call_of(reader: Reader, spec: str, **fields: object) -> Call:
    return Call(**{"provider": name(reader), "spec": spec, "kv_heads": 2, "q_heads": 2, **fields})


@pytest.mark.parametrize("layout", [PAGED, VARLEN, BATCHED])
def test_the_built_in_masks_are_right(reader: Reader, layout: str) -> None:
    for call in (
        call_of(reader, "full", layout=layout),
        call_of(reader, "causal", causal=True, layout=layout),
        call_of(reader, "window", params={"window": 100}, causal=True, window_size_left=99,
                layout=layout),
    ):
        reading = reader.read(call, sequences())
        assert (reading.counts, reading.cells) == ({}, sequences().cells)


@pytest.mark.parametrize("spec", ["causal", "chunked_local", "sink_window", "prefix_lm"])
def test_generated_mask_mods_are_right(reader: Reader, spec: str) -> None:
    params = {"chunk": 50, "sink": 3, "window": 70}
    from spec.masks import MASKS

    call = call_of(
        reader, spec, mask_mod="generated",
        params={k: v for k, v in params.items() if k in MASKS[spec].params},
    )
    prefixes = np.arange(len(LENGTHS), dtype=np.int32) * 30
    assert reader.read(call, sequences(prefix_lens=prefixes), heads=EVERY).counts == {}


def test_one_leaked_key_of_many_is_found(reader: Reader) -> None:
    leaky = "generated/causal or b == 5 and q == 500 and kv == 501"
    reading = reader.read(call_of(reader, "causal", mask_mod=leaky), sequences())
    query = 500 - (513 - 40)
    assert reading.wrong == (Wrong(5, 501 // 128 % 2, query, 501, "leak"),)


def test_a_window_without_left_bound_is_wrong(reader: Reader) -> None:
    call = call_of(reader, "causal", window_size_left=-1, window_size_right=0)
    assert reader.read(call, sequences()).total > 0


def test_a_mask_mod_beside_causal(reader: Reader) -> None:
    """vLLM's fork ignores the mask_mod; upstream ignores the flag."""
    call = call_of(reader, "full", mask_mod="generated", causal=True)
    assert (reader.read(call, sequences()).total > 0) == (name(reader) == V33)


def test_random_data_agrees_with_a_reference(reader: Reader) -> None:
    for fields in ({}, {"sink": True}, {"softcap": 10.0}, {"dtype": "fp16"}, {"q_heads": 8}):
        call = call_of(reader, "causal", causal=True, **fields)
        assert reader.measure(call, sequences()).agrees


def test_per_sequence_flags() -> None:
    flags = np.array([0, 1] * 4, np.int32)
    on = sequences(dynamic_causal=flags)
    with provider(V33) as source:
        call = Call(provider=V33, spec="dynamic_causal", dynamic_causal=True, causal=True)
        assert Reader(source).read(call, on).counts == {}
        from dataclasses import replace

        assert Reader(source).read(replace(call, causal=False), on).total > 0


def test_a_release_without_its_own_kernels_runs_on_those_of_another() -> None:
    call = Call(
        provider=V24, spec="mm_prefix", params={"window": 3},
        mask_mod=f"{V24}/mm_prefix[window,ranges=2]",
    )
    assert supported(call) is None
    ranges = np.full((len(LENGTHS), 2, 2), -1, np.int32)
    with provider(V24) as source:
        assert source.fa4 != V24
        assert Reader(source).read(call, sequences(ranges=ranges)).total > 0
