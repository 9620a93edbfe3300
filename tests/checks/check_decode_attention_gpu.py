"""Attention of one token alone: ours, in several configurations, beside PyTorch's back ends, in a CUDA graph on a GPU.

    python tests/checks/check_decode_attention_gpu.py [--batches 1 16 64] [--keys 256 1024 8192] [--masks none range]
        [--pages 16] [--sweep] [--seconds 0.1] [--jobs 16]
        [--out results/DEVICE/decode-attention.md]

Heads are Llama-3-8B's: 32 on 8, of 128 elements. Keys and values are rotated through more memory than the cache holds.
A mask of kind "range" shows all but the last eighth of the keys, as those of a static cache do; the floor counts what
it shows. ``--sweep`` tries other numbers of programs, warps and keys of a block than the one that plans use.
FlashInfer is a contestant where it is installed, without a mask. With ``--pages N`` keys lie in pages of N, which a
block table lists in no order; the others are then ATen's ops, which gather them first, and FlashInfer, which is told
the lengths.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.registry import local_target
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION, gathered
from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS
from fuseplan.planner.libraries.decode_attention import Decode, SplitAttention, decode_of
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.search.timing.contest import screen
from fuseplan.search.timing.operands import rotating_operands
from fuseplan.search.timing.timers import timer_for

HEADS, SHARED, WIDTH = 32, 8, 128
_OP, _PAGED_OP = "aten.scaled_dot_product_attention.default", "fuseplan.decode_attention.default"
#: Bytes for rotated copies of keys and values.
_LIMIT_BYTES = 60 * 2**30
#: Keys of a block, waves, warps and stages.
SWEPT = tuple(
    SplitAttention(f"ours, keys waves warps stages {one}", *one)
    for one in (*itertools.product((32, 64), (1, 2), (2, 4), (4,)), (128, 1, 4, 3), (128, 2, 4, 3), (64, 3, 2, 4))
)


def attention(batch: int, keys: int, masked: bool, page: int = 0) -> OpGroup:
    if page:
        return paged_attention(batch, keys, masked, page)
    specs = {
        "q": TensorSpec.contiguous((batch, HEADS, 1, WIDTH), "bfloat16"),
        **{name: TensorSpec.contiguous((batch, SHARED, keys, WIDTH), "bfloat16") for name in ("k", "v")},
        "out": TensorSpec.contiguous((batch, HEADS, 1, WIDTH), "bfloat16"),
    }
    names = ("q", "k", "v")
    if masked:
        specs["mask"] = TensorSpec.contiguous((batch, 1, 1, keys), "bool")
        names = (*names, "mask")
    node = OpNode(_OP, names, ("out",), {"dropout_p": 0.0, "is_causal": False, "enable_gqa": True})
    return op_group(DataflowGraph([node], specs, names, ("out",)), ("out",), ("out",), "cuda")


def paged_attention(batch: int, keys: int, masked: bool, page: int) -> OpGroup:
    blocks = -(-keys // page)
    query, pages = ((batch, HEADS, 1, WIDTH), (batch * blocks, SHARED, page, WIDTH))
    specs = {
        **{name: TensorSpec.contiguous(query, "bfloat16") for name in ("q", "out")},
        **{name: TensorSpec.contiguous(pages, "bfloat16") for name in ("k", "v")},
        "table": TensorSpec.contiguous((batch, blocks), "int32"),
        "mask": TensorSpec.contiguous((batch, 1, 1, blocks * page), "bool"),
    }
    # The last page may have rows behind the last key, which a mask hides.
    names = ("q", "k", "v", "table", "mask") if masked or keys % page else ("q", "k", "v", "table")
    node = OpNode(_PAGED_OP, names, ("out",), {} if "mask" in names else {"attn_mask": None})
    specs = {name: specs[name] for name in (*names, "out")}
    return op_group(DataflowGraph([node], specs, names, ("out",)), ("out",), ("out",), "cuda")


def contestants(
    group: OpGroup, keys: int, masked: bool, sweep: bool
) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
    """Names of everything that takes the group, and what builds its call."""
    ours = [SplitAttention()]
    if sweep:
        ours += SWEPT
    for call in (*ATTENTION_CALLS, *ours):
        if call.refuse(group) is None and "math" not in call.name:
            yield call.name, partial(call.build, group)
    is_paged, has_flashinfer = "table" in group.inputs, importlib.util.find_spec("flashinfer") is not None
    if is_paged:
        yield "gathered", lambda: partial(DECODE_ATTENTION, **({} if "mask" in group.inputs else {"attn_mask": None}))
    if has_flashinfer and is_paged:
        yield "flashinfer", partial(_flashinfer_paged, group, keys - keys // 8 if masked else keys)
    elif has_flashinfer and not masked:
        yield "flashinfer", partial(_flashinfer, group)


def compiled(ours: SplitAttention, batch: int, keys: int, masked: bool, page: int) -> None:
    """Compile a kernel for Triton's cache, in a process of its own."""
    found = decode_of(attention(batch, keys, masked, page))
    assert isinstance(found, Decode)
    ours.kernel(found, (HEADS * WIDTH, WIDTH), SM90)[0].compiled(SM90, Variant())


def _flashinfer(group: OpGroup) -> Callable[..., Any]:
    import flashinfer

    batch, keys = int(group.specs["k"].shape[0]), int(group.specs["k"].shape[2])
    work = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "HND", use_tensor_cores=True)
    pages = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    # One page holds all keys of a sequence, which is how a static cache lies.
    decode.plan(pages, pages[:batch], last, HEADS, SHARED, WIDTH, keys, q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16)
    return lambda q, k, v: decode.run(q.view(batch, HEADS, WIDTH), (k, v)).view(batch, HEADS, 1, WIDTH)


