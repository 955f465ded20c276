"""Tables at the edge of mapped memory: the arithmetic, and what the driver's answers become."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.fa4 import Sequences, resident
from kernels.guarded import WORD, Guarded, GuardError, _asked, _Words, first_word, mapped_bytes

GRANULE = 2 * 2**20
WORDS = st.integers(0, 2**24)


@given(WORDS, st.sampled_from([2**16, GRANULE]))
def test_what_is_mapped_is_whole_granules_and_no_more_than_needed(words: int, granule: int) -> None:
    size = mapped_bytes(words, granule)
    assert size % granule == 0 and size >= max(words * WORD, 1)
    assert size - granule < max(words * WORD, 1)


@given(WORDS, st.booleans())
def test_a_table_touches_one_edge_and_stays_inside(words: int, at_end: bool) -> None:
    capacity = mapped_bytes(words, GRANULE) // WORD
    first = first_word(words, capacity, at_end=at_end)
    assert 0 <= first and first + words <= capacity
    assert first + words == capacity if at_end else first == 0


def test_torch_is_told_where_the_words_lie() -> None:
    told = _Words(4096, 7).__cuda_array_interface__
    assert (told["data"], told["shape"]) == ((4096, False), (7,))
    assert np.dtype(told["typestr"]) == np.int32


def test_an_error_of_the_driver_is_one_line() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert _asked("cuMemCreate", (driver.CUresult.CUDA_SUCCESS, 5)) == 5
    assert _asked("cuMemMap", (driver.CUresult.CUDA_SUCCESS,)) is None
    with pytest.raises(GuardError, match=r"^cuMemMap: CUDA_ERROR_OUT_OF_MEMORY$"):
        _asked("cuMemMap", (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,))


def test_regions_are_used_again_and_every_aux_tensor_is_placed() -> None:
    """On memory of the host, which has no edges."""
    import torch

    from kernels.guarded import Region

    regions = [Region(0, 0, 400, torch.zeros(size, dtype=torch.int32)) for size in (10, 100, 100)]
    held = Guarded(free=list(regions))
    lengths = np.array([3, 4], np.int32)
    on = resident(Sequences(lengths, lengths, {"ranges": np.arange(40).reshape(2, 10, 2)}),
                  {"window": 7}, "cpu")
    for at_end in (True, False):
        there = held.tables(on, at_end=at_end)
        assert there.tables.keys() == on.tables.keys() and there.seqlens_q is on.seqlens_q
        assert torch.equal(there.tables["ranges"], on.tables["ranges"])
        assert int(there.scalars["window"]) == 7
        assert len(held.used) == 3 and not held.free
        base = next(each.whole for each in regions
                    if each.whole.untyped_storage().data_ptr()
                    == there.tables["ranges"].untyped_storage().data_ptr())
        assert there.tables["ranges"].storage_offset() == (60 if at_end else 0)
        assert len(base) == 100
