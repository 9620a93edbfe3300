"""Ops that write to an operand, as parts of a kernel: what is written, where, and what no kernel may do beside it."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import run_reference
from well_formed import validate

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import OutsideTable, Target
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Buffer, KernelIR, Load, Segment, Store
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.groups.candidates import enumerate_candidates, single_candidates
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import kind_of, why_opaque
from fuseplan.planner.partition.plan_record import peak_bytes
from fuseplan.planner.work.group_work import kernel_work, op_work

CPU = Target("cpu", "native", 2)


def _kernel_results(builder: Builder, *outputs: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the compiled kernel of all ops makes of ``builder``'s inputs, and what the reference interpreter does.

    The operands of ``builder`` were written to when it ran the ops; kernels get the ones in ``before``.
    """
    graph = builder.graph(*outputs)
    lowered = lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) == "compute"])
    validate(lowered.ir)
    inputs = [_copy(builder.before[name]) for name in lowered.inputs]
    expected = run_reference(lowered.ir, inputs)
    backend = CppBackend()
    made = backend.fused_callable(lowered.ir, backend.default_config(lowered.ir, CPU), CPU)(*inputs)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    for value, result in zip(lowered.outputs, results, strict=True):
        node = graph.op(str(graph.producer(value)))
        if node.op.endswith("_.default"):
            assert result is inputs[lowered.inputs.index(node.inputs[0])]
    return [dict(zip(lowered.outputs, results, strict=True))[name] for name in outputs], [
        dict(zip(lowered.outputs, expected, strict=True))[name] for name in outputs
    ]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which ``clone`` keeps only where elements lie close."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


class _Writes(Builder):
    """A builder that remembers its inputs as they were."""

    def __init__(self, **inputs: torch.Tensor) -> None:
        self.before = {name: _copy(tensor) for name, tensor in inputs.items()}
        super().__init__(**inputs)


@settings(deadline=None, max_examples=25)
@given(
    heads=st.integers(1, 5), length=st.sampled_from([1, 3, 127]), written=st.integers(1, 4), width=st.integers(2, 33),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), apart=st.booleans(), seed=st.integers(0, 99),
)
def test_rows_go_where_the_positions_say(
    heads: int, length: int, written: int, width: int, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    written = min(written, length)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)

    cache = numbers(2, heads, length, 2 * width)[..., ::2] if apart else numbers(2, heads, length, width)
    rows = numbers(2, written, heads, width).transpose(1, 2)
    at = torch.randperm(length, generator=generator)[:written]
    b = _Writes(cache=cache, rows=rows, at=at)
    doubled = b("aten.add.Tensor", "rows", "rows")
    out = b("aten.index_copy_.default", "cache", "at", doubled, dim=2)
    (result,), (reference,) = _kernel_results(b, out)
    assert torch.equal(result, b.tensors[out])
    assert torch.equal(reference.to(dtype), b.tensors[out])


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_a_position_outside_the_cache_fails_before_anything_is_written(bad: int) -> None:
    b = _Writes(cache=torch.randn(5, 7), other=torch.randn(9, 7), rows=torch.randn(3, 7), at=torch.tensor([2, 0, 4]))
    rows = b("aten.neg.default", "rows")
    outs = [b("aten.index_copy_.default", cache, "at", rows, dim=0) for cache in ("other", "cache")]
    graph = b.graph(*outs)
    lowered = lower_group(graph, [node.name for node in graph])
    inputs = [_copy(b.before[name]) for name in lowered.inputs]
    inputs[lowered.inputs.index("at")][1] = bad
    before = [one.clone() for one in inputs]
    backend = CppBackend()
    with pytest.raises(OutsideTable):
        run_reference(lowered.ir, inputs)
    with pytest.raises(OutsideTable):
        backend.fused_callable(lowered.ir, backend.default_config(lowered.ir, CPU), CPU)(*inputs)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("start", [0, 2])
def test_positions_that_are_known_to_be_there_are_not_checked(start: int) -> None:
    b = _Writes(cache=torch.randn(5, 7), rows=torch.randn(3, 7))
    at = b("aten.arange.start", start=start, end=start + 3)
    out = b("aten.index_copy_.default", "cache", at, "rows", dim=0)
    (result,), _ = _kernel_results(b, out)
    assert torch.equal(result, b.tensors[out])
    graph = b.graph(out)
    assert not may_fail(lower_group(graph, [node.name for node in graph]).ir)


