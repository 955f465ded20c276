"""vLLM's `FlashAttentionImpl.forward` of a release: the call of FA4 that it makes for a layer.

The release's back end and its `flash_attn_varlen_func` run without the rest of vLLM, on small
tensors and a symbolic window, with a stand-in for FA4 that writes its call down. The factories of
mask_mods are not called: their arguments are written down. Layers are decoders', without context
parallelism or cascades, and keys are not split.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels.dispatch import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LARGEST,
    LONGEST,
    PAGE,
    PAGES,
    SEQUENCES,
    TOKENS,
    Effective,
    compiled,
    effective,
)
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.release import BACKEND
from kernels.stand_in import Paths, executed, said
from kernels.vllm import MODULE, Definition, VllmError, _nests, _parse
from spec.term import Term

INTERFACE = "vllm/vllm_flash_attn/flash_attn_interface.py"
IMPLEMENTATION, METADATA = "FlashAttentionImpl", "FlashAttentionMetadata"
BUILDER = "FlashAttentionMetadataBuilder"
# Rows of the older table of ranges, which a mask_mod has compiled in.
RANGE_ROWS = 4
# The fields of the metadata that hold tables, by how their names begin, and those tables.
MM_PREFIX, RSWA = "mm_prefix", "rswa_prefix_lens"
TABLES: Mapping[str, str] = {
    "query_start_loc": "cu_seqlens_q", "mm_prefix_query_range_tensor": "query_ranges",
    "mm_prefix_range_tensor": "ranges", "rswa_prefix_lens": "prefix_lens",
    "rswa_window_tensor": "window", "causal": "dynamic_causal",
}
# What says where a sequence lies and how long it is: parameters of `_flash_attn_fwd`, and the
# fields of the metadata that they have to be. None: nothing.
WHERE: Mapping[str, str | None] = {
    "cu_seqlens_q": "query_start_loc", "seqused_k": "seq_lens", "page_table": "block_table",
    "max_seqlen_q": "max_query_len", "max_seqlen_k": "max_seq_len",
    "cu_seqlens_k": None, "seqused_q": None,
}
# What is handed on in place of a field.
COMPUTED = "computed"
CLAMP = "mm_prefix_clamp_sliding_window"
TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and a batch. `causal` is True, False or TENSOR; `window` the layer's window, None or
    two sides that are -1 or "w"."""

    causal: bool | str
    window: tuple[int | str, int | str] | None
    mm_prefix: bool = False
    clamp: bool = False
    rswa: bool = False

    def __str__(self) -> str:
        window = "None" if self.window is None else "({}, {})".format(*self.window)
        flags = [name for name in ("mm_prefix", "clamp", "rswa") if getattr(self, name)]
        return ", ".join([f"causal={self.causal}", f"window={window}", *flags])


@dataclass(frozen=True, slots=True)
class MaskMod:
    """A mask_mod that a factory was asked for; `arguments` are numbers, symbolic ones, or None."""

    factory: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    """What a layer's call of FA4 comes to: the flags as they reach `_flash_attn_fwd`, the mask, and
    the tables that the mask_mod is given, in its order. `handed` says which field of the metadata
    each parameter of WHERE is, None for nothing; tensors are those of the kernel."""

    flags: Mapping[str, Any]
    effective: Effective
    layout: tuple[str, ...]
    handed: Mapping[str, str | None] = field(default_factory=dict)


class _Call(Exception):
    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given


def _record(*args: Any, **given: Any) -> None:
    raise _Call(dict(zip(("q", "k", "v"), args, strict=False)) | given)


class _Cache:
    """A KV cache of any layout; its halves are the keys and the values."""

    def __init__(self, half: Any) -> None:
        self.halves = (half, half)

    def unbind(self, dim: int) -> tuple[Any, Any]:
        return self.halves

    def transpose(self, one: int, other: int) -> _Cache:
        return self

    def split(self, size: int, dim: int) -> tuple[Any, Any]:
        return self.halves


@dataclass(frozen=True)
class Backend:
    """The two modules of a release that lead to FA4, executed."""

    names: Mapping[str, Any]
    metadata: frozenset[str]
    takes_tensor: bool
    clamps: bool


ATTENTION_TYPES = SimpleNamespace(
    DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="encoder_only",
    ENCODER_DECODER="encoder_decoder",
)
KNOWN: Mapping[str, Any] = {
    "AttentionType": ATTENTION_TYPES, "is_flash_attn_varlen_func_available": lambda: True,
    "get_flash_attn_version": lambda *args, **kwargs: 4,
    "uses_fa4_hd256_kernel": lambda *args, **kwargs: False,
    "is_quantized_kv_cache": lambda dtype: False,
    "flash_attn_supports_quant_query_input": lambda: True,
    "get_current_vllm_config_or_none": lambda: None,
    "is_device_capability_family": lambda family: family == 90,
    "canonicalize_singleton_dim_strides": lambda tensor: tensor,
    "VLLM_BATCH_INVARIANT": False, "is_xpu": lambda: False, "is_rocm": lambda: False,
    "is_cuda": lambda: True, "_flash_attn_fwd": _record,
}


