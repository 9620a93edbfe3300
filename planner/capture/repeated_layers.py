"""Graphs of models whose layers are alike: three layers are traced, and the middle of the model is made of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fuseplan.planner.errors import ConfigError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.models.build import construct
from fuseplan.planner.models.sources import ModelSource, hf_config

#: Layers that are traced: the first may differ from the others, the second shows what a layer reads of the one before.
TRACED = 3
#: Of fewer layers all are traced.
FEWEST = 6
_INDEXED = re.compile(r"(.+?)\.(\d+)(?=\.|$)")
#: Attributes of modules that are compared by value.
_VALUES = (bool, int, float, str, type(None), tuple, torch.dtype)


@functools.lru_cache(maxsize=8)
def traced_source(source: ModelSource) -> tuple[ModelSource, int] | None:
    """The source of the first layers alone, and how many there are; None where the others are not known to be alike."""
    if source.kind == "module":
        return None
    text = hf_config(source).get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", 0)
    lists = [one for one in text.to_dict().values() if isinstance(one, list | tuple) and len(one) >= count]
    if count < FEWEST or any(entry != one[0] for one in lists for entry in one):
        return None
    short = replace(source, layers=TRACED)
    try:
        whole, few = (construct(one, "meta").module for one in (source, short))
    except ConfigError:  # its constructor looks at numbers, which nothing has on the meta device
        return None
    lists_of = ([(name, list(one)) for name, one in module.named_modules() if isinstance(one, nn.ModuleList)]
                for module in (whole, few))
    layers, first = ([(name, own) for name, own in found if len(own) == size]
                     for found, size in zip(lists_of, (count, TRACED), strict=True))
    if len(layers) != 1 or [name for name, _ in layers] != [name for name, _ in first]:
        return None
    ((name, all_layers),), ((_, few_layers),) = layers, first
    rest = [*enumerate(all_layers[1:], 1), *enumerate(few_layers[1:], 1)]
    is_alike = (
        _alike(whole, count, few, TRACED, without=name) and _alike(all_layers[0], 0, few_layers[0], 0)
        and all(_alike(all_layers[1], 1, layer, at) for at, layer in rest)
    )
    return (short, count) if is_alike else None


def _alike(one: nn.Module, number: int, other: nn.Module, its_number: int, without: str = "") -> bool:
    """Whether two modules' code depends on the same, but for ``number`` (a place, or how many layers there are) in the
    one for ``its_number`` in the other; ``without`` the module of that name.
    """
    ours, theirs = (list(_facts(root, without)) for root in (one, other))
    return len(ours) == len(theirs) and all(
        mine == its or (mine == (*its[:-1], number) and its[-1] == its_number)
        for mine, its in zip(ours, theirs, strict=True))


def _facts(root: nn.Module, without: str) -> Iterator[tuple[Any, ...]]:
    """The modules of one, with their attributes and parameters: the last item of each is its value."""
    for name, module in root.named_modules():
        if without and f"{name}.".startswith(f"{without}."):
            continue
        yield name, type(module)
        yield from ((name, key, value) for key, value in sorted(vars(module).items()) if isinstance(value, _VALUES))
        yield from ((name, key, (tensor.shape, tensor.dtype)) for key, tensor in module.named_parameters(recurse=False))


def with_layers(graph: DataflowGraph, count: int) -> DataflowGraph | None:
    """A graph of :data:`TRACED` layers as one of ``count``; None where its ops do not show how layers go on.

    Names, and the order of graph inputs, differ from those of a trace of all layers.
    """
    try:
        return _Repeat(graph).repeated(count)
    except _UnlikeError:
        return None


class _UnlikeError(Exception):
    """The layers of a graph are not alike."""


def _check(holds: bool) -> None:
    if not holds:
        raise _UnlikeError


class _Repeat:
    """How the last layer of a graph reads the one before, and what is its own."""

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        paths = [match for one in graph for match in [self._place(one)] if match is not None]
        _check(len({container for container, _ in paths}) == 1 and {at for _, at in paths} == set(range(TRACED)))
        self.container = paths[0][0]
        layers = [[one for one in graph if (place := self._place(one)) is not None and place[1] == at]
                  for at in range(TRACED)]
        _, self.before, self.last = layers
        names = [one.name for one in graph]
        start, end = names.index(self.before[0].name), names.index(self.last[0].name)
        _check(names[start:end] == [one.name for one in self.before])
        _check(names[end:end + len(self.last)] == [one.name for one in self.last])
        self._align()

    def _place(self, node: OpNode) -> tuple[str, int] | None:
        """The container of the layer that an op is of, and the layer's number."""
        found = {(match[1], int(match[2])) for path in self.graph.paths.get(node.name, ())
                 for match in [_INDEXED.match(path)] if match}
        _check(len(found) < 2)
        return next(iter(found), None)

    def _align(self) -> None:
        """Compare the last two layers, value by value."""
        specs, made = self.graph.specs, {value for one in self.last for value in one.outputs}
        earlier = {value for one in self.before for value in one.outputs}
        same: dict[str, str] = {}
        _check(len(self.before) == len(self.last))
        for one, other in zip(self.before, self.last, strict=True):
            _check((one.op, dict(one.attrs), len(one.inputs), len(one.outputs))
                   == (other.op, dict(other.attrs), len(other.inputs), len(other.outputs)))
            for mine, theirs in (*zip(one.inputs, other.inputs, strict=True),
                                 *zip(one.outputs, other.outputs, strict=True)):
                _check(same.setdefault(theirs, mine) == mine and specs[mine] == specs[theirs])
                _check((theirs in made) == (mine in earlier))
        _check(len(set(same.values())) == len(same))
        #: Graph inputs of the last layer alone, and its results that the graph returns.
        self.own = {value for value, mine in same.items() if mine != value and value in self.graph.inputs}
        _check(all(mine in self.graph.inputs for value, mine in same.items() if value in self.own))
        self.made, self.earlier, self.same = made, earlier, same
        returned = set(self.graph.outputs)
        self.kept = {value for value in made if value in returned and same[value] in returned}
        inside = {one.name for one in (*self.before, *self.last)}
        readers = (one for one in self.graph if one.name not in inside)
        _check(not any(value in earlier for one in readers for value in one.inputs))
        _check(all(value in {same[one] for one in self.kept} for value in earlier & returned))

    def repeated(self, count: int) -> DataflowGraph:
        graph, copies = self.graph, range(TRACED - 1, count - 1)
        earlier = self.earlier
        back = {mine: theirs for theirs, mine in self.same.items()}  # of the layer before, what the last one has for it

        def named(at: int) -> Callable[[str], str]:
            """Maps values that the last layer reads or makes to those of its copy at this place."""

            def name(value: str) -> str:
                if value in self.made or value in self.own:
                    return value if at == count - 1 else f"{value}__{at}"
                if value in earlier and at > TRACED - 1:
                    return named(at - 1)(back[value])
                return value

            return name

        nodes, specs, paths = list[OpNode](), dict(graph.specs), dict(graph.paths)
        last = {one.name for one in self.last}
        order = [pair for pair in graph.orders() if last.isdisjoint(pair)]
        own_order = [pair for pair in graph.orders() if not last.isdisjoint(pair)]
        for one in graph:
            if one.name == self.last[0].name:
                for at in (*copies, count - 1):
                    name = named(at)
                    for node in self.last:
                        copy = replace(
                            node, inputs=tuple(map(name, node.inputs)), outputs=tuple(map(name, node.outputs)))
                        nodes.append(copy)
                        paths[copy.name] = tuple(self._renumbered(path, at) for path in graph.paths.get(node.name, ()))
                        specs |= {name(value): graph.specs[value] for value in (*node.inputs, *node.outputs)}
                    order += [(name(first), name(then)) for first, then in own_order]
            if one.name not in self.made:
                nodes.append(one)

        def spread(values: Iterable[str], repeated: Iterable[str]) -> Sequence[str]:
            chosen = set(repeated)
            return [name for value in values for name in
                    ((*(named(at)(value) for at in copies), value) if value in chosen else (value,))]

        found = DataflowGraph(nodes, specs, spread(graph.inputs, self.own), spread(graph.outputs, self.kept),
                              order=order, paths=paths)
        found.fresh = graph.fresh
        found.rounds = graph.rounds | {named(at)(value) for at in copies for value in graph.rounds & self.made}
        return found

    def _renumbered(self, path: str, at: int) -> str:
        prefix = f"{self.container}.{TRACED - 1}"
        return f"{self.container}.{at}{path.removeprefix(prefix)}" if path.startswith(prefix) else path