def test_a_number_for_each_row_goes_where_its_position_says() -> None:
    b = _Writes(scales=torch.randn(5), rows=torch.randn(3, 7), at=torch.tensor([4, 0, 2]))
    out = b("aten.index_copy_.default", "scales", "at", b("aten.amax.default", "rows", dim=(-1,)), dim=0)
    (result,), _ = _kernel_results(b, out)
    assert torch.equal(result, b.tensors[out])


@pytest.mark.parametrize("positions", [1, 3])
def test_rotated_keys_and_values_are_written_by_one_kernel(positions: int) -> None:
    keys, values = (torch.randn(2, positions, 4, 32).transpose(1, 2) for _ in range(2))
    b = _Writes(
        keys=keys, values=values, turn=torch.randn(positions, 32), at=torch.randperm(17)[:positions],
        first=torch.randn(2, 4, 17, 32), second=torch.randn(2, 4, 17, 32),
    )
    low, high = (b("aten.slice.Tensor", "keys", dim=3, start=start, end=start + 16) for start in (0, 16))
    turned = b("aten.mul.Tensor", b("aten.cat.default", b("aten.neg.default", high), low, dim=-1), "turn")
    outs = [
        b("aten.index_copy_.default", "first", "at", turned, dim=2),
        b("aten.index_copy_.default", "second", "at", "values", dim=2),
    ]
    results, _ = _kernel_results(b, *outs, turned)
    for name, result in zip((*outs, turned), results, strict=True):
        assert torch.equal(result, b.tensors[name]), name


def test_a_copy_writes_all_of_a_view() -> None:
    """A window of a cache, in another type than what is copied, broadcast."""
    b = _Writes(window=torch.randn(3, 9, 5, dtype=torch.float64).to(torch.bfloat16)[:, 2:6], row=torch.randn(5))
    b.before["window"] = torch.randn(3, 9, 5).to(torch.bfloat16)[:, 2:6]
    out = b("aten.copy_.default", "window", b("aten.exp.default", "row"))
    inputs = b.before["window"]
    around = inputs.as_strided((3, 9, 5), (45, 5, 1), 0).clone()
    graph = b.graph(out)
    lowered = lower_group(graph, [node.name for node in graph])
    backend = CppBackend()
    call = backend.fused_callable(lowered.ir, backend.default_config(lowered.ir, CPU), CPU)
    given = {"window": inputs, "row": b.before["row"]}
    assert call(*(given[name] for name in lowered.inputs)) is inputs
    around[:, 2:6] = b.before["row"].exp().to(torch.bfloat16)
    assert torch.equal(inputs.as_strided((3, 9, 5), (45, 5, 1), 0), around)


def _refusal(b: Builder, *outputs: str) -> str:
    graph = b.graph(*outputs)
    with pytest.raises(NotLowerable) as refused:
        lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) == "compute"])
    return str(refused.value)


def test_no_kernel_reads_what_it_writes() -> None:
    cache, rows, at = torch.randn(5, 7), torch.randn(2, 7), torch.tensor([1, 3])
    before = Builder(cache=cache.clone(), rows=rows, at=at)
    sums = before("aten.add.Tensor", before("aten.slice.Tensor", "cache", dim=0, start=0, end=2), "rows")
    assert "memory that the group may read" in _refusal(
        before, before("aten.index_copy_.default", "cache", "at", sums, dim=0)
    )
    after = Builder(cache=cache.clone(), rows=rows, at=at)
    written = after("aten.index_copy_.default", "cache", "at", "rows", dim=0)
    assert "writes what the group reads" in _refusal(after, written, after("aten.neg.default", written))
    own = Builder(cache=cache.clone(), rows=rows, at=at)
    made = own("aten.neg.default", "cache")
    assert "what the group makes" in _refusal(own, own("aten.index_copy_.default", made, "at", "rows", dim=0))
    part = Builder(cache=cache.clone(), rows=rows, at=at)
    made = part("aten.slice.Tensor", part("aten.neg.default", "cache"), dim=0, start=1, end=5)
    assert "what the group makes" in _refusal(part, part("aten.index_copy_.default", made, "at", "rows", dim=0))


def test_columns_are_not_placed_one_by_one() -> None:
    b = Builder(cache=torch.randn(5, 7), rows=torch.randn(5, 2), at=torch.tensor([1, 3]))
    assert "one by one" in _refusal(b, b("aten.index_copy_.default", "cache", "at", "rows", dim=1))


