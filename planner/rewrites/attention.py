"""Attention in a pre-dispatch trace, before it is planned: what PyTorch would compute again in every call is left out.

* Pages of a cache are read where they lie, and capped scores are one op (``decode_attention.py``).
* Keys and values that query heads share are not copied for every head (``grouped_queries.py``).
* **Constant masks.** A traced model cannot look at numbers, so it hands over a mask where eagerly it would have seen
  that it is causal. A mask made of constants alone is evaluated here, and the call says what it means.
* **Boolean masks.** PyTorch turns one into numbers in each call on a GPU. Here that is done once for all layers.
* **Masks across memory.** No fused kernel reads a mask whose columns do not follow one another (T5's biases of heads):
  PyTorch then computes all scores by single ops. It is copied once.
* **Copies of operands.** Models make queries, keys and values contiguous (Whisper); fused kernels read them as they
  are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.rewrites import trace_edit as edit
from fuseplan.planner.rewrites.attention_call import (
    ATTENTION,
    change_call,
    chosen_backend,
    fake_arguments,
    masked_number,
)
from fuseplan.planner.rewrites.decode_attention import rewrite_decoding
from fuseplan.planner.rewrites.grouped_queries import fold_grouped_queries
from fuseplan.search.errors import OWN_FAULTS

_aten = torch.ops.aten
#: A mask is evaluated if all that is computed for it takes no more bytes than this.
MOST_BYTES = 2**29


@dataclass(frozen=True)
class AttentionRewrites:
    """How many attention calls of a trace were rewritten.

    ``grouped_queries`` read shared keys and values without copies, ``dropped_masks`` had a constant mask,
    ``added_masks`` take a boolean mask as numbers, ``copied_masks`` a copy that fused kernels read, and
    ``uncopied_operands`` no copies. ``paged_attention`` reads the pages of a cache; ``capped_attention`` was a chain.
    """

    grouped_queries: int = 0
    dropped_masks: int = 0
    added_masks: int = 0
    copied_masks: int = 0
    uncopied_operands: int = 0
    paged_attention: int = 0
    capped_attention: int = 0


def rewrite_attention(
    module: fx.GraphModule, grouped_queries: bool | None = None, masks: bool = True,
    decode_attention: bool | None = None,
) -> AttentionRewrites:
    """Rewrite every attention call of a trace with fake values in ``meta["val"]``; the masks only with ``masks``.

    ``grouped_queries`` and ``decode_attention``: whether that is done. None stands for where the first is measured to
    pay, and for devices that have a kernel for the second.
    """
    dropped = _drop_constant_masks(module.graph) if masks else 0
    paged, capped = rewrite_decoding(module, decode_attention)
    grouped = fold_grouped_queries(module, grouped_queries)
    added = _add_boolean_masks(module.graph) if masks else 0
    copied = _copy_masks_across_memory(module.graph) if masks else 0
    uncopied = _read_through_copies(module.graph)
    done = AttentionRewrites(grouped, dropped, added, copied, uncopied, paged, capped)
    if done != AttentionRewrites():
        module.graph.lint()
        module.recompile()
    return done


def _drop_constant_masks(graph: fx.Graph) -> int:
    """Let calls with a constant mask be causal, or without a mask, where that is the same; how many there were."""
    dropped, kind_of = list[fx.Node](), cache(_kind)  # layers share masks
    for node in list(graph.find_nodes(op="call_function", target=ATTENTION)):
        call = edit.arguments_of(node)
        mask, query, key = call["attn_mask"], edit.static_sizes(call["query"]), edit.static_sizes(call["key"])
        value = edit.value_of(mask)
        if value is None or value.dtype != torch.bool or query is None or key is None:
            continue
        scale = call["scale"]  # kernels scale the minus infinity of what is hidden, too
        is_positive = scale is None or (isinstance(scale, int | float) and scale > 0)
        if call["is_causal"] or call["dropout_p"] != 0.0 or not is_positive:
            continue
        kind = kind_of(mask, (*query[:-1], key[-2]))
        if kind != "data" and change_call(node, attn_mask=None, is_causal=kind == "causal"):
            dropped.append(mask)
    edit.erase_unused(*dropped)
    return len(dropped)


def _kind(mask: fx.Node, sizes: tuple[int, ...]) -> str:
    """``"causal"``, ``"all"``, or ``"data"`` where a mask for scores of ``sizes`` is neither, or not known."""
    made = edit.ancestors(mask)
    if not _is_constant(mask, made):
        return "data"
    # A trace is made in a fake mode, which would take these for fakes, too.
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        try:
            value = _evaluated(made)
            rows, cols = value.expand(sizes).shape[-2:]
        except Exception as error:  # also of an op that the CPU has not
            OWN_FAULTS.tolerate(error)
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
        value = edit.value_of(one)
        if one.op != "call_function" or not _is_function(one.target) or value is None or edit.static_sizes(one) is None:
            return False
        # Whole numbers are the same on every device.
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return False
        total += value.numel() * value.element_size()
    return total <= MOST_BYTES and not edit.is_written_between(made[0], mask.graph.output_node(), made)


def _is_function(target: Any) -> bool:
    """Whether a call gives the same for the same operands: a custom op may read what it is not given."""
    if not isinstance(target, torch._ops.OpOverload):
        return edit.is_pure(target)
    return target.namespace == "aten" and edit.is_pure(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _evaluated(made: list[fx.Node]) -> torch.Tensor:
    """The value of the last of some nodes, on the CPU."""
    here = torch.device("cpu")
    values: dict[fx.Node, torch.Tensor] = {}
    for one in made:
        args = [here if isinstance(arg, torch.device) else arg for arg in fx.map_arg(one.args, values.__getitem__)]
        kwargs = dict(fx.map_arg(one.kwargs, values.__getitem__))
        if "device" in kwargs:
            kwargs["device"] = here
        values[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return values[made[-1]]


def _add_boolean_masks(graph: fx.Graph) -> int:
    """Turn boolean masks into the numbers that PyTorch takes, once for all calls on a GPU; how many calls."""
    found = 0
    numbers: dict[tuple[fx.Node, torch.dtype, float], fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=ATTENTION)):
        mask, query = edit.arguments_of(node)["attn_mask"], edit.value_of(edit.arguments_of(node)["query"])
        value = edit.value_of(mask)
        if value is None or value.dtype != torch.bool or query is None or not is_gpu(edit.trace_device(node)):
            continue
        hidden = masked_number(fake_arguments(node))
        made = numbers.get((mask, query.dtype, hidden))
        if made is None or edit.is_written_between(made, node, [mask]):
            with graph.inserting_before(node):
                where = edit.insert_call(graph, _aten.where.Scalar, (mask, 0.0, hidden), replaces=[mask])
                made = edit.insert_call(graph, _aten.to.dtype, (where, query.dtype), replaces=[mask])
            numbers[mask, query.dtype, hidden] = made
        found += change_call(node, attn_mask=made)
    edit.erase_unused(*numbers.values())
    return found


def _copy_masks_across_memory(graph: fx.Graph) -> int:
    """Copy masks whose columns do not follow one another, where a fused kernel can run then; how many calls.

    On a GPU all fused kernels refuse them (``check_last_dim_stride_equals_1_dense`` in ATen's ``sdp_utils_cpp.h``).
    """
    found = 0
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=ATTENTION)):
        mask = edit.arguments_of(node)["attn_mask"]
        sizes, value = edit.static_sizes(mask), edit.value_of(mask)
        if not sizes or value is None or sizes[-1] == 1 or value.stride(-1) == 1:
            continue
        if not is_gpu(edit.trace_device(node)) or chosen_backend(fake_arguments(node)) != "math":
            continue
        made = copies.get(mask)
        if made is None or edit.is_written_between(made, node, [mask]):
            with graph.inserting_before(node):
                made = copies[mask] = _row_major_copy(graph, mask, sizes, value.stride())
        if chosen_backend(fake_arguments(node, attn_mask=made)) != "math":
            found += change_call(node, attn_mask=made)
    edit.erase_unused(*copies.values())
    return found


def _read_through_copies(graph: fx.Graph) -> int:
    """Let calls on a GPU read the sources of copied operands, where the same fused kernel runs; how many calls."""
    found = 0
    for node in list(graph.find_nodes(op="call_function", target=ATTENTION)):
        call = edit.arguments_of(node)
        copies = {name: call[name] for name in ("query", "key", "value")}
        sources = {name: edit.copied_from(copy, node) for name, copy in copies.items()}
        read = {name: source for name, source in sources.items()
                if source is not None and source.meta["val"].stride(-1) == 1}
        if not read or not is_gpu(edit.trace_device(node)):
            continue
        backend = chosen_backend(fake_arguments(node))
        if backend == "math" or chosen_backend(fake_arguments(node, **read)) != backend:
            continue
        if change_call(node, **read):
            found += 1
            edit.erase_unused(*(copies[name] for name in read))
    return found


def _row_major_copy(graph: fx.Graph, mask: fx.Node, sizes: Sequence[int], strides: Sequence[int]) -> fx.Node:
    """A copy of a mask, in which what is broadcast is still there once."""
    source = mask
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if stride == 0 and size > 1:
            source = edit.insert_call(graph, _aten.slice.Tensor, (source, dim, 0, 1), replaces=[mask])
    copy = edit.insert_call(graph, _aten.contiguous.default, (source,), replaces=[mask])
    if source is mask:
        return copy
    return edit.insert_call(graph, _aten.expand.default, (copy, list(sizes)), replaces=[mask])
