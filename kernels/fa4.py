"""Calls of compiled FlashAttention-4 kernels: what is asked of which provider.

A `Call` says what is asked, `Sequences` on what, and a `Provider` does it: upstream's
`flash_attn.cute`, or the fork inside a vLLM release, served under its own name inside a scope.
torch, the compiler and FA4 are imported when a provider is opened.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import environment  # sets what the compiler reads at its first import
from kernels.ahead import fake_tensors, is_fake
from kernels.release import OWN_FA4, Release, ReleaseError, cached, find
from kernels.target import Target
from spec.domain import COORDINATES, INDICES, TABLES
from spec.from_file import resolve
from spec.term import bind, read, symbols
from spec.term import tables as tables_of

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
BATCHED, VARLEN, PAGED = "batched", "varlen", "paged"
UPSTREAM, VLLM, OWN, GENERATED = "upstream", "vllm", "maskproof", "generated"
DTYPES = ("bf16", "fp16")
# Above this many sequences FA4 compiles another scheduler.
MANY = 256
# FA4 compiles again for calls whose queries all fit in one tile, although SM90 and SM80 make no
# use of it; no call is said to be that short.
LEAST_MAX_SEQLEN_Q = 1024
ALIGNED = 64


class Fa4Error(Exception):
    """A provider or a call that cannot be had; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel call, apart from the sequences that it is given.

    `provider` is "upstream" (flash-attn-4's `flash_attn.cute`) or the name of a release, as
    "vllm-0.33.0". `mask_mod` is the name of a target, as "vllm-0.33.0/mm_prefix[window]", or
    "generated" for one that is written from `spec` ("generated/TEXT": from another mask), or None.
    `window_size_left` and `window_size_right` are inclusive distances, None for no bound.
    `num_splits` 0 lets the kernel choose. `spec` is the mask that the call claims to compute, in
    the text form, with `params`. `sink` adds a learnable sink, `softcap` 0 is none. `few` is for
    launches of at most MANY sequences.
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
    softcap: float = 0.0
    few: bool = False


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences that share a launch, queries laid end to end: int32 arrays.

    `tables` holds, by name, what the spec and the mask_mod read, in the shapes of `spec.domain`:
    `ranges[n, R, 2]`, `query_ranges[tokens, 2]`, `prefix_lens[n]`, `dynamic_causal[n]`,
    `document_ids[positions]`, ... `cu_seqlens_q` is derived where it is not given.
    """

    seqlens_q: Array
    seqlens_k: Array
    tables: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seqlens_q)

    @property
    def rows(self) -> int:
        return int(self.seqlens_q.sum(dtype=np.int64))

    @property
    def keys(self) -> int:
        return int(self.seqlens_k.sum(dtype=np.int64))

    @property
    def cells(self) -> int:
        return int((self.seqlens_q.astype(np.int64) * self.seqlens_k).sum())

    def select(self, which: Any) -> Sequences:
        """Some of the sequences, by index, with what the tables say of them."""
        which = np.arange(len(self))[which].reshape(-1)
        ends = np.cumsum(self.seqlens_q, dtype=np.int64)
        rows = [np.arange(ends[b] - self.seqlens_q[b], ends[b]) for b in which]
        own = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        chosen = {"num_seqs": which, "num_tokens": own}
        tables = {}
        for name, table in self.tables.items():
            first = TABLES[name].dims[0] if name in TABLES else None
            key = first.value if first is not None and first.op == "sym" else None
            if name == "cu_seqlens_q":
                table = offsets(self.seqlens_q[which])
            elif key in chosen:
                table = table[chosen[key]]
            tables[name] = np.ascontiguousarray(table)
        return Sequences(self.seqlens_q[which], self.seqlens_k[which], tables)


def offsets(lengths: Array) -> Array:
    """Where each of the sequences begins, laid end to end, and then where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Features:
    """What the source of an FA4's `interface.py` says of it."""

    dynamic_causal: bool
    splits_on_sm90: bool
    largest_head_dim: int


@lru_cache
def features(provider: str) -> Features:
    """Of a provider by name; nothing is imported. Raises Fa4Error."""
    path = _interface(provider)
    try:
        source = path.read_text()
    except OSError as error:
        raise Fa4Error(f"{provider} has no {path.name}: {error}") from None
    forward = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_flash_attn_fwd"
    )
    limit = re.search(r"is_sm90_range = 8 <= head_dim <= (\d+)", source)
    return Features(
        dynamic_causal="dynamic_causal" in {argument.arg for argument in forward.args.args},
        splits_on_sm90="SplitKV not supported on SM 9.0" not in source,
        largest_head_dim=int(limit[1]) if limit else 256,
    )


