"""Triton kernels launched, or compiled ahead where there is no GPU or none may be touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The place, in Triton's caches by device, of what was compiled ahead.
NO_DEVICE = -1


@dataclass(frozen=True, slots=True)
class Target:
    """What Triton asks a driver for when it compiles: an architecture, as 90 for SM90."""

    arch: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return NO_DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A scope in which tensors are fake, those on a GPU too: it is given no CUDA context."""
    from torch._subclasses import fake_tensor

    touch = getattr(fake_tensor, "init_gpu_context", None)
    fake_tensor.init_gpu_context = lambda device: None
    try:
        with fake_tensor.FakeTensorMode():
            yield
    finally:
        fake_tensor.init_gpu_context = touch


@contextmanager
def ahead(arch: str) -> Iterator[None]:
    """A scope in which tensors are fake, and `launch` compiles for an architecture, as "sm_90".

    Processes that were forked may do this at the same time.
    """
    from triton.runtime import driver

    active = driver._active
    driver.set_active(Target(int(arch.removeprefix("sm_"))))
    try:
        with fake_tensors():
            yield
    finally:
        driver.set_active(active)


def is_fake() -> bool:
    import torch

    return torch._guards.active_fake_mode() is not None


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """So many programs of a Triton kernel; where tensors are fake it is compiled for tensors whose
    addresses are multiples of 16, as all are that it is launched with."""
    if not is_fake():
        if programs:
            kernel[(programs,)](*arguments, **constants)
        return
    import torch

    types = [each.dtype if isinstance(each, torch.Tensor) else each for each in arguments]
    kernel.warmup(*types, grid=(programs,), **constants)
