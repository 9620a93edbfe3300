"""``plan explain`` and ``patterns``: what is fused and why, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.common import DbOption, Device, DeviceOption, device_type, print_frame, print_rows, print_text
from fuseplan.planner.cli.output.options import answers, current

if TYPE_CHECKING:
    from fuseplan.planner.api.explain import Planned


@answers("the groups, or with --source the kernels")
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
    numerics: opt.NumericsOption = opt.NumericsChoice.FP32,
    regime: opt.RegimeOption = opt.RegimeChoice.EAGER,
    source: Annotated[str | None, Option(
        "--source", metavar="GROUP", help="Print the generated code of a group instead: its letter, or a part of its "
        "name or its place in the model; all for every one.",
    )] = None,
    prelude: Annotated[bool, Option(
        "--prelude", help="With --source: also what every kernel begins with, includes and helpers.",
    )] = False,
    device: DeviceOption = Device.AUTO,
    db: DbOption = None,
) -> None:
    """Say in words what is fused, what is not, and why each boundary is where it is.

    Last come tuned workloads side by side: what runs with each matmul and attention at how many rows, and where it
    turns. Uses the stored plan; what was never tuned is planned by the cost model. Nothing is measured.
    """
    from fuseplan.planner.api.explain import Explained, explained, side_by_side
    from fuseplan.planner.api.request import asked_for
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.models.manifest import ModelArguments

    if prelude and source is None:
        raise ConfigError("--prelude is of the code that --source prints; give --source GROUP, too")
    kind = device_type(device)
    asked = asked_for(kind, ModelArguments(
        model, config, module, pattern=pattern, shape=shape, decode=decode, kv_len=kv_len, prefill=prefill, dtype=dtype,
        layers=layers, calls=False, pack_weights=pack_weights, numerics=numerics.value, regime=regime.value))
    planned: list[Planned] = []
    for one in explained(asked, db, workload, opt.Terminal()):
        planned.append(one)
        if source is None:
            for line in (*one.lines, ""):
                print_text(line)
    if source is not None:
        _print_sources(planned, source, prelude)
        return
    if not current().at_once:
        frame = Explained(asked.label, tuple(planned)).groups
        print_frame(frame, name="groups")
    for line in side_by_side(planned):
        print_text(line)


def _print_sources(planned: Sequence[Planned], wanted: str, prelude: bool) -> None:
    from fuseplan.planner.api.explain import kernels
    from fuseplan.planner.api.sources import called
    from fuseplan.planner.module_paths import located

    chosen, screen = called(kernels(planned), wanted), current()
    texts = [(one, one.text if prelude else one.own_text()) for one in chosen]
    if not screen.at_once:
        print_rows("kernels", ("group", "names", "place", "backend", "workloads", "source"), [
            (one.label, ", ".join(one.names), one.place, one.backend, ", ".join(one.workloads), text)
            for one, text in texts
        ])
    for one, text in texts:
        mark = "//" if one.language == "cpp" else "#"
        title = f"{mark} {', '.join(one.names)}: {located(one.label, one.place)}, {one.backend}"
        screen.code(f"{title}\n{mark} used by {', '.join(one.workloads)}\n\n{text.strip()}\n", one.language)
    if left := sum(len(part.splitlines()) for one, _ in texts for part in one.common if not prelude):
        mark = "//" if texts[0][0].language == "cpp" else "#"
        print_text(f"{mark} left out: {left} lines that kernels have in common, includes and helpers (--prelude)")


@answers(torch=False)
def patterns() -> None:
    """List the named patterns: small graphs that inference engines fuse by hand.

    Any of them can be tuned, explained and measured: plan tune --pattern swiglu --shape 32x4096.
    """
    from fuseplan.planner.patterns.listing import LISTING

    rows = [(name, found.summary, found.dims, found.example) for name, found in sorted(LISTING.items())]
    print_rows("patterns", ("pattern", "computes", "--shape is", "such as"), rows, spare=("--shape is",),
               keep=("pattern", "computes", "such as"))