def _interface(provider: str) -> Path:
    if provider == UPSTREAM:
        from importlib.util import find_spec

        spec = find_spec("flash_attn")
        for place in (spec and spec.submodule_search_locations) or ():
            if (path := Path(place) / "cute" / "interface.py").is_file():
                return path
        raise Fa4Error("flash-attn-4 is not installed")
    return release_of(provider).root / OWN_FA4 / "interface.py"


@lru_cache
def release_of(provider: str) -> Release:
    """The release behind a provider's name: of the folders in $VLLM_TREES, or as `find` has it."""
    version = provider.removeprefix(VLLM + "-")
    if version == provider:
        raise Fa4Error(f"no provider {provider!r}: there are {UPSTREAM} and {VLLM}-VERSION")
    tree = Path(os.environ.get("VLLM_TREES", "")) / version
    try:
        return find(str(tree) if os.environ.get("VLLM_TREES") and tree.is_dir() else version)
    except ReleaseError as error:
        raise Fa4Error(str(error)) from None


def releases() -> list[Release]:
    """Every release that is at hand without a network, the newest first."""
    trees = os.environ.get("VLLM_TREES")
    folders = sorted(Path(trees).iterdir()) if trees and Path(trees).is_dir() else []
    found = {}
    for folder in folders:
        try:
            found[folder.name] = find(str(folder))
        except ReleaseError:
            continue
    for each in cached():
        found.setdefault(each.version or each.name, each)
    order = sorted(found, key=lambda v: [int(n) for n in re.findall(r"\d+", v)], reverse=True)
    return [found[version] for version in order]


def supported(call: Call) -> str | None:
    """Why the provider cannot do the call on its architecture, or None where it can."""
    try:
        has = features(call.provider)
    except Fa4Error as error:
        return str(error)
    sm80, dims = call.arch == "sm_80", (call.head_dim, call.head_dim_v)
    target = os.environ.get("CUTE_DSL_ARCH", environment.DEFAULTS["CUTE_DSL_ARCH"])
    rules = (
        (call.arch not in ("sm_90", "sm_80"), f"no kernels for {call.arch} on this GPU"),
        (call.dtype not in DTYPES, f"no dtype {call.dtype}"),
        (call.layout not in (BATCHED, VARLEN, PAGED), f"no layout {call.layout}"),
        (call.q_heads % call.kv_heads != 0, "query heads must be a multiple of key heads"),
        (min(dims) < 8 or max(dims) > has.largest_head_dim,
         f"head dims are 8 to {has.largest_head_dim}"),
        (any(dim % 8 for dim in dims), "head dims are multiples of 8"),
        (sm80 and not target.startswith("sm_8"), f"SM80's kernels do not compile for {target}"),
        (sm80 and call.layout == PAGED, "no paged keys on SM80"),
        (sm80 and call.num_splits != 1, "no splits on SM80"),
        (sm80 and call.sink, "no sink on SM80"),
        (sm80 and call.dynamic_causal, "dynamic_causal is for SM90 alone"),
        (call.num_splits != 1 and not has.splits_on_sm90, "no splits on SM90"),
        (call.dynamic_causal and not has.dynamic_causal, "has no dynamic_causal"),
        (call.layout == PAGED and any(dim % 16 for dim in dims),
         "paged keys need head dims that are multiples of 16"),
    )
    return next((f"{call.provider}: {reason}" for broken, reason in rules if broken), None)


