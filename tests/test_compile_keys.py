"""Compile keys: calls that share one ask for the same kernel, or the pair is reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kernels.compile_keys import Aspect, Call, Captured, Host, Kernel, _fingerprint, aspects, hosts
from kernels.machine import CannotLift
from kernels.provider import Provider, installed, of_release
from kernels.release import find
from proofs.checks import Options, Row
from proofs.keys import Unit, of_aspect, rows
from proofs.obligation import Verdict
from proofs.report import explain, record


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    found = installed()
    with found.served():
        yield found


@pytest.fixture(scope="module")
def blocks(provider: Provider) -> Host:
    return next(host for host in hosts(provider) if host.name == "compute_block_sparsity")


@pytest.fixture(scope="module")
def forward(provider: Provider) -> Host:
    return next(host for host in hosts(provider) if host.name == "_flash_attn_fwd")


def aspect_of(provider: Provider, host: Host, name: str) -> Aspect:
    return next(each for each in aspects(host, provider)[0] if each.name == name)


def unit(provider: Provider, host: Host, name: str) -> Unit:
    return Unit(provider, host, aspect_of(provider, host, name), host.calls)


def verdict(made: list[Row]) -> Verdict:
    assert len(made) == 1
    return made[0].result.verdict


def test_a_call_has_one_key_and_one_kernel(blocks: Host) -> None:
    call = blocks.calls[0]
    assert blocks.capture(call) == blocks.capture(call)
    assert blocks.kernel(call) == blocks.kernel(call)


def test_the_compile_cache_and_the_compiler_come_back(blocks: Host) -> None:
    module: Any = __import__(blocks.function.__module__, fromlist=["cute"])
    before = blocks.function.compile_cache, module.cute
    blocks.capture(blocks.calls[0])
    blocks.kernel(blocks.calls[0])
    assert (blocks.function.compile_cache, module.cute) == before


@pytest.mark.parametrize("name", [
    "mask_mod.code", "mask_mod.closure", "mask_mod.default", "mask_mod.use_fast_sampling",
    "aux_tensors.dtype", "use_fast_sampling",
])
def test_what_the_key_holds_is_proved(provider: Provider, blocks: Host, name: str) -> None:
    made = of_aspect(unit(provider, blocks, name))
    assert verdict(made) is Verdict.PROVED
    assert made[0].result.killed


def test_a_module_global_is_not_in_the_key(provider: Provider, blocks: Host) -> None:
    made = of_aspect(unit(provider, blocks, "mask_mod.global"))
    assert verdict(made) is Verdict.REFUTED
    assert made[0].diagnosis is not None
    assert "a module global that mask_mod reads" in made[0].diagnosis.sentence
    assert "first=" in explain(made[0])
    assert record(made[0])["witness"]["then"]


@dataclass(frozen=True)
class Forgetful(Host):
    """A host function whose key lacks the entries in which two calls differ."""

    lacks: frozenset[int] = frozenset()

    def capture(self, call: Call) -> Captured | None:
        found = super().capture(call)
        return found and replace(
            found, key=tuple(e for i, e in enumerate(found.key) if i not in self.lacks))


@pytest.mark.parametrize("name", ["mask_mod.closure", "aux_tensors.dtype", "use_fast_sampling"])
def test_an_argument_removed_from_the_key_is_reported(
    provider: Provider, blocks: Host, name: str
) -> None:
    first, second = list(blocks.captured(
        blocks.calls[0], aspect_of(provider, blocks, name)).values())[:2]
    apart = frozenset(
        i for i, (a, b) in enumerate(zip(first.key, second.key, strict=True)) if a != b)
    assert apart
    fields = {each: getattr(blocks, each) for each in Host.__dataclass_fields__}
    faulty = Forgetful(**fields, lacks=apart)
    assert verdict(of_aspect(unit(provider, faulty, name))) is Verdict.REFUTED


def test_a_flag_is_in_the_key_of_the_forward_kernel(provider: Provider, forward: Host) -> None:
    assert verdict(of_aspect(unit(provider, forward, "causal"))) is Verdict.PROVED


def test_a_run_time_number_needs_no_kernel_of_its_own(provider: Provider, forward: Host) -> None:
    assert of_aspect(unit(provider, forward, "softmax_scale")) == []


def test_what_is_traced_to_another_kernel_each_time_is_an_error(
    provider: Provider, blocks: Host
) -> None:
    @dataclass(frozen=True)
    class Restless(Host):
        def kernel(self, call: Call) -> Kernel:
            return Kernel(super().kernel(call).text + f"\n{object()}")

    fields = {each: getattr(blocks, each) for each in Host.__dataclass_fields__}
    assert verdict(of_aspect(unit(provider, Restless(**fields), "mask_mod.global"))) \
        is Verdict.ERROR


def test_arguments_come_from_the_signature(provider: Provider, forward: Host) -> None:
    found, unknown = aspects(forward, provider)
    parameters = {each.parameter for each in found}
    assert parameters | set(unknown) == set(forward.parameters)
    assert not parameters & set(unknown)
    assert any(each.name == "mask_mod.__vec_size__" for each in found)


def test_what_cannot_be_looked_into_equals_nothing_else() -> None:
    assert _fingerprint((1, "a", [None])) == _fingerprint((1, "a", [None]))
    assert _fingerprint(1) != _fingerprint(True)
    assert _fingerprint(object()) != _fingerprint(object())


def test_a_kernel_without_the_compilers_names_keeps_its_strides() -> None:
    from kernels.compile_keys import _normal

    assert _normal("@kernel_a_0x1 1@0 @cutlass_b @kernel_a_0x1") == \
        "@name_0 1@0 @name_1 @name_0"


def test_a_call_that_compiles_nothing_cannot_be_traced(blocks: Host) -> None:
    idle = replace(blocks, function=lambda **given: None, fixed=dict)
    idle.function.__module__ = blocks.function.__module__
    with pytest.raises(CannotLift, match="nothing was compiled"):
        idle.kernel(Call("idle", ()))


def test_an_obligation_that_was_not_asked_for_costs_nothing(provider: Provider) -> None:
    assert not list(rows(provider, Options(obligations=("no-overflow",))))


@pytest.mark.releases
def test_dynamic_causal_is_not_in_the_key_of_a_release() -> None:
    release = of_release(find("0.33.0"))
    with release.served():
        host = hosts(release)[0]
        made = of_aspect(unit(release, host, "dynamic_causal"))
    assert verdict(made) is Verdict.REFUTED
    assert made[0].result.obligation.target == "vllm-0.33.0/compile-key/dynamic_causal"
    assert record(made[0])["witness"] == {
        "first": "_flash_attn_fwd(dynamic_causal=None)",
        "then": "_flash_attn_fwd(dynamic_causal=int32[2])", "tables": {},
    }
