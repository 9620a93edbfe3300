"""``plan explain``: the plan of a model in words."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplan.planner.cli.common import DbOption, Device, DeviceOption, device_type, print_text
from fuseplan.planner.cli.source import (
    ConfigOption,
    DecodeOption,
    DtypeOption,
    KvLenOption,
    LayersOption,
    ModelOption,
    ModuleOption,
    Numerics,
    NumericsOption,
    PackWeightsOption,
    PatternOption,
    PrefillOption,
    Regime,
    RegimeOption,
    ShapeOption,
    named_graphs,
    regime_name,
)


def explain(
    model: ModelOption = None,
    config: ConfigOption = None,
    module: ModuleOption = None,
    pattern: PatternOption = None,
    shape: ShapeOption = None,
    workload: Annotated[
        str | None, typer.Option("--workload", metavar="TEXT", help="Only workloads whose name contains this.")
    ] = None,
    decode: DecodeOption = None,
    kv_len: KvLenOption = None,
    prefill: PrefillOption = None,
    dtype: DtypeOption = None,
    layers: LayersOption = None,
    pack_weights: PackWeightsOption = False,
    numerics: NumericsOption = Numerics.FP32,
    regime: RegimeOption = Regime.EAGER,
    source: Annotated[bool, typer.Option("--source", help="Also print the generated code of each group.")] = False,
    device: DeviceOption = Device.AUTO,
    db: DbOption = None,
) -> None:
    """Say in words what is fused, what is not, and why each boundary is where it is.

    Uses the stored plan; what was never tuned is planned by the cost model. Nothing is measured.
    """
    from fuseplan.planner.errors import ConfigError, nearest
    from fuseplan.planner.report import explain as words
    from fuseplan.planner.tuning.planner import PlanSettings
    from fuseplan.planner.tuning.session import open_session

    kind = device_type(device)
    _, graphs = named_graphs(
        kind, (model, config, module), (pattern, shape), (decode, kv_len, prefill), dtype, layers,
        pack_weights=pack_weights,
    )
    settings = PlanSettings(numerics=numerics.value, regime=regime_name(kind, regime))
    session = open_session(kind, db, settings, mode="inspect")
    chosen = [(name, graph) for name, graph in graphs if workload is None or workload in name]
    if not chosen:
        names = [name for name, _ in graphs]
        close = nearest(workload or "", names) or names
        raise ConfigError(f"no workload is called {workload!r}; there are {', '.join(close)}")
    for name, graph in chosen:
        failures: list[str] = []
        plan = session.planner().plan_graph(graph, on_failure=words.note_failure(graph, failures))
        for line in [*words.explain_plan(session, name, graph, plan), *failures]:
            print_text(line)
        if source:
            for label, text in words.sources(session, graph, plan):
                print_text(f"\n// ---- {label}\n{text}")
        typer.echo("")