def compile_key(call: Call, sequences: int = 1) -> str:
    """Equal for calls that one compiled kernel serves: what is known only when it runs is left out.

    Values of bounds and of most parameters are known when a kernel runs; a number that a mask_mod
    has compiled in, and whether a bound is there, are not.
    """
    known: dict[str, Any] = asdict(call)
    for name in ("spec", "kv_heads", "few"):
        del known[name]
    known["q_heads"] = call.q_heads // call.kv_heads
    for side in ("window_size_left", "window_size_right"):
        value = getattr(call, side)
        known[side] = None if value is None else "negative" if value < 0 else "bound"
    if call.mask_mod is None:
        known["params"] = {}
    elif (text := _generated(call)) is not None:
        known["mask_mod"] = f"{GENERATED}/{text}"
        known["params"] = _compiled_in(call)
    known["num_splits"] = call.num_splits if call.num_splits in (0, 1) else "several"
    known["many"] = sequences > MANY
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _generated(call: Call) -> str | None:
    """The mask that the call's mask_mod is to be written from."""
    origin, _, text = (call.mask_mod or "").partition("/")
    return (text or call.spec) if origin == GENERATED else None


def _compiled_in(call: Call) -> dict[str, int]:
    """A count has to be a number in a generated mask_mod; other parameters come in tables."""
    return {name: value for name, value in call.params.items() if name == "num_ranges"}


@dataclass(frozen=True, slots=True)
class Resident:
    """Sequences whose numbers lie on a device: int32 tensors. `scalars` holds every parameter as a
    tensor of one element, `more` what was taken along."""

    sequences: Sequences
    seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    scalars: Mapping[str, torch.Tensor]
    more: Mapping[str, torch.Tensor]


