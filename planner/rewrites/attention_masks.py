"""Masks of attention that need not be data.

**Constant masks.** A model that is traced cannot look at numbers, so it hands over a mask where eagerly it would have
seen that it is causal, and skipped it. Here the numbers can be had: a mask that is computed from nothing but constants
(positions from ``arange``) is evaluated, and if it is causal the call says so instead, which skips half of the work and
the mask's traffic; the ops that made the mask are left out. Measured on an H200 (bfloat16, 32 query and 4 key-value
heads of width 64, one sequence of 2048): 153 us with the mask, 58 us causal; on two CPU cores (8 heads of width 64,
1024 positions): 13.7 ms and 9.5 ms.

**Boolean masks.** No back end reads a boolean mask on a GPU: PyTorch turns it into numbers in each call, by several
small kernels. All layers have the same mask, so it is done once here, and fused with what computes the mask. The
numbers are those that PyTorch takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuseplan.planner.rewrites.attention_call import (
    arguments_of,
    attention_calls,
    change_call,
    fake_arguments,
    masked_number,
)
from fuseplan.planner.rewrites.trace_edit import (
    ancestors,
    between,
    erase_unused,
    insert_call,
    is_pure,
    may_write,
    static_sizes,
    trace_device,
    value_of,
)

_aten = torch.ops.aten
#: A mask is evaluated if all that is computed for it takes no more bytes than this.
_MOST_BYTES = 2**29


def drop_constant_masks(module: fx.GraphModule) -> int:
    """Let calls with a constant mask be causal, or without a mask, where that is the same; how many there were."""
    graph, found = module.graph, 0
    kinds: dict[tuple[fx.Node, tuple[int, ...]], str] = {}
    for node in list(attention_calls(graph)):
        call = arguments_of(node)
        mask, query, key = call["attn_mask"], static_sizes(call["query"]), static_sizes(call["key"])
        value = value_of(mask)
        if value is None or value.dtype != torch.bool or query is None or key is None:
            continue
        if call["is_causal"] or call["dropout_p"] != 0.0 or not _is_positive(call["scale"]):
            continue
        sizes = (*query[:-1], key[-2])
        if (mask, sizes) not in kinds:
            kinds[mask, sizes] = _kind(mask, sizes)
        kind = kinds[mask, sizes]
        if kind != "data" and change_call(node, attn_mask=None, is_causal=kind == "causal"):
            found += 1
    for mask in dict.fromkeys(mask for (mask, _), kind in kinds.items() if kind != "data"):
        erase_unused(graph, ancestors(mask))
    return found


def _is_positive(scale: Any) -> bool:
    """Whether a scale keeps what causal attention hides: kernels scale its minus infinity, too."""
    return scale is None or (isinstance(scale, int | float) and scale > 0)


def _kind(mask: fx.Node, sizes: tuple[int, ...]) -> str:
    """``"causal"``, ``"all"``, or ``"data"`` where a mask for scores of ``sizes`` is neither, or not known."""
    made = ancestors(mask)
    if not _is_constant(mask, made):
        return "data"
    # A trace is made in a fake mode, which would take these for fakes, too.
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        try:
            value = _evaluated(made)
            rows, cols = value.expand(sizes).shape[-2:]
        except Exception:  # also of an op that the CPU has not
            return "data"
        if bool(value.all()):
            return "all"
        if rows != cols or value.shape[-2:] != (rows, cols):
            return "data"
        causal = torch.ones(rows, cols, dtype=torch.bool, device=value.device).tril_()
        return "causal" if bool((value == causal).all()) else "data"


def _is_constant(mask: fx.Node, made: list[fx.Node]) -> bool:
    """Whether a mask follows from constants alone, by ops that are cheap to run here."""
    total = 0
    for one in made:
        value = value_of(one)
        if one.op != "call_function" or not _is_function(one.target) or value is None or static_sizes(one) is None:
            return False
        # Whole numbers are the same on every device.
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return False
        total += value.numel() * value.element_size()
    if total > _MOST_BYTES:
        return False
    last = next(iter(reversed(mask.graph.nodes)))
    return not any(may_write(one, made) for one in between(made[0], last))


def _is_function(target: Any) -> bool:
    """Whether a call gives the same for the same operands: a custom op may read what it is not given."""
    if not isinstance(target, torch._ops.OpOverload):
        return is_pure(target)
    return target.namespace == "aten" and is_pure(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _evaluated(made: list[fx.Node]) -> torch.Tensor:
    """The value of the last of some nodes, on the CPU."""
    here = torch.device("cpu")
    values: dict[fx.Node, torch.Tensor] = {}
    left = {one: len(one.users.keys() & set(made)) for one in made}
    for one in made:
        args = [here if isinstance(arg, torch.device) else arg for arg in fx.map_arg(one.args, values.__getitem__)]
        kwargs = dict(fx.map_arg(one.kwargs, values.__getitem__))
        if "device" in kwargs:
            kwargs["device"] = here
        values[one] = one.target(*args, **kwargs)  # type: ignore[operator]
        for read in one.all_input_nodes:
            left[read] -= 1
            if not left[read]:
                del values[read]
    return values[made[-1]]


def add_boolean_masks(module: fx.GraphModule) -> int:
    """Turn boolean masks into numbers once for all calls on a GPU; how many calls."""
    graph, found = module.graph, 0
    numbers: dict[tuple[fx.Node, torch.dtype, float], fx.Node] = {}
    for node in list(attention_calls(graph)):
        mask, query = arguments_of(node)["attn_mask"], value_of(arguments_of(node)["query"])
        value = value_of(mask)
        if value is None or value.dtype != torch.bool or query is None or trace_device(node) != "cuda":
            continue
        hidden = masked_number(fake_arguments(node))
        made = numbers.get((mask, query.dtype, hidden))
        if made is None or any(may_write(one, [mask]) for one in between(made, node)):
            with graph.inserting_before(node):
                where = insert_call(graph, _aten.where.Scalar, (mask, 0.0, hidden))
                made = insert_call(graph, _aten.to.dtype, (where, query.dtype))
            numbers[mask, query.dtype, hidden] = made
        found += change_call(node, attn_mask=made)
    for made in numbers.values():
        erase_unused(graph, ancestors(made))
    return found