def root_of(provider: Provider) -> Path | None:
    """The release that an FA4 is a part of."""
    parents = provider.folder.parents
    root = parents[2] if len(parents) > 2 else provider.folder
    return root if (root / BACKEND).is_file() and (root / INTERFACE).is_file() else None


@functools.cache
def backend(root: Path) -> Backend:
    interface = executed(root / INTERFACE, "vllm.vllm_flash_attn.flash_attn_interface", KNOWN)
    given = {**KNOWN, "flash_attn_varlen_func": _name(interface, "flash_attn_varlen_func")}
    names = executed(root / BACKEND, MODULE, given)
    metadata = _name(names, METADATA)
    kept = {each.name: str(each.type) for each in fields(metadata)}
    for name in _factories(root):
        names[name] = functools.partial(_asked, name, names[name])
    _name(names, IMPLEMENTATION)
    takes = "Tensor" in kept.get("causal", "") and \
        "dynamic_causal" in inspect.signature(given["flash_attn_varlen_func"]).parameters
    clamps = CLAMP in (root / BACKEND).read_text(encoding="utf-8")
    return Backend(names, frozenset(kept), takes, clamps)


def _name(names: Mapping[str, Any], name: str) -> Any:
    if name not in names:
        raise CannotLift(f"{names['__name__']} has no {name}")
    return names[name]


def _factories(root: Path) -> list[str]:
    try:
        return [node.name for node in _parse(root / BACKEND).body
                if isinstance(node, Definition) and _nests(node)]
    except VllmError as error:
        raise CannotLift(str(error)) from None