def _flashinfer_paged(group: OpGroup, length: int) -> Callable[..., Any]:
    import flashinfer

    (batch, blocks), page = map(int, group.specs["table"].shape), int(group.specs["k"].shape[2])
    work = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "HND", use_tensor_cores=True)
    used = -(-length // page)
    starts = used * torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), length - (used - 1) * page, dtype=torch.int32, device="cuda")
    listed = _table(batch, blocks)[:, :used].flatten()
    decode.plan(starts, listed, last, HEADS, SHARED, WIDTH, page, q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16)
    return lambda q, k, v, *_: decode.run(q.view(batch, HEADS, WIDTH), (k, v)).view(batch, HEADS, 1, WIDTH)


def _table(batch: int, blocks: int) -> torch.Tensor:
    """The same one in every call: FlashInfer is told beforehand."""
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(1))
    return order.view(batch, blocks).to("cuda", torch.int32)


def operands_of(group: OpGroup, batch: int, length: int) -> list[torch.Tensor]:
    """The operands of a call that shows the first ``length`` keys."""
    torch.manual_seed(0)
    made = [
        torch.randn(*map(int, group.specs[name].shape), device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v")
    ]
    if "table" in group.inputs:
        made.append(_table(batch, int(group.specs["table"].shape[1])))
    if "mask" in group.inputs:
        keys = int(group.specs["mask"].shape[3])
        made.append((torch.arange(keys, device="cuda") < length).expand(batch, 1, 1, keys).contiguous())
    return made


def exact_result(group: OpGroup, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The result of the first sequence in float64."""
    given = dict(zip(group.inputs, inputs, strict=True))
    query, key, value = given["q"][:1], given["k"][:1], given["v"][:1]
    if "table" in given:
        key, value = (gathered(given[name], given["table"][:1]) for name in ("k", "v"))
    mask = given["mask"][:1] if "mask" in given else None
    wide = (one.double() for one in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*wide, mask, enable_gqa=True)


def rows_of(
    batch: int, keys: int, masked: bool, page: int, sweep: bool, seconds: float
) -> Iterator[tuple[str, float, float]]:
    """Name, microseconds and error of each contestant; what fails says so and is left out."""
    group, target, timer = attention(batch, keys, masked, page), local_target("cuda"), timer_for("cuda", "graph")
    inputs = operands_of(group, batch, keys - keys // 8 if masked else keys)
    hot = [name not in ("k", "v") for name in group.inputs]
    operands = rotating_operands(inputs, hot, target.l2_bytes, _LIMIT_BYTES)
    exact = exact_result(group, inputs)
    for name, build in contestants(group, keys, masked, sweep):
        try:
            call = build()
            error = float((call(*inputs)[:1].double() - exact).norm() / exact.norm())
            yield name, screen(timer, call, operands, seconds).median_us, error
        except Exception as failure:
            print(f"batch {batch}, {keys} keys, {name}: {type(failure).__name__}: {failure}"[:200], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--keys", nargs="+", type=int, default=[256, 1024, 8192, 32768])
    parser.add_argument("--masks", nargs="+", default=["none", "range"], choices=["none", "range"])
    parser.add_argument("--pages", type=int, default=0, help="keys of a page; 0: a static cache")
    parser.add_argument("--sweep", action="store_true", help="try other configurations of ours, and show the best")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each contestant")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile for --sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| batch x keys | mask | floor, us | ours | best of the others | over it | best of ours | error, the other's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    of_pages = f" in pages of {options.pages}" if options.pages else ""
    print("\n".join(lines), flush=True)
    cells = list(itertools.product(options.batches, options.keys, options.masks))
    if options.sweep:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            made = [
                pool.submit(compiled, ours, batch, keys, mask == "range", options.pages)
                for (batch, keys, mask), ours in itertools.product(cells, SWEPT)
            ]
        print(f"{sum(one.exception() is not None for one in made)} of {len(made)} could not be compiled", flush=True)
    for batch, keys, mask in cells:
        found = {
            name: (time_us, error)
            for name, time_us, error in rows_of(
                batch, keys, mask == "range", options.pages, options.sweep, options.seconds)
        }
        if options.sweep:
            print("; ".join(f"{name.removeprefix('ours, ')} {one[0]:.2f}" for name, one in found.items()), flush=True)
        ours = {name: one for name, one in found.items() if name.startswith(("ours", SplitAttention.name))}
        others = {name: one for name, one in found.items() if name not in ours}
        if SplitAttention.name not in ours or not others:
            continue
        shown = keys - keys // 8 if mask == "range" else keys
        floor_us = 4 * batch * SHARED * WIDTH * shown / 4.27e6
        other, best = (min(group, key=lambda name: group[name]) for group in (others, ours))
        (time_us, error), (other_us, other_error) = found[SplitAttention.name], found[other]
        words = (
            f"{batch} x {keys}{of_pages}", mask, f"{floor_us:.1f}", f"{time_us:.2f}", f"{other_us:.2f} ({other})",
            f"{other_us / time_us:.2f}x", f"{found[best][0]:.2f} ({best})", f"{error:.1e}, {other_error:.1e}",
        )
        lines.append("| " + " | ".join(words) + " |")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
