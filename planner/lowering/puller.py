"""Pulling values: "what is this value at this position", answered by emitting instructions. Recipes drive it."""

from __future__ import annotations

from fuseplan.kernels.ir.index import Size, flatten
from fuseplan.kernels.ir.ir import NARROW, Apply, Load, Round, register_type
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipes import find_recipe, why_refused
from fuseplan.planner.lowering.views import VIEW_MAPS, Position, is_address_map

#: Storage types narrower than the register that holds their values.
_ROUNDED = NARROW | {"bfloat16", "float16"}


class Puller(BodyBuilder):
    """Answers "what is this value at this position" by emitting instructions into a space."""

    def pull(self, value: str, position: Position) -> int:
        """Value id of ``value`` at ``position``."""
        key = (value, position, self._mask)
        if key not in self._space.pulled:
            self._space.pulled[key] = self._produce(value, position)
        return self._space.pulled[key]

    def stored(self, value: str, position: Position) -> int:
        """Value id of what a store of ``value`` writes: the store itself narrows it to the stored type."""
        node = self._member(value)
        spec = self.specs[value]
        if node is None or spec.dtype not in _ROUNDED:
            return self.cast(self.pull(value, position), register_type(spec.dtype))
        return self.cast(self._computed(node, value, position), register_type(spec.dtype))

    def _produce(self, value: str, position: Position) -> int:
        graph = self._group.graph
        node = self._member(value)
        if node is not None:
            return self._rounded(self._computed(node, value, position), self.specs[value].dtype)
        producer = graph.producer(value)
        if producer is not None and self._group.looks_through(producer):
            view = graph.op(producer)
            return self.pull(view.inputs[0], VIEW_MAPS[view.op](view, value, position, graph.specs))
        spec = self.specs[value]
        index = flatten(position, spec.strides)
        return self._space.emit(Load(register_type(spec.dtype), self._group.input_buffer(value), index, self._mask))

    def _member(self, value: str) -> OpNode | None:
        """The op of the group that computes ``value``."""
        graph = self._group.graph
        producer = graph.producer(value)
        if producer is None or producer not in self._group.members:
            return None
        node = graph.op(producer)
        return None if is_address_map(node, graph.specs) else node

    def _computed(self, node: OpNode, value: str, position: Position) -> int:
        # A plan is made for numbers; where a size is dynamic its recipe may refuse what it took.
        recipe, reason = find_recipe(node.op), why_refused(node, self.specs)
        if recipe is None or reason is not None:
            raise NotLowerable(reason or f"{node.op} has no recipe")
        builds = (recipe.build, *recipe.others)
        return builds[node.outputs.index(value)](self, node, position)

    def _rounded(self, value: int, dtype: str) -> int:
        """What is left of a value in its own dtype, where that matters to those who read it."""
        if dtype not in NARROW and (self._group.numerics != "eager" or dtype not in _ROUNDED):
            return value
        value = self.cast(value, register_type(dtype))
        return value if self._fits(value, dtype) else self._space.emit(Round(self.dtype_of(value), value, dtype))

    def _fits(self, value: int, dtype: str) -> bool:
        """True when a value is known to be one that ``dtype`` holds."""
        instr = self._space.body[value]
        if isinstance(instr, Load):
            return self.specs[self._group.inputs[instr.buffer]].dtype == dtype
        if isinstance(instr, Apply) and instr.op == "where":
            return all(self._fits(arg, dtype) for arg in instr.args[1:])
        return isinstance(instr, Round) and instr.to == dtype

    def row_shape(self, node: OpNode) -> tuple[Size, ...]:
        recipe = find_recipe(node.op)
        assert recipe is not None
        return recipe.row_shape(node, self.specs)