def test_elements_in_one_place_stay_with_aten() -> None:
    b = Builder(cache=torch.randn(5, 7), rows=torch.randn(7))
    graph = b.graph(b("aten.copy_.default", "cache", "rows"))
    node = next(iter(graph))
    assert kind_of(node, graph.specs) == "compute"
    graph.specs["cache"] = type(graph.specs["cache"])((5, 7), "float32", (0, 1))
    assert "lie in one place" in (why_opaque(node, graph.specs) or "")


def test_a_write_that_nobody_reads_is_made_all_the_same() -> None:
    b = _Writes(cache=torch.randn(5, 7), rows=torch.randn(2, 7), at=torch.tensor([1, 3]))
    doubled = b("aten.add.Tensor", "rows", "rows")
    written = b("aten.index_copy_.default", "cache", "at", doubled, dim=0)
    graph = b.graph(doubled)
    assert set(lower_group(graph, (doubled, written)).outputs) == {doubled, written}
    (region,) = find_regions(graph)
    assert set(region.outputs) == {doubled, written}
    assert any(
        set(one.ops) == {doubled, written} and set(one.outputs) == {doubled, written}
        for one in enumerate_candidates(graph, region, GroupTable(graph, "fp32", "cpu").legal).candidates
    )


def test_two_writes_to_one_cache_keep_their_order() -> None:
    b = _Writes(cache=torch.randn(5, 7), rows=torch.randn(2, 7), at=torch.tensor([1, 3]))
    first = b("aten.index_copy_.default", "cache", "at", b("aten.neg.default", "rows"), dim=0)
    second = b("aten.index_copy_.default", first, "at", b("aten.exp.default", "rows"), dim=0)
    graph = b.graph(second)
    legal = GroupTable(graph, "fp32", "cpu").legal
    enumerated = (enumerate_candidates(graph, region, legal) for region in find_regions(graph))
    found = [set(one.ops) for enumeration in enumerated for one in enumeration.candidates]
    assert {first} in found and {second} in found
    assert not any({first, second} <= ops for ops in found)


@pytest.mark.parametrize("rows", [1, 3])
def test_only_the_rows_that_are_written_count_as_work(rows: int) -> None:
    b = Builder(cache=torch.zeros(4, 129, 32), rows=torch.randn(4, rows, 32), at=torch.randperm(129)[:rows])
    out = b("aten.index_copy_.default", "cache", "at", "rows", dim=1)
    graph = b.graph(out)
    moved = 4 * rows * 32 * 4
    for work in (kernel_work(lower_group(graph, (out,)).ir), op_work(graph, out)):
        assert work.written_bytes == moved
        assert work.dram_bytes == 2 * moved + 8 * rows


def test_a_large_cache_makes_no_large_kernel() -> None:
    """A few rows are one thread's work, and no result is allocated for them."""
    b = Builder(cache=torch.zeros(8, 4097, 64), rows=torch.randn(8, 1, 64), at=torch.tensor([4096]))
    ir = lower_group(b.graph(out := b("aten.index_copy_.default", "cache", "at", "rows", dim=1)), (out,)).ir
    assert CppBackend().default_config(ir, Target("cpu", "native", 16))["threads"] == 1
    assert kernel_work(ir).threads == 1 and kernel_work(ir).more_results == 0


def test_a_written_cache_takes_no_memory_of_a_plan() -> None:
    b = Builder(cache=torch.zeros(5, 4097), rows=torch.randn(5, 3), at=torch.tensor([4096, 7, 0]))
    doubled = b("aten.add.Tensor", "rows", "rows")
    graph = b.graph(doubled, b("aten.index_copy_.default", "cache", "at", doubled, dim=1))
    (region,) = find_regions(graph)
    assert peak_bytes(graph, single_candidates(graph, region), region.outputs) == 5 * 3 * 4


def test_an_output_over_a_loaded_input_is_malformed() -> None:
    at = Index.coord(0, 4)
    buffers = tuple(Buffer(name, "float32", (4,), (1,), name == "y", 0 if name == "y" else None) for name in "xy")
    with pytest.raises(ValueError, match="x is loaded"):
        validate(KernelIR(buffers, (Segment((), 4, (Load("float32", 0, at),), (Store(1, at, 0),)),)))
