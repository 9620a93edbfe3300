"""``plan explain`` and ``patterns``: what is fused and why, in words."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.common import DbOption, Device, DeviceOption, device_type, print_frame, print_text


def explain(
    model: opt.ModelOption = None,
    config: opt.ConfigOption = None,
    module: opt.ModuleOption = None,
    pattern: opt.PatternOption = None,
    shape: opt.ShapeOption = None,
    workload: Annotated[str | None, Option(metavar="TEXT", help="Only workloads whose name contains this.")] = None,
    decode: opt.DecodeOption = None,
    kv_len: opt.KvLenOption = None,
    prefill: opt.PrefillOption = None,
    dtype: opt.DtypeOption = None,
    layers: opt.LayersOption = None,
    pack_weights: opt.PackWeightsOption = False,
    numerics: opt.NumericsOption = opt.Numerics.FP32,
    regime: opt.RegimeOption = opt.Regime.EAGER,
    source: Annotated[bool, Option("--source", help="Also print the generated code of each group.")] = False,
    device: DeviceOption = Device.AUTO,
    db: DbOption = None,
) -> None:
    """Say in words what is fused, what is not, and why each boundary is where it is.

    Last come tuned workloads side by side: what runs with each matmul and attention at how many rows, and where it
    turns. Uses the stored plan; what was never tuned is planned by the cost model. Nothing is measured.
    """
    from fuseplan.planner.api.asked import plan_settings
    from fuseplan.planner.api.explain import Planned, explained, side_by_side

    kind = device_type(device)
    models, workloads = (model, config, module), (decode, kv_len, prefill)
    asked = opt.named(kind, models, (pattern, shape), workloads, dtype, layers, pack_weights=pack_weights)
    settings = plan_settings(kind, numerics.value, regime.value)
    planned: list[Planned] = []
    for one in explained(asked, settings, db, workload, opt.Terminal()):
        planned.append(one)
        for line in one.lines:
            print_text(line)
        if source:
            for label, text in one.sources():
                print_text(f"\n// ---- {label}\n{text}")
        typer.echo("")
    for line in side_by_side(planned):
        print_text(line)


def patterns() -> None:
    """List the named patterns: small graphs that inference engines fuse by hand.

    Any of them can be tuned, explained and measured: plan tune --pattern swiglu --shape 32x4096.
    """
    import pandas as pd

    from fuseplan.planner.patterns.table import PATTERNS

    rows = [(name, found.summary, found.dims, found.example) for name, found in sorted(PATTERNS.items())]
    print_frame(pd.DataFrame(rows, columns=["pattern", "computes", "--shape is", "such as"]))
