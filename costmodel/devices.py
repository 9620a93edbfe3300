"""Devices by name: what kinds there are, and what each GPU architecture has and can do.

Nothing else compares the name of a device: whoever wants to know something asks for a field here. These are limits that
decide what can be compiled; how fast a device is, is measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeAlias, TypeVar

#: What a user can ask for, as PyTorch calls it.
Kind: TypeAlias = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda")
#: What GPUs are traced on where there is none.
_STAND_IN = "meta"
_KIB = 2**10
_T = TypeVar("_T")


class NoDeviceError(ValueError, RuntimeError):
    """There is no such device here, or nothing can be run on it; the message says what to do."""


def is_gpu(kind: str) -> bool:
    """Whether devices of a kind are GPUs: they have CUDA graphs, and a host that launches while they work."""
    return kind in ("cuda", "hip")


def is_cpu(kind: str) -> bool:
    return kind == "cpu"


def for_gpu(kind: str) -> bool:
    """Whether what is traced on a device is planned for a GPU: it may stand in for one."""
    return is_gpu(kind) or kind == _STAND_IN


def kind_of_key(key: str) -> Kind:
    """The kind of the device that a database key names.

    >>> kind_of_key("cuda-nvidia-h200-4702ed953224")
    'cuda'
    """
    return "cuda" if is_gpu(key.split("-")[0]) else "cpu"


def local_kind() -> Kind:
    """The GPU's where PyTorch sees one that kernels run on, else the CPU's."""
    import torch

    return "cuda" if torch.cuda.is_available() and torch.version.hip is None else "cpu"


def traced_on(kind: str) -> str:
    """The kind of device that a model for ``kind`` is traced on here: the meta device where there is no GPU."""
    return _STAND_IN if is_gpu(kind) and local_kind() != "cuda" else kind


@dataclass(frozen=True)
class ByDevice(Generic[_T]):
    """A value for CPUs, and one for GPUs."""

    cpu: _T
    gpu: _T

    def on(self, kind: str) -> _T:
        return self.cpu if is_cpu(kind) else self.gpu


@dataclass(frozen=True)
class Architecture:
    """What one GPU architecture has, and what it can do.

    Attributes:
        name: As compilers call it.
        vendor: Whose compiler makes its code: ``"cuda"`` (NVIDIA) or ``"hip"`` (AMD), as Triton calls them.
        warp: Threads that run in step.
        registers, register_file: 32-bit registers that a thread may have, and those of one multiprocessor.
        shared_bytes, most_threads: Shared memory and threads that one program can have.
        overlaps: A kernel can start before the one ahead of it has ended (programmatic dependent launch).
        copies_tensors: It has a tensor memory accelerator.
        fp8: It converts and multiplies float8_e4m3fn.
    """

    name: str
    vendor: Literal["cuda", "hip"]
    warp: int
    registers: int
    register_file: int
    shared_bytes: int
    overlaps: bool = False
    copies_tensors: bool = False
    fp8: bool = True
    most_threads: int = 1024

    @property
    def takes_ptx(self) -> bool:
        """Whether its compiler takes instructions in PTX."""
        return self.vendor == "cuda"

    def held_programs(self, warps: int) -> int:
        """Programs of so many warps that one multiprocessor holds at once."""
        return min(32, 2 * self.most_threads // (self.warp * warps))

    def most_registers(self, warps: int) -> int:
        """Registers that each thread of a program of so many warps may have."""
        return min(self.registers, self.register_file // (self.warp * warps))


#: KiB of shared memory that one program can have, by compute capability (CUDA C++ Programming Guide).
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_AMD = {"gfx942": 64, "gfx950": 160}


@cache
def architecture(name: str) -> Architecture:
    """The architecture of a name such as ``sm_90`` or ``gfx942``; ValueError where nothing is known of it.

    >>> architecture("sm_90").overlaps, architecture("gfx942").warp
    (True, 64)
    """
    if match := re.fullmatch(r"sm_(\d+)a?", name):
        capability = int(match[1])
        return Architecture(
            name, "cuda", 32, 255, 64 * _KIB, _SHARED_KIB.get(capability, 48) * _KIB, overlaps=capability >= 90,
            copies_tensors=capability >= 90, fp8=capability >= 89)
    if name in _AMD:
        return Architecture(name, "hip", 64, 512, 128 * _KIB, _AMD[name] * _KIB)
    raise ValueError(f"cannot compile for architecture '{name}': expected a name such as sm_90, or {', '.join(_AMD)}")


def local_gpu() -> Any:
    """PyTorch's properties of the current GPU; :class:`NoDeviceError` where there is none that kernels run on."""
    import torch

    if not torch.cuda.is_available():
        raise NoDeviceError("no CUDA device is visible; use the CPU, or check the driver with nvidia-smi")
    if torch.version.hip:
        raise NoDeviceError(f"{torch.cuda.get_device_name()}: kernels compile for AMD GPUs ({', '.join(_AMD)}), but "
                            "none has run on one, and nothing is planned for them; use the CPU")
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def local_architecture() -> Architecture:
    """That of the current GPU, which is there."""
    import torch

    return architecture("sm_{}{}".format(*torch.cuda.get_device_capability()))
