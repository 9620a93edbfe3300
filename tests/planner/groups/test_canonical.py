"""Canonical keys: blind to names and capture order, sensitive to everything that changes a kernel."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SUPPORT
from random_graphs import random_graph

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, Region, TensorSpec
from fuseplan.planner.groups.canonical import attribute_text, canonical_form


def scrambled(graph: DataflowGraph, seed: int) -> tuple[DataflowGraph, dict[str, str]]:
    """The graph under other names and in another topological order, with the new name of each value."""
    rng = random.Random(seed)
    numbers = list(range(len(graph.specs)))
    rng.shuffle(numbers)
    names = {value: f"t{number}" for value, number in zip(graph.specs, numbers, strict=True)}
    waiting = {name: set(graph.graph.pred[name]) for name in graph.graph}
    nodes = []
    while waiting:
        name = rng.choice([name for name, preds in waiting.items() if not preds])
        del waiting[name]
        for preds in waiting.values():
            preds.discard(name)
        node = graph.op(name)
        nodes.append(OpNode(node.op, tuple(names[v] for v in node.inputs), tuple(names[v] for v in node.outputs),
                            node.attrs))
    order = [(names[a], names[b]) for a, b, values in graph.graph.edges(data="values") if not values]
    specs = {names[value]: graph.specs[value] for value in rng.sample(list(graph.specs), len(graph.specs))}
    inputs, outputs = ([names[value] for value in values] for values in (graph.inputs, graph.outputs))
    return DataflowGraph(nodes, specs, inputs, outputs, order=order), names


def structure(graph: DataflowGraph, form: Region) -> list[Any]:
    """What two forms with one key must agree on: each op with its operands as positions in the form."""
    place: dict[str, Any] = {value: ("in", at) for at, value in enumerate(form.inputs)}
    for at, name in enumerate(form.ops):
        place |= {value: (at, slot) for slot, value in enumerate(graph.op(name).outputs)}
    return [
        (graph.op(name).op, [place[value] for value in graph.op(name).inputs], graph.op(name).attrs)
        for name in form.ops
    ] + [place[value] for value in form.outputs]


def form_of(graph: DataflowGraph, ops: list[str]) -> Region:
    """The form of some ops, whose outputs are what others read or the graph returns."""
    values = [value for name in ops for value in graph.op(name).outputs]
    read = [value for value in values if any(value in node.inputs for node in graph if node.name not in ops)]
    return canonical_form(graph, ops, [*read, *set(values).intersection(graph.outputs)])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 2))
def test_names_and_order_do_not_matter(seed: int, size: int, order: int) -> None:
    graph = random_graph(seed, size, order=order)
    other, names = scrambled(graph, seed + 1)
    rng = random.Random(seed)
    ops = rng.sample(list(graph.graph), rng.randint(1, size))
    form = form_of(graph, ops)
    moved = form_of(other, [names[name] for name in reversed(ops)])
    assert form.key == moved.key
    assert structure(graph, form) == structure(other, moved)
    assert set(form.ops) == set(ops)
    position = {name: at for at, name in enumerate(form.ops)}
    for name in ops:
        assert all(position[before] < position[name] for before in graph.graph.pred[name] if before in position)


def mirrored(asymmetric: bool = False) -> DataflowGraph:
    """The q and k halves of RoPE: every op has a twin, so only singling one out keeps the halves apart."""
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = []
    for side in "qk":
        nodes += [
            OpNode("aten.mul.Tensor", (side, "cos"), (f"{side}a",)),
            OpNode("aten.neg.default", (side,), (f"{side}n",)),
            OpNode("aten.mul.Tensor", (f"{side}n", "sin"), (f"{side}b",)),
            OpNode("aten.add.Tensor", (f"{side}a", f"{side}b" if not asymmetric else f"{'kq'[side == 'k']}b"),
                   (f"{side}r",)),
        ]
    nodes.sort(key=lambda node: node.op == "aten.add.Tensor")
    values = ("q", "k", "cos", "sin", *(node.name for node in nodes))
    return DataflowGraph(nodes, dict.fromkeys(values, spec), values[:4], ("qr", "kr"))


@pytest.mark.parametrize("seed", range(40))
def test_symmetric_halves(seed: int) -> None:
    graph = mirrored()
    other, _ = scrambled(graph, seed)
    form, moved = canonical_form(graph, graph.graph, graph.outputs), canonical_form(other, other.graph, other.outputs)
    assert form.key == moved.key
    assert structure(graph, form) == structure(other, moved)


def test_crossed_halves_differ() -> None:
    crossed, straight = mirrored(asymmetric=True), mirrored()
    assert key_of(straight) != key_of(crossed)


def key_of(graph: DataflowGraph) -> str:
    return canonical_form(graph, graph.graph, graph.outputs).key


def rebuilt(graph: DataflowGraph, change: Callable[[OpNode], OpNode] = lambda node: node,
            spec: Callable[[str, TensorSpec], TensorSpec] = lambda name, spec: spec,
            outputs: tuple[str, ...] | None = None, order: tuple[tuple[str, str], ...] = ()) -> DataflowGraph:
    specs = {name: spec(name, old) for name, old in graph.specs.items()}
    return DataflowGraph(map(change, graph), specs, graph.inputs, outputs or graph.outputs, order=order)


def small() -> DataflowGraph:
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = [
        OpNode("aten.mul.Tensor", ("x", "y"), ("a",)),
        OpNode("aten.mul.Tensor", ("x", "z"), ("b",)),
        OpNode("aten.sub.Tensor", ("a", "b"), ("c",), {"alpha": 1}),
        OpNode("aten.exp.default", ("x",), ("d",)),
    ]
    return DataflowGraph(nodes, dict.fromkeys("xyzabcd", spec), "xyz", "cd")


def on(name: str, **changes: Any) -> Callable[[OpNode], OpNode]:
    return lambda node: replace(node, **changes) if node.name == name else node


def layout(name: str, **changes: Any) -> Callable[[str, TensorSpec], TensorSpec]:
    return lambda value, spec: replace(spec, **changes) if value == name else spec


CHANGES = {
    "attribute": rebuilt(small(), on("c", attrs={"alpha": 2})),
    "attribute type": rebuilt(small(), on("c", attrs={"alpha": 1.0})),
    "op": rebuilt(small(), on("c", op="aten.add.Tensor")),
    "operand order": rebuilt(small(), on("c", inputs=("b", "a"), attrs={"alpha": 1})),
    "edge": rebuilt(small(), on("d", inputs=("y",))),
    "sharing": rebuilt(small(), on("b", inputs=("y", "z"))),
    "same operand twice": rebuilt(small(), on("c", inputs=("a", "a"), attrs={"alpha": 1})),
    "input dtype": rebuilt(small(), spec=layout("x", dtype="bfloat16")),
    "input stride": rebuilt(small(), spec=layout("x", strides=(1, 4))),
    "input shape": rebuilt(small(), spec=layout("x", shape=(1, 8))),
    "result stride": rebuilt(small(), spec=layout("b", strides=(1, 4))),
    "result dtype": rebuilt(small(), spec=layout("d", dtype="bfloat16")),
    "output": rebuilt(small(), outputs=("a", "c", "d")),
    "ordering edge": rebuilt(small(), order=(("a", "d"),)),
}


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "operand order"])
def test_every_change_changes_the_key(change: str) -> None:
    keys = {name: key_of(graph) for name, graph in CHANGES.items() if name != "operand order"}
    assert keys[change] != key_of(small())
    assert list(keys.values()).count(keys[change]) == 1


def test_operand_order_matters_unless_it_is_a_renaming() -> None:
    """In ``small`` y and z play equal parts, so a - b and b - a are one structure; with y wider they are two."""
    assert key_of(CHANGES["operand order"]) == key_of(small())
    wide = layout("y", dtype="float64")
    assert key_of(rebuilt(CHANGES["operand order"], spec=wide)) != key_of(rebuilt(small(), spec=wide))


def labelled(graph: DataflowGraph) -> nx.DiGraph:
    """Ops and input values as labelled nodes, operand positions as edge labels."""
    result: nx.DiGraph = nx.DiGraph()
    for node in graph:
        result.add_node(node.name, label=(node.op, repr(sorted(node.attrs.items())), node.name in graph.outputs))
        for slot, value in enumerate(node.inputs):
            if value not in result:
                result.add_node(value, label=graph.specs[value])
            slots = result.get_edge_data(value, node.name, {"slots": ()})["slots"]
            result.add_edge(value, node.name, slots=(*slots, slot))
    return result


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_keys_are_equal_exactly_for_isomorphic_graphs(seed: int, size: int, rewire: bool) -> None:
    """Against VF2 isomorphism, on graphs that differ in one operand, or in anything."""
    graph = random_graph(seed, size)
    rng = random.Random(seed)
    other = random_graph(rng.randint(0, 10**6), size)
    if rewire:
        victim = rng.choice(list(graph))
        earlier = ["x0", "x1", *(name for name in graph.graph if graph.position(name) < graph.position(victim.name))]
        inputs = (rng.choice(earlier), *victim.inputs[1:])
        other = rebuilt(graph, lambda node: replace(node, inputs=inputs) if node.name == victim.name else node)
    same = nx.is_isomorphic(
        labelled(graph), labelled(other), lambda a, b: a["label"] == b["label"], lambda a, b: a["slots"] == b["slots"]
    )
    assert (key_of(graph) == key_of(other)) == same


def test_outputs_are_part_of_a_form() -> None:
    graph = small()
    one = canonical_form(graph, ["a", "b"], ["a"])
    assert one.outputs == ("a",)
    assert one.key != canonical_form(graph, ["a", "b"], ["a", "b"]).key


def test_unknown_op_is_named() -> None:
    with pytest.raises(KeyError, match="nope"):
        canonical_form(small(), ["a", "nope"], ["a"])


def test_equal_hashes_of_unequal_attributes_are_told_apart() -> None:
    forms = {canonical_form(one_op({"other": value}), ["z"], ["z"]).key for value in (1, 1.0, True)}
    assert len(forms) == 3


def one_op(attrs: dict[str, object]) -> DataflowGraph:
    spec = TensorSpec.contiguous((4,), "float32")
    return DataflowGraph([OpNode("aten.add.Tensor", ("x",), ("z",), attrs)], {"x": spec, "z": spec}, ["x"], ["z"])


def test_attribute_texts_tell_values_apart() -> None:
    values: list[Any] = [
        None, True, False, 1, 0, 1.0, 0.0, -0.0, float("nan"), float("inf"), "1", "None", (1,), (1, 2), ((1,), 2),
        Ref(1), {"a": 1}, {"a": 2}, torch.float32, torch.bfloat16, torch.strided, torch.contiguous_format, 1j,
    ]
    assert len({attribute_text(value) for value in values}) == len(values)
    assert attribute_text([1, (2,)]) == attribute_text((1, [2]))
    assert attribute_text({"a": 1, "b": 2}) == attribute_text({"b": 2, "a": 1})
    assert attribute_text(torch.device("cuda", 1)) == attribute_text(torch.device("meta"))
    with pytest.raises(TypeError, match="object"):
        attribute_text(object())


def test_keys_are_the_same_in_every_process() -> None:
    """Python randomises ``hash`` per process; keys must not notice, nor change from release to release."""
    script = (
        "from fuseplan.planner.groups.canonical import canonical_form\n"
        "from random_graphs import random_graph\n"
        "g = random_graph(7, 60, order=3)\n"
        "print(canonical_form(g, g.graph, g.outputs).key)"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"},
        cwd=SUPPORT,
    )
    graph = random_graph(7, 60, order=3)
    key = canonical_form(graph, graph.graph, graph.outputs).key
    assert other.stdout.strip() == key
    assert key.startswith("f3efbe265fd18223"), "the canonical text changed: raise SCHEMA, then this key"
