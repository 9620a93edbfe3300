"""Editing a pre-dispatch trace: calls put in and taken out, with the fake values of what is left kept right."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from fuseplan.planner.graph.execute import parameters_of
from fuseplan.planner.ops.table import op_of
from fuseplan.search.errors import OWN_FAULTS

#: Calls in traces that touch no tensor.
_HARMLESS = (torch._C._set_grad_enabled,)


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, None where it is something else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def fake_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node stands for."""
    return _tensors(node.meta.get("val"))


def static_sizes(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's tensor, None where it has none or where a size is dynamic."""
    sizes = sizes_of(node)
    return sizes if sizes is not None and all(type(size) is int for size in sizes) else None


def sizes_of(node: Any) -> tuple[Any, ...] | None:
    """The shape of a node's tensor, None where it has none. Comparing dynamic sizes adds no guard to the trace."""
    value = value_of(node)
    if value is None:
        return None
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)


def is_static(*tensors: torch.Tensor) -> bool:
    """Whether all sizes and strides of fake tensors are plain numbers."""
    return all(isinstance(size, int) for one in tensors for size in (*one.shape, *one.stride()))


def trace_device(node: fx.Node) -> str:
    """Kind of device of a node's tensor, ``""`` where there is none."""
    value = value_of(node)
    return "" if value is None else value.device.type


def is_pure(target: Any) -> bool:
    """Whether a call writes to none of its operands and does nothing else: an ATen op, or a result of one."""
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


def insert_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
    replaces: Sequence[fx.Node] = (),
) -> fx.Node:
    """A call at the graph's insertion point, with its fake value; it is of the modules of what it ``replaces``."""
    made = graph.call_function(target, args, kwargs or {})
    made.meta["val"] = fake_result(target, args, kwargs or {}, {})
    made.meta["modules"] = tuple(dict.fromkeys(path for one in replaces for path in one.meta.get("modules", ())))
    return made


def change_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Change the arguments of a call whose result stays the same (see :func:`follow`); False where nothing is changed.
    """
    try:
        value = fake_result(node.target, args, kwargs, {})
    except Exception as error:  # an op may refuse operands for any reason: the call stays as it is
        OWN_FAULTS.tolerate(error)
        return False
    values = follow(node, value)
    if values is None:
        return False
    node.args, node.kwargs = args, kwargs
    set_values(values)
    return True


def set_values(values: Mapping[fx.Node, Any]) -> None:
    for node, value in values.items():
        node.meta["val"] = value


def follow(
    changed: fx.Node, value: torch.Tensor, corrected: bool = False, shared: bool = False
) -> dict[fx.Node, Any] | None:
    """The fake values of a node and of what reads it, if the node had another layout or memory: those that differ.

    What lies in the same memory must go on doing so in the trace, since that is how writes are seen. With ``corrected``
    the program stays as it is, whose tensors never had the trace's layout; with ``shared`` the other value is a part of
    a larger tensor.

    None where the program would be another: a shape changes, a view is impossible, or (unless ``corrected``) memory
    whose layout or sharing is another is returned, read by address, or written to. Writing element by element is no
    matter where only the layout is another.
    """
    values: dict[fx.Node, Any] = {}
    # Storages that the nodes in ``values`` were in, and those that they are in.
    before: set[int] = set()
    after: set[int] = set()
    # Nodes whose elements lie elsewhere in memory than before, or in memory that is shared otherwise; the latter alone.
    odd: set[fx.Node] = set()
    shared_otherwise: set[fx.Node] = set()

    def put(node: fx.Node, fresh: Any, is_odd: bool, is_shared: bool) -> None:
        pairs = _pairs(node, fresh)
        if any((old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device) for old, new in pairs):
            raise ValueError(f"{node} would be another tensor")
        if is_shared:
            shared_otherwise.add(node)
        if is_odd or is_shared or any(_moves_elements(old, new) for old, new in pairs):
            odd.add(node)
        values[node] = fresh
        before.update(storage_of(old) for old, _ in pairs)
        after.update(storage_of(new) for _, new in pairs)

    def take(node: fx.Node) -> bool:
        """Work out a reader's value again; whether it differs."""
        reads_odd = not odd.isdisjoint(node.all_input_nodes)
        if reads_odd and not corrected and not _goes_by_index(node, odd, shared_otherwise):
            raise ValueError(f"{node} may tell that memory is laid out otherwise")
        if node.op != "call_function" or not _can_be_evaluated(node.target):
            return False
        fresh = fake_result(node.target, node.args, node.kwargs, values)
        pairs = _pairs(node, fresh)
        places = [(storage_of(old) in before, storage_of(new) in after) for old, new in pairs]
        if not any(map(any, places)) and all(old.stride() == new.stride() for old, new in pairs):
            return False
        reads_shared = not shared_otherwise.isdisjoint(node.all_input_nodes)
        is_inside = any(now for _, now in places)
        put(node, fresh, is_inside and reads_odd, (is_inside and reads_shared) or any(a != b for a, b in places))
        return True

    try:
        put(changed, value, False, shared)
        waiting, node = set(changed.users), changed
        while waiting:
            node = node.next
            if node in waiting:
                waiting.remove(node)
                waiting.update(node.users if take(node) else ())
    except Exception as error:  # an op may refuse another layout for any reason
        OWN_FAULTS.tolerate(error)
        return None
    return values