def resident(
    sequences: Sequences, params: Mapping[str, int], device: str,
    more: Mapping[str, Array] = {},
    finish: Callable[[Mapping[str, torch.Tensor], Mapping[str, Array]], None] | None = None,
) -> Resident:
    """The sequences on a device, in one transfer. Under FakeTensorMode nothing is copied.

    `more` are further arrays to take along; `finish(tables, more)` may still write to those of
    the host when it is known where the tables will lie.
    """
    import torch

    arrays = {
        "/q": sequences.seqlens_q, "/k": sequences.seqlens_k,
        "/cu_q": offsets(sequences.seqlens_q), "/cu_k": offsets(sequences.seqlens_k),
        **{name: np.asarray(table) for name, table in sequences.tables.items()},
        **{f"={name}": np.array([value]) for name, value in params.items()},
        **{f"+{name}": array for name, array in more.items()},
    }
    arrays.setdefault("cu_seqlens_q", arrays["/cu_q"])
    there: dict[str, torch.Tensor] = {}
    fake = is_fake()
    starts = np.cumsum([0, *(-(-max(a.size, 1) // ALIGNED) * ALIGNED for a in arrays.values())])
    size, pinned = int(starts[-1]), device != "cpu" and not fake
    blob = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
    stream = _copying(device) if pinned else None
    with torch.cuda.stream(stream) if pinned else nullcontext():
        whole = torch.empty(size, dtype=torch.int32, device=device) if pinned else blob
    for (name, array), start in zip(arrays.items(), starts.tolist(), strict=False):
        if fake:
            there[name] = torch.empty(array.shape, dtype=torch.int32, device=device)
        else:
            there[name] = whole[start : start + array.size].view(array.shape)
    tables = {name: part for name, part in there.items() if name[0] not in "/=+"}
    if not fake:
        host = blob.numpy()
        here = dict(zip(arrays, np.split(host, starts[1:-1]), strict=True))
        for name, array in arrays.items():
            here[name][: array.size] = array.reshape(-1)
        if finish:
            finish(tables, {name[1:]: part for name, part in here.items() if name[0] == "+"})
        if pinned:
            _copy(whole, blob, stream)
    return Resident(
        sequences, there["/q"], there["/k"], there["/cu_q"], there["/cu_k"], tables,
        scalars={name[1:]: part for name, part in there.items() if name[0] == "="},
        more={name[1:]: part for name, part in there.items() if name[0] == "+"},
    )


@lru_cache
def _copying(device: str) -> Any:
    """The stream of copies to a device, which run beside the kernels before them. What is allocated
    in its scope is not what a kernel that is yet to run may still use."""
    import torch

    return torch.cuda.Stream(device)


def _copy(whole: torch.Tensor, blob: torch.Tensor, stream: Any) -> None:
    """Copies pinned memory to where the current stream is to read it, and may go on to until what
    is enqueued there is done."""
    import torch

    current = torch.cuda.current_stream(whole.device)
    with torch.cuda.stream(stream):
        whole.copy_(blob, non_blocking=True)
    current.wait_stream(stream)
    whole.record_stream(current)


def torch_dtype(call: Call) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}[call.dtype]


class Provider:
    """An FA4 whose kernels can be compiled and launched, inside the scope of `provider`.

    `fa4` says whose kernels these are: of a release whose fork does not import with the compiler at
    hand, another release's.
    """

    def __init__(self, name: str, fa4: str, interface: Any, loaded: Any = None) -> None:
        """`more` are mask_mods that are neither the project's nor a release's, by name."""
        self.name, self.fa4, self.interface, self._loaded = name, fa4, interface, loaded
        self.more: Mapping[str, Target] = {}
        self._forward = interface._flash_attn_fwd
        self._mask_mods: dict[str, tuple[Any, tuple[str, ...]]] = {}
        # vLLM's fork leaves `dynamic_causal` out of its compile key: a call with it would be given
        # the kernel of the same call without it.
        self._caches = {False: self._forward.compile_cache}
        if features(name).dynamic_causal:
            self._caches[True] = interface.get_jit_cache("fwd_dynamic_causal")

    def mask_mod(self, call: Call) -> tuple[Any, tuple[str, ...]]:
        """The mask_mod of a call, made once, and the names of its aux tensors."""
        assert call.mask_mod is not None
        text = _generated(call)
        values = dict(call.params if text is None else _compiled_in(call))
        key = json.dumps([call.mask_mod, text, values], sort_keys=True)
        if key not in self._mask_mods:
            with self._target(call) as target:
                made = target.make(_symbols(target, call))
                layout = _layout(target)
            _name(made, key, target)
            self._mask_mods[key] = made, layout
        return self._mask_mods[key]

    @contextmanager
    def _target(self, call: Call) -> Iterator[Target]:
        assert call.mask_mod is not None
        origin = call.mask_mod.partition("/")[0]
        with ExitStack() as scope:
            if call.mask_mod in self.more or origin == GENERATED:
                yield self.more.get(call.mask_mod) or generated_target(call)
                return
            if origin == OWN:
                from kernels.mask_mods import TARGETS as targets
            else:
                from kernels import vllm

                loaded = self._loaded
                # Another provider that was opened since serves its own release.
                if (
                    loaded is None or loaded.release.name != origin
                    or sys.modules.get(vllm.MODULE) is not loaded.module
                ):
                    loaded = scope.enter_context(vllm.load(release_of(origin)))
                targets = tuple(vllm.branches(loaded))
            for target in targets:
                if target.target == call.mask_mod:
                    if target.unsupported:
                        raise Fa4Error(f"{call.mask_mod}: {target.unsupported}")
                    yield target
                    return
        names = ", ".join(target.target for target in targets)
        raise Fa4Error(f"no mask_mod {call.mask_mod!r}: there are {names}")

    def layout(self, call: Call) -> tuple[str, ...]:
        """The names of the aux tensors of the call's mask_mod."""
        return self.mask_mod(call)[1] if call.mask_mod is not None else ()

    def launch(
        self, call: Call, on: Resident, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, page_table: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> None:
        """One call of the compiled kernel, which writes `out` and `lse`.

        q [rows, q_heads, head_dim], out [rows, q_heads, head_dim_v], lse float32 [q_heads, rows],
        with k and v [keys, kv_heads, dim] if packed, [pages, page_size, kv_heads, dim] if paged;
        batched, q and out [n, longest, ...], k and v likewise, lse [n, q_heads, longest].
        """
        given: dict[str, Any] = {"softmax_scale": call.head_dim**-0.5}
        lengths_q, lengths_k = on.sequences.seqlens_q, on.sequences.seqlens_k
        if call.layout == BATCHED:
            # Without lengths of its own each sequence is as long as its tensors.
            if len(lengths_q) and (lengths_q != q.shape[1]).any():
                given["seqused_q"] = on.seqlens_q
            if len(lengths_k) and (lengths_k != k.shape[1]).any():
                given["seqused_k"] = on.seqlens_k
        else:
            longest = max(int(lengths_q.max(initial=0)), LEAST_MAX_SEQLEN_Q)
            given |= {"cu_seqlens_q": on.cu_seqlens_q, "max_seqlen_q": longest,
                      "max_seqlen_k": max(int(lengths_k.max(initial=0)), 1)}
            if call.layout == PAGED:
                given |= {"seqused_k": on.seqlens_k, "page_table": page_table}
            else:
                given["cu_seqlens_k"] = on.cu_seqlens_k
        if call.mask_mod is not None:
            given["mask_mod"], layout = self.mask_mod(call)
            given["aux_tensors"] = [self._aux(on, name) for name in layout] or None
        if call.dynamic_causal:
            given["dynamic_causal"] = self._aux(on, "dynamic_causal")
        if call.softcap:
            given["softcap"] = call.softcap
        self._forward.compile_cache = self._caches[call.dynamic_causal]
        try:
            self._forward(
                q, k, v, out=out, lse=lse, causal=call.causal,
                window_size_left=call.window_size_left, window_size_right=call.window_size_right,
                num_splits=call.num_splits, pack_gqa=call.pack_gqa, learnable_sink=sink,
                _arch=int(call.arch.removeprefix("sm_")), **given,
            )
        finally:
            self._forward.compile_cache = self._caches[False]

    def _aux(self, on: Resident, name: str) -> torch.Tensor:
        if name in on.tables:
            return on.tables[name]
        if name in on.scalars:
            return on.scalars[name]
        raise Fa4Error(f"the sequences have no table {name!r}, which the call reads")

    def compile(self, call: Call, sequences: int = 1) -> None:
        """Compile what the call needs, without a GPU; the on-disk cache keeps it."""
        import torch

        count = MANY + 1 if sequences > MANY else 2
        with fake_tensors():
            lengths = np.array([3] + [2] * (count - 1), np.int32)
            on = resident(_sample(call, self, lengths), call.params, "cuda")
            given = {
                name: torch.empty(shape, dtype=dtype, device="cuda")
                for name, (shape, dtype) in shapes(call, on.sequences).items()
            }
            self.launch(call, on, **given)


Shape = tuple[tuple[int, ...], Any]


def shapes(call: Call, sequences: Sequences) -> dict[str, Shape]:
    """Shape and dtype of each tensor that `Provider.launch` takes."""
    import torch

    n, dtype = len(sequences), torch_dtype(call)
    longest_q = int(sequences.seqlens_q.max(initial=0))
    longest_k = int(sequences.seqlens_k.max(initial=0))
    rows: tuple[int, ...] = (sequences.rows,)
    lse: tuple[int, ...] = (call.q_heads, sequences.rows)
    keys: tuple[int, ...] = (sequences.keys,)
    found: dict[str, Shape] = {}
    if call.layout == BATCHED:
        rows, keys, lse = (n, longest_q), (n, longest_k), (n, call.q_heads, longest_q)
    elif call.layout == PAGED:
        width = max(1, -(-longest_k // call.page_size))
        keys = (max(1, n * width), call.page_size)
        found["page_table"] = (n, width), torch.int32
    found["q"] = (*rows, call.q_heads, call.head_dim), dtype
    found["k"] = (*keys, call.kv_heads, call.head_dim), dtype
    found["v"] = (*keys, call.kv_heads, call.head_dim_v), dtype
    found["out"] = (*rows, call.q_heads, call.head_dim_v), dtype
    found["lse"] = lse, torch.float32
    if call.sink:
        found["sink"] = (call.q_heads,), dtype
    return found


def _sample(call: Call, provider: Provider, lengths: Array) -> Sequences:
    """Sequences with tables of the right ranks, for a compiler that looks at nothing else."""
    names = set(provider.mask_mod(call)[1]) if call.mask_mod else set()
    names |= {"dynamic_causal"} if call.dynamic_causal else set()
    tables = {}
    for name in sorted(names - call.params.keys()):
        axes = len(TABLES[name].dims) if name in TABLES else 1
        tables[name] = np.zeros([len(lengths) + 1, 2, 2][:axes], np.int32)
    return Sequences(lengths, lengths, tables)


def generated_target(call: Call) -> Target:
    """A mask_mod written from the call's spec; parameters are tables of one element, known when
    the kernel runs, so that one kernel serves them all."""
    from spec.to_cute import inside_tables, to_cute

    mask = resolve(_generated(call) or call.spec)
    code = inside_tables(mask.framed(**_compiled_in(call)), mask)
    free = sorted(symbols(code) - COORDINATES - INDICES)
    code = bind(code, {name: read(name, 0) for name in free})
    tables = tuple(sorted(tables_of(code)))
    ranks = {table.name: len(table.dims) for table in mask.tables.values()}
    return Target(
        target=f"{GENERATED}/{mask.name}", spec=mask.name, make=to_cute(code, tables=tables),
        layouts=(tables,), ranks={**ranks, **dict.fromkeys(free, 1)},
    )


def _symbols(target: Target, call: Call) -> dict[str, int]:
    missing = [name for name in target.symbols if name not in call.params]
    if missing:
        raise Fa4Error(f"{target.target} needs a value for {', '.join(missing)}")
    return {name: call.params[name] for name in target.symbols}


def _layout(target: Target) -> tuple[str, ...]:
    """The first of the meanings that the aux tensors may have with which the code can be traced."""
    if len(target.layouts) <= 1:
        return target.layouts[0] if target.layouts else ()
    from kernels.trace import Traced, traces

    found = list(traces(target))
    for each in found:
        if isinstance(each, Traced):
            return each.layout
    raise Fa4Error(f"{target.target}: {found[0]}")


def _name(mask_mod: Any, key: str, target: Target) -> None:
    """Give the mask_mod the name that FA4's compile cache knows it by: its own would hold
    addresses, which differ between processes."""
    import inspect

    function = inspect.unwrap(mask_mod)
    file = Path(function.__code__.co_filename)
    text = file.read_text() if file.is_file() else inspect.getsource(function)
    name = f"{key}\n{target.target}\n{function.__qualname__}\n{text}"
    function.__cute_hash__ = hashlib.sha256(name.encode()).hexdigest()


@contextmanager
def provider(name: str) -> Iterator[Provider]:
    """Open a provider; its kernels compile and run inside this scope. Raises Fa4Error.

    Set FLASH_ATTENTION_CUTE_DSL_CACHE_DIR to say where compiled kernels are kept.
    """
    from importlib import import_module

    if name == UPSTREAM:
        try:
            interface = import_module("flash_attn.cute.interface")
        except ImportError as error:
            raise Fa4Error(f"flash-attn-4 does not import: {error}") from None
        from importlib.metadata import version

        yield Provider(name, f"flash-attn-4 {version('flash-attn-4')}", interface)
        return
    from kernels import vllm

    wanted = release_of(name)
    for release in (wanted, *(each for each in releases() if each.name != wanted.name)):
        with ExitStack() as scope:
            try:
                loaded = scope.enter_context(vllm.load(release))
                interface = import_module(f"{vllm.CUTE}.interface")
            except (vllm.VllmError, ImportError, AttributeError) as error:
                if release is wanted and isinstance(error, vllm.VllmError):
                    raise Fa4Error(str(error)) from None
                continue
            if not Path(interface.__file__ or "").is_relative_to(release.root):
                continue
            yield Provider(name, f"FA4 of {release.name}", interface, loaded)
            return
    raise Fa4Error(f"{name}: no FA4 of a vLLM release imports with the compiler at hand")

