"""Parts of a Dynamo graph that only work while a mode is on, rewritten as the ops that they come down to.

``torch.vmap``, ``torch.func.grad`` and their kin enter and leave a functorch level; tensors made in between have no
memory, so no pre-dispatch trace can hold them. Such a part is traced by itself, below the levels. A checkpoint, which
has no meaning without gradients, is its body.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuseplan.planner.capture.modules import trace_ops
from fuseplan.planner.errors import CaptureError

#: What leaves a functorch level, by its kind.
_LEAVE = {
    "Vmap": "_vmap_decrement_nesting", "Grad": "_grad_decrement_nesting", "Jvp": "_jvp_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}
_ENTERS, _LEAVES = "_increment_nesting", "_decrement_nesting"
_CHECKPOINT = "tag_activation_checkpoint"
#: A call that older releases of PyTorch put before the levels; it gives nothing.
_LOADS = "lazy_load_decompositions"


def without_transforms(module: fx.GraphModule, arguments: Sequence[Any]) -> fx.GraphModule:
    """``module`` itself, or a copy without functorch levels and checkpoints. Call it under the graph's fake mode.

    ``arguments`` are fake values of its inputs.
    """
    sections = list(_sections(module.graph))
    if not sections and not any(_is_checkpoint(node) for node in module.graph.nodes):
        return module
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(*arguments)
    values = interpreter.env
    ends = {section[-1]: section for section in _joined(module.graph, sections, values)}
    inside = {node for section in ends.values() for node in section}
    graph, made, parts = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for node in module.graph.nodes:
        if node in ends:
            name = f"section_{node.name}"
            given, outputs, parts[name] = _flat(module, ends[node], values)
            call = graph.call_module(name, tuple(made[one] for one in given))
            made |= {one: graph.call_function(operator.getitem, (call, at)) for at, one in enumerate(outputs)}
        elif _is_checkpoint(node):
            body, *operands = node.args
            made[node] = graph.call_module(body.target, fx.map_arg(tuple(operands), made.__getitem__))
        elif node not in inside and _name(node) != _LOADS:
            made[node] = graph.node_copy(node, made.__getitem__)
    held = [node.target for node in graph.nodes if node.op in ("get_attr", "call_module")]
    return fx.GraphModule({name: parts.get(name) or operator.attrgetter(name)(module) for name in held}, graph)


def _flat(
    module: fx.GraphModule, section: Sequence[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[list[fx.Node], list[fx.Node], fx.GraphModule]:
    """What a section reads and what is read of it, and its trace, which is called with the one and gives the other."""
    members = set(section)
    outputs = [node for node in section if any(user not in members for user in node.users)]
    graph = fx.Graph()
    read = _read_by(section)
    own = {node: graph.node_copy(node) if node.op == "get_attr" else graph.placeholder(node.name) for node in read}
    for node in section:
        own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(tuple(own[node] for node in outputs))
    given = [node for node in read if node.op != "get_attr"]
    if any(is_traceable_wrapper_subclass(leaf) for node in given for leaf in pytree.tree_leaves(values[node])):
        raise CaptureError("a function transform reads a tensor subclass")
    # Below pre-dispatch, levels are resolved before an op is recorded.
    flat = trace_ops(fx.GraphModule(module, graph), [values[node] for node in given])
    return given, outputs, flat


def _joined(graph: fx.Graph, sections: Sequence[list[fx.Node]], values: Mapping[fx.Node, Any]) -> list[list[fx.Node]]:
    """Sections, joined where one reads a wrapper that another made (a Jacobian's parts).

    A node that reads a wrapper after its level was left joins them as well (the gradients of ``torch.func.vjp``).
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    inside = {node for section in sections for node in section}
    later = [[node] for node in graph.nodes if node.op != "output" and node not in inside
             and any(_is_wrapper(values[one]) for one in node.all_input_nodes)]
    joined: list[list[fx.Node]] = []
    for section in sorted((*sections, *later), key=lambda section: order[section[0]]):
        wrappers = [order[node] for node in _read_by(section) if _is_wrapper(values[node])]
        start = min(wrappers, default=order[section[0]])
        while joined and order[joined[-1][-1]] >= start:
            section = [node for node in graph.nodes if order[joined[-1][0]] <= order[node] <= order[section[-1]]]
            joined.pop()
        joined.append(section)
    return joined


def _is_wrapper(value: Any) -> bool:
    """True of a tensor that belongs to a functorch level, and of a list of such."""
    return any(isinstance(one, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(one)
               for one in pytree.tree_leaves(value))


def _read_by(section: Sequence[fx.Node]) -> list[fx.Node]:
    members = set(section)
    return list(dict.fromkeys(one for node in section for one in node.all_input_nodes if one not in members))


@contextmanager
def modes_restored() -> Iterator[None]:
    """Leaves no functorch level and no gradient mode behind when a trace fails inside of one."""
    depth, grad = torch._C._functorch.get_dynamic_layer_stack_depth(), torch.is_grad_enabled()
    level = forward_ad._current_level
    try:
        yield
    except BaseException:
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()
        # What undoes several at once takes every level for a vmap's in torch 2.11.
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            kind = torch._C._functorch.peek_interpreter_stack().key().name
            getattr(torch._C._functorch, _LEAVE[kind])()
        torch._C._autograd._saved_tensors_hooks_enable()
        raise
    finally:
        torch.set_grad_enabled(grad)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_checkpoint(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == _CHECKPOINT


def _sections(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Runs of nodes from one that enters a level, outside of any, to the one that leaves it."""
    depth, section = 0, list[fx.Node]()
    for node in graph.nodes:
        if _name(node).endswith(_ENTERS):
            depth += 1
        if depth:
            section.append(node)
        if _name(node).endswith(_LEAVES):
            depth -= 1
            if not depth:
                yield section
                section = []