def put_in_place(made: fx.Node, node: fx.Node) -> bool:
    """Let a call stand in the place of another one, if the program stays the same (see :func:`follow`)."""
    values = follow(node, made.meta["val"])
    if values is None:
        return False
    set_values(values)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return True


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _pairs(node: fx.Node, fresh: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a node's fake value, each with that of another one."""
    return list(zip(_tensors(node.meta.get("val")), _tensors(fresh), strict=True))


def fake_result(target: Any, args: Any, kwargs: Any, values: Mapping[fx.Node, Any]) -> Any:
    """What a call gives for fake values: those in ``values``, or else of the nodes."""
    def value(one: fx.Node) -> Any:
        # In-place ops may change what a tensor looks like, too.
        held = values[one] if one in values else one.meta["val"]
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, held)

    with torch.no_grad():
        given = fx.map_arg(args, value), fx.map_arg(kwargs, value)
        mode = torch._guards.detect_fake_mode(given)
        assert mode is not None, f"{target} has no fake operand"
        # Where sizes are symbols, what C++ makes of a composite op reads them as numbers, or ties the graph to them.
        with mode, enable_python_dispatcher():
            return target(*given[0], **given[1])


def _can_be_evaluated(target: Any) -> bool:
    """Whether a call's fake result may be had again; where its sizes depend on data they would be other symbols."""
    tags = getattr(target, "tags", ())
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return False
    return target is operator.getitem or isinstance(target, torch._ops.OpOverload)


def _goes_by_index(node: fx.Node, odd: set[fx.Node], shared_otherwise: set[fx.Node]) -> bool:
    """Whether a node reads by index, and writes to none of ``odd``, or element by element if sharing is as it was."""
    target = node.target
    if node.op != "call_function" or target is torch.ops.aten.as_strided.default:
        return False
    if is_pure(target):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    kept = shared_otherwise if torch.Tag.pointwise in target.tags else odd
    return kept.isdisjoint(written_operands(node))


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of an op's call by its name, in the order and with the defaults of the schema."""
    defaults = {parameter.name: parameter.default for parameter in parameters_of(str(target))}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The same of a node."""
    return named_arguments(node.target, node.args, node.kwargs)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that an op's call writes to, as its schema says."""
    given = arguments_of(node)
    values = [given[parameter.name] for parameter in parameters_of(str(node.target)) if parameter.is_written]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, fx.Node)]


def _moves_elements(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether elements of two tensors of a shape lie otherwise in memory: strides of single elements do not matter."""
    if old.storage_offset() != new.storage_offset():
        return True
    return any(a != b for size, a, b in zip(old.shape, old.stride(), new.stride(), strict=True) if size != 1)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """A node and everything it is computed from, in the order of the graph."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting.extend(one.all_input_nodes)
    return [one for one in node.graph.nodes if one in seen]


def erase_unused(*nodes: fx.Node) -> None:
    """Erase nodes that nothing reads any more, and then what only they were computed from."""
    for one in (one for node in nodes for one in reversed(ancestors(node))):
        if not one.users and one.op == "call_function" and is_pure(one.target):
            one.graph.erase_node(one)


def is_written_between(first: fx.Node, last: fx.Node, tensors: Sequence[Any]) -> bool:
    """Whether a call after ``first`` and before ``last`` may write to the memory of one of ``tensors``."""
    while first is not last and (first := first.next) is not last:
        if may_write(first, tensors):
            return True
    return False


def copied_from(copy: Any, reader: fx.Node) -> fx.Node | None:
    """The node that another one is a copy of, if ``reader`` would find the same in it; None for what is no copy."""
    if not isinstance(copy, fx.Node) or not op_of(str(copy.target)).copies:
        return None
    (source,) = copy.all_input_nodes
    return None if is_written_between(copy, reader, [source, copy]) else source


def may_write(node: fx.Node, tensors: Iterable[Any]) -> bool:
    """Whether a node may write to the memory of one of ``tensors``: an unknown call always may."""
    if node.op != "call_function" or is_pure(node.target) or node.target in _HARMLESS:
        return False
    # Any operand of a call that writes counts: which of them it writes to is not worth telling apart.
    if isinstance(node.target, torch._ops.OpOverload):
        return shares_memory(node, tensors)
    is_number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    return not (is_number and getattr(node.target, "__module__", "") in ("_operator", "math", "torch"))


def shares_memory(node: fx.Node, tensors: Iterable[Any]) -> bool:
    """Whether a node reads the memory of one of ``tensors``, itself or a view of it."""
    kept, read = ({storage_of(value) for one in nodes if (value := value_of(one)) is not None}
                  for nodes in (tensors, node.all_input_nodes))
    return not kept.isdisjoint(read)


def storage_of(value: torch.Tensor) -> int:
    """Names the memory that a tensor lies in."""
    return int(value.untyped_storage()._cdata)
