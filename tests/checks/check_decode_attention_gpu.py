"""Attention of one token alone: ours, in several configurations, beside PyTorch's back ends, in a CUDA graph on a GPU.

    python tests/checks/check_decode_attention_gpu.py [--batches 1 16 64] [--keys 256 1024 8192] [--masks none range]
        [--sweep] [--seconds 0.1] [--jobs 16]
        [--out results/DEVICE/decode-attention.md]

Heads are Llama-3-8B's: 32 on 8, of 128 elements. Keys and values are rotated through more memory than the cache holds.
A mask of kind "range" shows all but the last eighth of the keys, as those of a static cache do; the floor counts what
it shows. ``--sweep`` tries other numbers of programs, warps and keys of a block than the one that plans use.
FlashInfer is a contestant where it is installed, without a mask.
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
from fuseplan.planner.implementations.subject import op_group
from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS, parsed
from fuseplan.planner.libraries.decode_attention import SplitAttention
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.planner.rewrites.attention_backends import Attention
from fuseplan.search.timing.measure import rotating_operands, screen
from fuseplan.search.timing.timers import timer_for

HEADS, SHARED, WIDTH = 32, 8, 128
_OP = "aten.scaled_dot_product_attention.default"
#: Bytes for rotated copies of keys and values.
_LIMIT_BYTES = 60 * 2**30
#: Keys of a block, waves, warps and stages.
SWEPT = tuple(
    SplitAttention(f"ours, keys waves warps stages {one}", *one)
    for one in (*itertools.product((32, 64), (1, 2), (2, 4), (4,)), (128, 1, 4, 3), (128, 2, 4, 3), (64, 3, 2, 4))
)


def attention(batch: int, keys: int, masked: bool) -> OpGroup:
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


def contestants(group: OpGroup, sweep: bool) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
    """Names of everything that takes the group, and what builds its call."""
    ours = [SplitAttention()]
    if sweep:
        ours += SWEPT
    for call in (*ATTENTION_CALLS, *ours):
        if call.refuse(group) is None and "math" not in call.name:
            yield call.name, partial(call.build, group)
    if "mask" not in group.inputs and importlib.util.find_spec("flashinfer") is not None:
        yield "flashinfer", partial(_flashinfer, group)


def compiled(ours: SplitAttention, batch: int, keys: int, masked: bool) -> None:
    """Compile a kernel for Triton's cache, in a process of its own."""
    group = attention(batch, keys, masked)
    call = parsed(group)
    assert isinstance(call, Attention)
    ours.kernel(call, (HEADS * WIDTH, WIDTH), SM90)[0].compiled(SM90, Variant())


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


def rows_of(batch: int, keys: int, masked: bool, sweep: bool, seconds: float) -> Iterator[tuple[str, float, float]]:
    """Name, microseconds and error of each contestant; what fails says so and is left out."""
    group, target, timer = attention(batch, keys, masked), local_target("cuda"), timer_for("cuda", "graph")
    torch.manual_seed(0)
    inputs = [
        torch.randn(*map(int, group.specs[name].shape), device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v")
    ]
    if masked:
        inputs.append((torch.arange(keys, device="cuda") < keys - keys // 8).expand(batch, 1, 1, keys).contiguous())
    operands = rotating_operands(inputs, [True, False, False, True][: len(inputs)], target.l2_bytes, _LIMIT_BYTES)
    few = [one[:1].double() if one.is_floating_point() else one[:1] for one in inputs]
    exact = torch.nn.functional.scaled_dot_product_attention(*few, enable_gqa=True)
    for name, build in contestants(group, sweep):
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
    parser.add_argument("--sweep", action="store_true", help="try other configurations of ours, and show the best")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each contestant")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile for --sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| batch x keys | mask | floor, us | ours | best of the others | over it | best of ours | error, the other's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    cells = list(itertools.product(options.batches, options.keys, options.masks))
    if options.sweep:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            made = [
                pool.submit(compiled, ours, batch, keys, mask == "range")
                for (batch, keys, mask), ours in itertools.product(cells, SWEPT)
            ]
        print(f"{sum(one.exception() is not None for one in made)} of {len(made)} could not be compiled", flush=True)
    for batch, keys, mask in cells:
        found = {
            name: (time_us, error)
            for name, time_us, error in rows_of(batch, keys, mask == "range", options.sweep, options.seconds)
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
            f"{batch} x {keys}", mask, f"{floor_us:.1f}", f"{time_us:.2f}", f"{other_us:.2f} ({other})",
            f"{other_us / time_us:.2f}x", f"{found[best][0]:.2f} ({best})", f"{error:.1e}, {other_error:.1e}",
        )
        lines.append("| " + " | ".join(words) + " |")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
