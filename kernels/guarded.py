"""Tables at the edge of mapped GPU memory: a kernel that reads past them ends with an error.

Each lies in memory of its own, with address space before and behind it that nothing is mapped to. A
kernel that touches that ends with an illegal access, after which its process can launch no more.
The CUDA driver maps memory in granules (2 MiB on a Hopper GPU), so a table can have only one of
its ends at an edge: `at_end` says which. What lies beyond the other end is readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernels.fa4 import Resident

if TYPE_CHECKING:
    import torch

WORD = 4  # bytes of an int32
# The end of a table that lies at an edge.
AT_END, AT_START = "end", "start"


class GuardError(Exception):
    """The driver cannot map memory; the message is one line."""


def mapped_bytes(words: int, granule: int) -> int:
    """Bytes to map for so many int32: whole granules, one at least."""
    return max(-(-words * WORD // granule), 1) * granule


def first_word(words: int, capacity: int, *, at_end: bool) -> int:
    """Where so many int32 begin in `capacity` int32, to end or to begin at an edge."""
    return capacity - words if at_end else 0


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Mapped memory between two granules of address space that are not. `whole` is all of it."""

    reserved: int
    granule: int
    size: int
    whole: torch.Tensor

    @property
    def start(self) -> int:
        return self.reserved + self.granule

    def free(self) -> None:
        """Nothing on the device may use it any more."""
        from cuda.bindings import driver

        _asked("cuMemUnmap", driver.cuMemUnmap(self.start, self.size))
        _asked("cuMemAddressFree",
               driver.cuMemAddressFree(self.reserved, self.size + 2 * self.granule))


@dataclass(slots=True)
class Guarded:
    """Regions of one device, used again and again; `device` is as torch has it."""

    device: str = "cuda"
    free: list[Region] = field(default_factory=list)
    used: list[Region] = field(default_factory=list)

    def place(self, table: torch.Tensor, *, at_end: bool = True) -> torch.Tensor:
        """A copy of an int32 table that ends, or begins, where mapped memory does. It is aligned to
        its elements, which is all that FA4 asks of aux tensors, and lasts until `again`."""
        count = table.numel()
        region = next((each for each in self.free if each.whole.numel() >= count), None)
        if region is None:
            region = _region(count, self.device)
        else:
            self.free.remove(region)
        self.used.append(region)
        first = first_word(count, region.whole.numel(), at_end=at_end)
        copy = region.whole[first : first + count].view(table.shape)
        copy.copy_(table)
        return copy

    def again(self) -> None:
        """Takes back every region: what is placed next, on the same stream, waits for the kernels
        that were launched before it."""
        self.free += self.used
        self.used.clear()

    def tables(self, on: Resident, *, at_end: bool = True) -> Resident:
        """The same sequences with everything that may be an aux tensor placed; what was placed
        before is taken back."""
        self.again()

        def placed(tables: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: self.place(table, at_end=at_end) for name, table in tables.items()}

        return replace(on, tables=placed(on.tables), scalars=placed(on.scalars))

    def close(self) -> None:
        """Waits for the device, and gives all memory back; no table of it may be used again."""
        import torch

        torch.cuda.synchronize(self.device)
        self.again()
        while self.free:
            self.free.pop().free()


def _region(words: int, device: str) -> Region:
    import torch
    from cuda.bindings import driver

    torch.empty(1, device=device)  # the driver's calls are about the context that this makes
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index
    what = driver.CUmemAllocationProp()
    what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    what.location.id = number
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = number
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granule = int(_asked("cuMemGetAllocationGranularity",
                         driver.cuMemGetAllocationGranularity(what, least)))
    size = mapped_bytes(words, granule)
    total = size + 2 * granule
    reserved = int(_asked("cuMemAddressReserve",
                          driver.cuMemAddressReserve(total, granule, 0, 0)))
    try:
        memory = _asked("cuMemCreate", driver.cuMemCreate(size, what, 0))
        try:
            _asked("cuMemMap", driver.cuMemMap(reserved + granule, size, 0, memory, 0))
        finally:  # mapped, it lasts until it is unmapped
            _asked("cuMemRelease", driver.cuMemRelease(memory))
        try:
            _asked("cuMemSetAccess",
                   driver.cuMemSetAccess(reserved + granule, size, [access], 1))
            whole = torch.as_tensor(_Words(reserved + granule, size // WORD),
                                    device=f"cuda:{number}")
            if whole.data_ptr() != reserved + granule:
                raise GuardError("torch copied the memory instead of taking it as it is")
        except BaseException:
            driver.cuMemUnmap(reserved + granule, size)
            raise
    except BaseException:
        driver.cuMemAddressFree(reserved, total)
        raise
    return Region(reserved, granule, size, whole)


class _Words:
    """Memory of the device as so many int32, in the form that torch takes without a copy."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (words,), "typestr": "<i4", "strides": None,
            "version": 3,
        }


def _asked(name: str, answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returned beside its status. Raises GuardError."""
    from cuda.bindings import driver

    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GuardError(f"{name}: {driver.CUresult(status).name}")
    return values[0] if values else None
