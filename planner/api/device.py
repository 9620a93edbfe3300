"""Which device is meant. PyTorch is imported only where it has to be asked."""

from __future__ import annotations

from collections.abc import Iterable

from fuseplan.costmodel.devices import KINDS, Kind, is_cpu, local_kind
from fuseplan.planner.errors import Argument, DeviceError, PlanError
from fuseplan.search.errors import plain

#: What a user may ask for.
DEVICES = ("auto", *KINDS)


def check_device_key(key: str, known: Iterable[str]) -> None:
    """A :class:`PlanError` that lists the keys there are, where this is none of them."""
    if key not in (known := set(known)):
        raise PlanError("{} {!r}: no device with records has that key; there are {}", Argument("device_key"), key,
                        ", ".join(map(plain, sorted(known))) or "none")


def device_kind(device: str) -> Kind:
    """The kind that one of :data:`DEVICES` stands for; DeviceError where PyTorch sees no GPU that is asked for."""
    if device not in DEVICES:
        raise DeviceError("{} {!r} is not one of {}", Argument("device"), device, ", ".join(DEVICES))
    if is_cpu(device):
        return "cpu"
    if device in ("auto", found := local_kind()):
        return found
    import torch

    built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
    raise DeviceError("{} cuda: PyTorch sees no CUDA GPU{}; use {} cpu, or check with nvidia-smi",
                      Argument("device"), built, Argument("device"))
