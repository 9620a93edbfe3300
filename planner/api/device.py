"""Which device is meant. Nothing heavy is imported before it is known that PyTorch has to be asked."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fuseplan.planner.errors import Argument, DeviceError

Kind: TypeAlias = Literal["cpu", "cuda"]


def device_kind(device: str) -> Kind:
    """``"cpu"`` or ``"cuda"``, with ``"auto"`` resolved; DeviceError where PyTorch sees no GPU that is asked for."""
    if device not in ("auto", "cpu", "cuda"):
        raise DeviceError("{} {!r} is not one of auto, cpu, cuda", Argument("device"), device)
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
    raise DeviceError("{} cuda: PyTorch sees no CUDA GPU{}; use {} cpu, or check with nvidia-smi",
                      Argument("device"), built, Argument("device"))