def _asked(name: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> MaskMod:
    given = inspect.signature(factory).bind(*args, **kwargs)
    given.apply_defaults()
    return MaskMod(name, dict(given.arguments))


def knows(provider: Provider, layer: Layer) -> bool:
    """Whether the release has what the layer asks for."""
    root = root_of(provider)
    if root is None:
        return False
    has = backend(root)
    ranges = any(name.startswith(MM_PREFIX) for name in has.metadata)
    return (
        (not layer.mm_prefix or ranges) and (not layer.rswa or RSWA in has.metadata)
        and (layer.causal != TENSOR or has.takes_tensor)
        and (not layer.clamp or has.clamps)
    )


def call(provider: Provider, layer: Layer, window: Any, paths: Paths | None = None) -> Called:
    """Runs the real `forward` for a layer whose window's "w" is `window`; raises CannotLift."""
    root = root_of(provider)
    if root is None:
        raise CannotLift(f"{provider.name} is no vLLM")
    metadata, tables = _metadata(root, layer, window)
    given = _forward(backend(root), layer, window, metadata)
    how = compiled(provider, given)
    if how.dynamic_causal is not None and how.dynamic_causal is not metadata.causal:
        raise CannotLift("dynamic_causal is not the tensor of the metadata")
    layout = tuple(_table(tensor, tables) for tensor in how.aux_tensors or ())
    flags = {name: given.get(name) for name in (
        "causal", "window_size_left", "window_size_right", "dynamic_causal", "mask_mod")}
    handed = {name: _field(metadata, name, how.passed.get(name, given.get(name)))
              for name in WHERE}
    return Called(flags, effective(provider, how), layout, handed)


class _Length(int):
    """A number that is known again: what is computed from it is none."""


def _field(metadata: Any, name: str, value: Any) -> str | None:
    """Which field of the metadata a parameter is; COMPUTED where it has other values than its own.
    """
    import torch

    if value is None:
        return None
    for each in WHERE.values():
        if each is not None and value is getattr(metadata, each):
            return each
    meant = getattr(metadata, WHERE[name]) if WHERE[name] is not None else None
    if isinstance(meant, torch.Tensor) and isinstance(value, torch.Tensor):
        other = value.shape == meant.shape and not torch.equal(value, meant)
    else:
        # A longest length may be rounded up.
        other = meant is None or not isinstance(value, int) or value < meant
    if not other:
        raise CannotLift(f"{name} is computed from {WHERE[name]}, which is not followed")
    return COMPUTED


def _table(tensor: Any, tables: Mapping[str, Any]) -> str:
    for name, known in tables.items():
        if tensor is known:
            return TABLES[name]
    raise CannotLift("an aux tensor is none of the metadata's tables")


class _Built(dict):
    """Names in the builder's `build`: each is what its one assignment there gives it."""

    def __init__(self, method: ast.FunctionDef, names: Mapping[str, Any],
                 known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.method, self.names = method, names

    def __missing__(self, name: str) -> Any:
        found = [n.value for n in ast.walk(self.method) if isinstance(n, ast.Assign)
                 and [ast.unparse(t) for t in n.targets] == [name]]
        if not found and (name in self.names or hasattr(builtins, name)):
            return self.names.get(name, getattr(builtins, name, None))
        if len(found) != 1:
            raise CannotLift(f"build sets {name} in {len(found)} ways")
        self[name] = self.value(found[0])
        return self[name]

    def value(self, node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "build", "eval"), {"__builtins__": {}}, self)


@functools.cache
def _building(root: Path) -> tuple[ast.FunctionDef, ast.expr]:
    """The builder's `build`, and what it gives the metadata for a window."""
    build = next((m for n in _parse(root / BACKEND).body if isinstance(n, ast.ClassDef)
                  and n.name == BUILDER for m in n.body
                  if isinstance(m, ast.FunctionDef) and m.name == "build"), None)
    given = [k.value for n in ast.walk(build) if isinstance(n, ast.Call)
             and ast.unparse(n.func) == METADATA
             for k in n.keywords if k.arg == "sliding_window"] if build else []
    if build is None or len(given) != 1:
        raise CannotLift(f"{BUILDER}.build gives sliding_window {len(given)} times")
    return build, given[0]


def _group_window(root: Path, names: Mapping[str, Any], causal: Any, window: Any) -> Any:
    """The window that the builder puts into the metadata, for a group of layers of one window:
    the number of keys, or None."""
    build, given = _building(root)
    spec = SimpleNamespace(sliding_window=window)
    known = {"causal": causal, "self": SimpleNamespace(kv_cache_spec=spec)}
    try:
        return _Built(build, names, known).value(given)
    except CannotLift:
        raise
    except Exception as error:
        raise CannotLift(f"{BUILDER}.build: {said(error)}") from None


def _metadata(root: Path, layer: Layer, window: Any) -> tuple[Any, Mapping[str, Any]]:
    """A batch's metadata, of the release's own class, and the tables in it."""
    import torch

    has = backend(root)

    def ints(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int32)

    def numbers(first: int, *shape: int) -> Any:
        count = math.prod(shape)
        return torch.arange(first, first + count, dtype=torch.int32).reshape(shape)

    shapes = {
        "query_start_loc": (SEQUENCES + 1,), "mm_prefix_query_range_tensor": (TOKENS, 2),
        "mm_prefix_range_tensor": (SEQUENCES, RANGE_ROWS, 2), "rswa_prefix_lens": (SEQUENCES,),
        "rswa_window_tensor": (1,),
    }
    on = {"query_start_loc": True, "rswa_window_tensor": layer.rswa, RSWA: layer.rswa,
          **{name: layer.mm_prefix for name in shapes if name.startswith(MM_PREFIX)}}
    tables = {name: ints(*shape) for name, shape in shapes.items()
              if name in has.metadata and on[name]}
    tables["query_start_loc"] = numbers(0, SEQUENCES + 1)
    causal = ints(SEQUENCES) if layer.causal == TENSOR else layer.causal
    values = {
        "num_actual_tokens": TOKENS, "max_query_len": _Length(TOKENS),
        "max_seq_len": _Length(LONGEST), "seq_lens": numbers(100, SEQUENCES),
        "block_table": numbers(1, SEQUENCES, PAGES),
        "slot_mapping": ints(TOKENS), "causal": causal, "max_num_splits": 1,
        "use_cascade": False, **tables,
    }
    if "sliding_window" in has.metadata:
        left = layer.window is not None and layer.window[0] == "w"
        keys = window + 1 if left else None
        values["sliding_window"] = _group_window(root, has.names, causal, keys)
    made = object.__new__(has.names[METADATA])
    for each in fields(has.names[METADATA]):
        # What the builder leaves alone has its default, None in the tables that are off.
        default = each.default if isinstance(each.default, bool | int) else None
        setattr(made, each.name, values.get(each.name, default))
    return made, {**tables, **({"causal": causal} if layer.causal == TENSOR else {})}


def _forward(has: Backend, layer: Layer, window: Any, metadata: Any) -> dict[str, Any]:
    import torch

    def floats(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16)

    scale = torch.empty(1, dtype=torch.float32)
    module = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale, **{CLAMP: layer.clamp})
    query, key = floats(TOKENS, HEADS, HEAD_DIM), floats(TOKENS, KV_HEADS, HEAD_DIM)
    cache = _Cache(floats(PAGES * SEQUENCES, PAGE, KV_HEADS, HEAD_DIM))
    try:
        implementation = has.names[IMPLEMENTATION]
        implementation.dcp_world_size = 1
        attention = implementation(
            num_heads=HEADS, head_size=HEAD_DIM, scale=1.0, num_kv_heads=KV_HEADS,
            alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        )
        attention.sliding_window = None if layer.window is None else tuple(
            window if side == "w" else side for side in layer.window
        )
        attention.forward(module, query, key, key, cache, metadata, torch.empty_like(query))
    except _Call as found:
        return dict(found.given)
    except CannotLift as refusal:
        raise CannotLift(f"forward: {refusal}") from None
    except Exception as error:
        raise CannotLift(f"forward cannot be taken apart: {said(error)}") from None
    raise CannotLift("forward returns without a call of FA4")


def along(provider: Provider, layer: Layer, window: Term, paths: Paths) -> Called:
    """As `call`, with a symbolic window of 0 .. 2**31 - 2 keys to a side."""
    return call(provider, layer, paths.number(window, 0, LARGEST - 1), paths)
