"""One call of attention in a pre-dispatch trace: its arguments, and what PyTorch computes it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fuseplan.planner.graph.execute import parameters_of
from fuseplan.planner.rewrites.trace_edit import arguments_of, change_arguments, is_static
from fuseplan.search.errors import OWN_FAULTS

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_PARAMETERS = parameters_of(str(ATTENTION))
#: PyTorch's number for what is masked, where cuDNN computes attention: finite (attention.cpp,
#: ``convert_boolean_attn_mask_cudnn``) until pytorch#177868, minus infinity since. It matters where all is masked.
_FINITE_BEFORE = "2.12"
_FINITE = -65504.0
#: Backends of PyTorch's attention on CUDA, by their numbers in its order of preference.
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def change_call(node: fx.Node, **changes: Any) -> bool:
    """Change some arguments of an attention call; whether it could be done (see ``change_arguments``).

    Where sizes are symbols and the result lies as before for those seen, its fake value stays: PyTorch's choice of a
    back end would tie the graph to them.
    """
    args, kwargs = _split(arguments_of(node) | changes)
    before, after = fake_arguments(node), fake_arguments(node, **changes)
    tensors = [one for one in after.values() if isinstance(one, FakeTensor)]
    if not is_static(*tensors) and (layout := _layout_as_seen(after)) and layout == _layout_as_seen(before):
        node.args, node.kwargs = args, kwargs
        return True
    return change_arguments(node, args, kwargs)


def _layout_as_seen(arguments: dict[str, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Shape and strides of a call's result for the sizes seen; None where the call is refused."""
    args, kwargs = _split({name: _as_seen(one) for name, one in arguments.items()})
    try:
        with torch.no_grad(), args[0].fake_mode:
            result = ATTENTION(*args, **kwargs)
    except Exception as error:  # an op may refuse operands for any reason
        OWN_FAULTS.tolerate(error)
        return None
    return tuple(result.shape), tuple(result.stride())


def _split(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they are handed over: by position, and by keyword those that are not the default."""
    args = tuple(arguments[one.name] for one in _PARAMETERS if not one.kwarg_only)
    # Not by equality: a scale of zero equals False, but is no default.
    return args, {one.name: arguments[one.name] for one in _PARAMETERS
                  if one.kwarg_only and arguments[one.name] is not one.default}


def chosen_backend(arguments: dict[str, Any]) -> str:
    """What PyTorch computes a call of :func:`fake_arguments` with: ``"cudnn"``, ``"flash"``, ``"efficient"``,
    ``"math"``.

    It settles its order of preference when attention is first called, which a trace of attention has done. Symbols are
    asked about as they were seen: the answer would tie the graph to them.
    """
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    for number in order() if order is not None else ():
        name = _BACKENDS.get(number, "")
        if name == "math" or (name and can_use(name, arguments)):
            return name
    return "math"


def can_use(backend: str, arguments: dict[str, Any]) -> bool:
    """Whether PyTorch says that a back end can run a call on this CUDA device; the arguments as above."""
    from torch.backends import cuda

    params = cuda.SDPAParams(*(_as_seen(arguments[one.name]) for one in _PARAMETERS if one.name != "scale"))
    return bool(getattr(cuda, f"can_use_{backend}_attention")(params))


def _as_seen(argument: Any) -> Any:
    """A fake tensor with the numbers seen in the place of symbols (1 for any); anything else as it is."""
    if not isinstance(argument, FakeTensor):
        return argument
    shape, strides = (
        [size.node.hint or 1 if isinstance(size, torch.SymInt) else size for size in sizes]
        for sizes in (argument.shape, argument.stride())
    )
    with argument.fake_mode:
        return torch.empty_strided(shape, strides, dtype=argument.dtype, device=argument.device)


def masked_number(arguments: dict[str, Any]) -> float:
    """The number that PyTorch itself would add where a boolean mask is false; rows of nothing else depend on it."""
    is_finite = torch.__version__ < _FINITE_BEFORE and chosen_backend(arguments) == "cudnn"
    return _FINITE if is_finite else -torch.inf


def fake_arguments(node: fx.Node, **changes: Any) -> dict[str, Any]:
    """The arguments of a call, some of them changed, with fake tensors in the place of nodes."""
    given = arguments_of(node) | changes
    return {name: one.meta["val"] if isinstance(one, fx.Node) else one for name, one in given.items()}
