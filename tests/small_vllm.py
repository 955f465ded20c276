"""A tree as small as a vLLM may be: a FlashAttention back end that calls an FA4 as vLLM does."""

from __future__ import annotations

import shutil
from pathlib import Path

from kernels.provider import Provider, installed
from kernels.release import BACKEND
from kernels.vllm import CUTE

BACK_END = '''
import functools
from dataclasses import dataclass

import torch

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version


class FlashAttentionBackend(AttentionBackend):
    pass


@dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    max_query_len: int
    seq_lens: torch.Tensor
    max_seq_len: int
    block_table: torch.Tensor
    causal: bool = True
    mm_prefix_query_range_tensor: torch.Tensor | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    rswa_window_tensor: torch.Tensor | None = None


class FlashAttentionImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                 kv_cache_dtype):
        self.version = get_flash_attn_version()
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
        keys, values = kv_cache.unbind(1)
        causal, window = attn_metadata.causal, self.sliding_window
        if window is not None and window[1] == 0 and causal is False:
            window = (window[0], window[0])
        mask_mod, aux = None, None
        if attn_metadata.mm_prefix_query_range_tensor is not None and causal:
            own = self.sliding_window
            left = 1 + own[0] if own is not None and own[0] >= 0 else None
            clamp = getattr(layer, "mm_prefix_clamp_sliding_window", False) and left is not None
            mask_mod = _make_mm_prefix_mask_mod(left, left if clamp else None)
            aux = [attn_metadata.mm_prefix_query_range_tensor, attn_metadata.query_start_loc]
            causal, window = False, None
        if attn_metadata.rswa_prefix_lens is not None:
            mask_mod = _make_rswa_mask_mod()
            aux = [attn_metadata.rswa_prefix_lens, attn_metadata.rswa_window_tensor]
            window = None
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=output, cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len, seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len, causal=causal, window_size=window,
            block_table=attn_metadata.block_table, mask_mod=mask_mod, aux_tensors=aux,
        )
        return output


@functools.cache
def _make_mm_prefix_mask_mod(left, clamp):
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from vllm.vllm_flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        q = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        row = aux_tensors[1][batch_idx[0]] + ssa_to_scalar(q_idx)
        first = scalar_to_ssa(aux_tensors[0][row, 0], Int32)
        last = scalar_to_ssa(aux_tensors[0][row, 1], Int32)
        seen = kv_idx <= q
        same = (kv_idx >= first) & (kv_idx <= last)
        if cutlass.const_expr(left is not None):
            near = (q - kv_idx) < scalar_to_ssa(Int32(left), Int32)
            seen = seen & near
            if cutlass.const_expr(clamp is not None):
                same = same & near
        return seen | same

    return mask_mod


def _make_rswa_mask_mod():
    import cutlass.cute as cute
    from cutlass import Int32
    from vllm.vllm_flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        q = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        prefix = scalar_to_ssa(aux_tensors[0][batch_idx[0]], Int32)
        window = scalar_to_ssa(aux_tensors[1][0], Int32)
        return (kv_idx <= q) & ((kv_idx < prefix) | ((q - kv_idx) < window))

    return mask_mod
'''

INTERFACE = '''
import torch

try:
    from . import _extension
except ImportError:
    pass


def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=None,
                           causal=False, window_size=None, block_table=None, out=None,
                           mask_mod=None, aux_tensors=None):
    left, right = (-1, -1) if window_size is None else window_size
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd(
        q, k, v, out=out, max_seqlen_q=max_seqlen_q, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, causal=causal, page_table=block_table,
        window_size_left=left if left >= 0 else None, window_size_right=right if right >= 0 else
        None, mask_mod=mask_mod, aux_tensors=aux_tensors, num_splits=1,
    )
'''


def small_vllm(root: Path, old: str = "", new: str = "") -> Provider:
    """The tree below `root`, with the installed FA4 for its fork; every `old` of the back end and
    of its interface is replaced by `new`."""
    folder = root / "vllm/vllm_flash_attn/cute"
    shutil.copytree(installed().folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    # A fork's files call each other by the fork's name.
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace("flash_attn.cute", CUTE))
    files = {BACKEND: BACK_END, "vllm/vllm_flash_attn/flash_attn_interface.py": INTERFACE}
    assert any(old in text for text in files.values())
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace(old, new) if old else text)
    return Provider("vllm-small", CUTE, folder)
