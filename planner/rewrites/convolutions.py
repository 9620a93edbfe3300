"""Convolutions in a pre-dispatch trace, laid out as the libraries of GPUs compute them: channels last.

Libraries turn a copy of other pictures of halves round, and the result back, in each call. Here the first convolution
of a chain reads a copy that lies so, and what follows inherits that. What the trace returns lies as before.

* A convolution over one dimension becomes one over a picture of height 1, as in PyTorch.
* A model's own copy of a picture that lies so already is not read. Weights are copied, as PyTorch does in each call.
* A bias is added by an op of its own, so that the next kernel can hold it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.rewrites import trace_edit as edit

_aten = torch.ops.aten
_CONV1D = _aten.conv1d.default
_CONV2D = _aten.conv2d.default
_HALVES = (torch.bfloat16, torch.float16)
_ROW_MAJOR = {"memory_format": torch.contiguous_format}


def lay_channels_last(module: fx.GraphModule) -> int:
    """Let convolutions of halves on a GPU read and give pictures with channels last; how many were changed."""
    wanted = [node for node in module.graph.nodes if node.target in (_CONV1D, _CONV2D) and _is_wanted(node)]
    if not wanted:
        return 0
    returned = _copied_results(module.graph)
    changed = sum(map(_change, wanted))
    for copy in returned:
        (source,) = copy.all_input_nodes
        if source.meta["val"].stride() == copy.meta["val"].stride():
            copy.replace_all_uses_with(source)
            module.graph.erase_node(copy)
    if changed:
        module.graph.lint()
        module.recompile()
    return changed


def _is_wanted(node: fx.Node) -> bool:
    """Whether it is a convolution of pictures, or of lines, with several elements and channels."""
    call = edit.arguments_of(node)
    sizes, weight = edit.static_sizes(call["input"]), edit.static_sizes(call["weight"])
    value = edit.value_of(call["input"])
    if sizes is None or weight is None or value is None or not is_gpu(edit.trace_device(node)):
        return False
    if value.dtype not in _HALVES or len(sizes) != len(weight) or isinstance(call["padding"], str):
        return False
    sums_over_group = weight[1] != 1 and call["groups"] != 1  # kernels for groups are another matter
    return not sums_over_group and min(sizes) > 0 and sizes[1] > 1 and sizes[-1] > 1


def _change(node: fx.Node) -> bool:
    """Read a copy with channels last; where others may tell how the result lies, copy it back. Whether it was done."""
    graph, call = node.graph, edit.arguments_of(node)

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.insert_call(graph, target, args, kwargs, [node])

    with graph.inserting_before(node):
        picture, weight, bias = call.pop("input"), call.pop("weight"), call.pop("bias")
        if node.target is _CONV1D:
            picture, weight = add(_aten.unsqueeze.default, picture, 2), add(_aten.unsqueeze.default, weight, 2)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
                call[name] = [default, *call[name]]
        source = edit.copied_from(picture, node)
        if source is not None and _channels_last(source):
            picture = source
        picture, weight = (
            one if _channels_last(one) else add(_aten.clone.default, one, memory_format=torch.channels_last)
            for one in (picture, weight))
        made = add(_CONV2D, picture, weight, None, *call.values())
        if not _channels_last(made):  # no library computes it so here
            edit.erase_unused(made)
            return False
        if bias is not None:
            made = add(_aten.add.Tensor, made, add(_aten.view.default, bias, [-1, 1, 1]))
        if node.target is _CONV1D:
            made = add(_aten.squeeze.dim, made, 2)
        if edit.put_in_place(made, node):
            return True
        back = add(_aten.clone.default, made, **_ROW_MAJOR)
    if edit.put_in_place(back, node):
        return True
    edit.erase_unused(back)
    return False


def _channels_last(node: fx.Node) -> bool:
    """Whether channels come last, as they also do where there is one, or nothing beside them."""
    value = node.meta["val"]
    return bool(value.stride(1) == 1 or value.shape[1] == 1 or math.prod(value.shape[2:]) == 1)


def _copied_results(graph: fx.Graph) -> list[fx.Node]:
    """Return row-major copies of results in memory of their own: what is computed before them may lie otherwise."""
    output = graph.output_node()
    values = {one: value for one in graph.nodes if (value := edit.value_of(one)) is not None}
    memory = Counter(edit.storage_of(values[one]) for one in output.all_input_nodes if one in values)
    given = {edit.storage_of(value) for one, value in values.items() if one.op != "call_function"}
    copies = []
    for node in output.all_input_nodes:
        if node not in values or edit.static_sizes(node) is None:
            continue
        value, place = values[node], edit.storage_of(values[node])
        if value.dim() < 3 or not value.is_contiguous() or memory[place] > 1 or place in given:
            continue
        with graph.inserting_before(output):
            copy = edit.insert_call(graph, _aten.clone.default, (node,), _ROW_MAJOR, [node])
        output.replace_input_with(node, copy)
        copies.append(copy)
    return copies

