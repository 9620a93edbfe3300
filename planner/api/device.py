"""Which device is meant. PyTorch is imported only where it has to be asked."""

from __future__ import annotations

from fuseplan.costmodel.devices import KINDS, Kind, is_cpu, local_kind
from fuseplan.planner.errors import Argument, DeviceError

#: What a user may ask for.
DEVICES = ("auto", *KINDS)


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
