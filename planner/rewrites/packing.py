"""Parameters moved side by side in memory: each stays the object that it was, as a view of what they share.

So ``state_dict``, ``load_state_dict`` and every other reader find them as before, and no second copy stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fuseplan.costmodel.devices import KINDS, is_cpu
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.merged_linear import as_one, side_by_side
from fuseplan.planner.rewrites.trace_edit import storage_of


def pack(arguments: Sequence[Any], *groups: Sequence[int]) -> str | None:
    """Let the parameters of each group follow one another in memory, along their first dimension.

    ``groups`` are positions in ``arguments`` of parameters of one dtype, device and inner shape. At most one group lies
    in memory twice meanwhile. The result says why they do not all lie as wanted; None when they do.
    """
    # The compiler that calls this would take tensors made here for fakes.
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        counts = Counter(storage_of(one) for one in arguments if type(one) in (torch.Tensor, torch.nn.Parameter))
        loose = []
        for group in groups:
            parameters = [arguments[at] for at in group]
            reason = next(filter(None, map(_why_not_real, parameters)), None)
            if reason is not None:
                return reason
            if parameters and as_one(parameters) is None:
                reason = next(filter(None, (_why_not_alone(one, counts) for one in parameters)), None)
                if reason is not None:
                    return reason
                loose.append(parameters)
        try:
            for parameters in loose:
                # Data made in inference mode would change what a parameter is, and the reverse.
                with torch.inference_mode(parameters[0].is_inference()):
                    for parameter, view in zip(parameters, side_by_side(parameters), strict=True):
                        parameter.data = view
        except Exception as error:  # no memory for it, or a parameter that refuses other memory
            return f"parameters cannot be moved: {failure_reason(error)}"
    return None


def pack_operands(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> bool:
    """Pack what a merged op is called with, but while a CUDA graph is recorded; whether it lies side by side now."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return pack((*weights, *biases), range(len(weights)), range(len(weights), len(weights) + len(biases))) is None


def _why_not_real(parameter: Any) -> str | None:
    """Why something is no plain parameter with memory."""
    if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not torch.Tensor:
        return f"a parameter is a {type(getattr(parameter, 'data', parameter)).__name__}"
    if parameter.device.type not in KINDS or parameter.layout is not torch.strided:
        return f"a parameter is on device {parameter.device.type}"
    return None


def _why_not_alone(parameter: torch.nn.Parameter, counts: Counter[int]) -> str | None:
    """Why a parameter cannot leave the memory that it is in."""
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.numel() * parameter.element_size():
        return "a parameter is part of a larger tensor, or packed with others"
    # Private to PyTorch: where a version lacks it, only the graph's own arguments are compared. Two hold a storage that
    # nothing shares: the tensor, and Python's object for the storage.
    holders = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
    if counts[storage_of(parameter)] > 1 or holders(storage._cdata) > 2:
        return "a parameter shares its memory with another tensor"
    if is_cpu(parameter.device.type) and storage.is_shared():
        return "a parameter is in memory that processes share"
    return None
