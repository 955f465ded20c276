"""Pages of identity matrices that the sequences of a launch share."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from kernels.ahead import launch
from kernels.fa4 import Call, torch_dtype

if TYPE_CHECKING:
    import torch

# Where NaN lies beyond a sequence: nowhere, in the page table's unused entries, or also in the
# unused slots of the last page.
NOWHERE, UNUSED, SLOTS = "nowhere", "pages", "slots"
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Pages:
    """Physical pages that every sequence shares, by what stands in them.

    A page whose first slot is `o` keys after the first key of the launch has, in slot s, the
    one-hot row of key o + s. `step` divides every such `o`. Then come a page of zeros and one of
    what lies beyond a sequence and, if `tails`, each page again for every number of slots in use.
    """

    k: torch.Tensor
    v: torch.Tensor
    step: int
    keys: int
    tails: bool

    @property
    def size(self) -> int:
        return self.v.shape[1]

    @property
    def zero(self) -> int:
        return (self.keys + self.size - self.step) // self.step

    def table(self, first: int, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """The page table of a launch whose first key is `first`: int32 [sequences, width]."""
        from kernels.comparison import place_pages

        found = lengths.new_empty(len(lengths), width)
        launch(
            place_pages, len(lengths), found, lengths, width, self.size, self.keys, self.step,
            self.zero, int(self.tails), first, BLOCK=BLOCK,
        )
        return found


def pages(call: Call, nan: str, device: str) -> Pages:
    import torch

    size, keys = call.page_size, call.kv_heads * call.head_dim_v
    step = gcd(size, call.head_dim_v)
    shift = torch.arange(-(size - step), keys, step, device=device)
    slot = torch.arange(size, device=device)
    key = torch.arange(keys, device=device)
    dtype = torch_dtype(call)
    v = ((shift[:, None] + slot)[..., None] == key).to(dtype)
    count, beyond = len(shift), float("nan") if nan != NOWHERE else 0.0
    v = torch.cat([v, torch.zeros_like(v[:1]), torch.full_like(v[:1], beyond)])
    k = torch.zeros(count + 2, size, call.kv_heads * call.head_dim, dtype=dtype, device=device)
    k[-1] = beyond
    if nan == SLOTS:
        unused = slot[None, :] > slot[: size - 1, None]
        more = [
            each[: count + 1, None].expand(-1, size - 1, -1, -1)
            .masked_fill(unused[None, :, :, None], beyond).flatten(0, 1)
            for each in (k, v)
        ]
        k, v = torch.cat([k, more[0]]), torch.cat([v, more[1]])
    return Pages(
        k.view(-1, size, call.kv_heads, call.head_dim),
        v.view(-1, size, call.kv_heads, call.head_dim_v), step, keys, nan == SLOTS,
    )
