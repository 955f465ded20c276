"""Calls of compiled FlashAttention-4 kernels: what is asked of which provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BATCHED, VARLEN, PAGED = "batched", "varlen", "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel call, apart from the sequences that it is given.

    `provider` is "upstream" (flash-attn-4's `flash_attn.cute`) or the name of a release, as
    "vllm-0.33.0". `mask_mod` is the name of a target, as "vllm-0.33.0/mm_prefix[window]", or None.
    `window_size_left` and `window_size_right` are inclusive distances, None for no bound.
    `num_splits` 0 lets the kernel choose. `spec` is the mask that the call claims to compute, in
    the text form, with `params`.
    """

    provider: str
    spec: str
    params: Mapping[str, int] = field(default_factory=dict)
    mask_mod: str | None = None
    causal: bool = False
    window_size_left: int | None = None
    window_size_right: int | None = None
    dynamic_causal: bool = False
    arch: str = "sm_90"
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"
    q_heads: int = 1
    kv_heads: int = 1
    layout: str = PAGED
    page_size: int = 128
    num_splits: int = 1
    pack_gqa: bool | None = None
    sink: bool = False
