"""Tables of `results/` that no command makes, in the form that `plan bench` writes.

    python tests/checks/bench.py launch             # host time of a call, and of a look-up at compile
    python tests/checks/bench.py headlines          # gains over eager that are often quoted
    python tests/checks/bench.py planner            # planning at 1,000, 10,000 and 100,000 ops
    python tests/checks/bench.py groups --model llama --layers 2
    python tests/checks/bench.py tokens --model llama-3.1-8b --batch 1,16 --seconds 30
    python tests/checks/bench.py generate --model llama-3.1-8b --batch 1,16

``groups`` has each fused group of a plan beside eager and TorchInductor. ``tokens`` compares decode steps of Hugging
Face's `generate()` with its own compilation and with ours; ``generate`` says where their time goes, and how long the
first tokens take in a fresh process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import pandas as pd
from fresh_starts import Order, fresh_times
from generation import Generation, contestants, forget, how_compiled, measure, results_name, sizes_of
from group_bench import measure_groups
from headlines import CLAIMS, headline_table
from launch_costs import bench_launch, bench_lookup, launch_verdict
from pattern_predictions import prediction_verdict, with_predictions
from step_profile import device_step_us, host_step_us
from synthetic_decoders import plan_scaling

from fuseplan.planner.api.request import plan_settings
from fuseplan.planner.api.run import ready
from fuseplan.planner.bench.model import dispatch_options
from fuseplan.planner.bench.patterns import PatternBench
from fuseplan.planner.bench.rows import bench_frame, failure
from fuseplan.planner.bench.verdicts import notes, pattern_verdict
from fuseplan.planner.cli.bench.topics import modes_of, publish, publish_rows, tune_cells
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source, workloads_for
from fuseplan.planner.patterns.cells import Cell, cell
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE
from fuseplan.planner.peers.peers import peer_names
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.tune.tuner import Budget, make_pool

#: Groups whose launch is timed: one without and one with a reduction, both tiny.
LAUNCHES = (("swiglu", "1x4096", "bfloat16"), ("add_rms_norm", "1x4096", "bfloat16"))
#: For each group that is not stored.
BUDGET = Budget(trials=12, seconds=6.0)


def tuned(session: Session, cells: Sequence[Cell], said: list[str]) -> Session:
    """The session once the cells are tuned, and the processes that compiled for them are gone."""
    with make_pool(session.target.device_type) as pool:
        return tune_cells(ready(session), cells, BUDGET, pool, said)


def launch(session: Session, options: argparse.Namespace) -> None:
    cells, said = [cell(*one) for one in LAUNCHES], list[str]()
    session = tuned(session, cells, said)
    lookups = bench_frame([bench_lookup(session, one) for one in cells])
    calls = bench_frame(bench_launch(session, cells, options.seconds))
    said += launch_verdict(calls, lookups)
    publish(session, "launch", {"calls": calls, "lookups": lookups}, said, options.out)


def headlines(session: Session, options: argparse.Namespace) -> None:
    cells, said = {cell(*one): words for one, words in CLAIMS.items()}, list[str]()
    kind = session.target.device_type
    session = tuned(session, [*cells], said)
    bench = PatternBench(session, peer_names(None, kind), modes_of(None, kind), options.seconds)
    frame = bench_frame([row for one in cells for row in bench.rows(one)])
    table = headline_table(frame, {one.key: words for one, words in cells.items()})
    frame = with_predictions(frame, session, [*cells])
    said += [*pattern_verdict(frame), *prediction_verdict(frame), *notes(frame)]
    publish(session, "headlines", {"cells": frame}, said, options.out, {"cells": table})


def planner(session: Session, options: argparse.Namespace) -> None:
    frame = plan_scaling(session.planner)
    said = [
        f"{row['ops']:,} ops are built, hashed and planned in {row['total_s']:.2f} s: {row['us_per_op']:.0f} us per op"
        for row in frame.to_dict("records")
    ]
    publish(session, "planner", {"planner": frame}, said, options.out)


def groups(session: Session, options: argparse.Namespace) -> None:
    kind = session.target.device_type
    source = find_source(options.model, options.config, None, kind, None, options.layers)
    workloads = workloads_for(source, kind, None, None, None)
    rows = measure_groups(session, source, workloads, (EAGER, INDUCTOR), options.seconds)
    publish_rows(session, source.label, "groups", rows, options.out)


def tokens(session: Session, options: argparse.Namespace) -> None:
    kind = session.target.device_type
    source = find_source(options.model, options.config, None, kind, None, options.layers)
    sizes = sizes_of(source, options.batch, options.prompt, options.new_tokens)
    names = [name for name in contestants(kind) if name != MAX_AUTOTUNE]
    measure(session, source, sizes, names, options.seconds, options.out)


def generate(session: Session, options: argparse.Namespace) -> None:
    kind = session.target.device_type
    source = find_source(options.model, options.config, None, kind, None, options.layers)
    sizes = sizes_of(source, options.batch, options.prompt, options.new_tokens)
    names = [name for name in contestants(kind) if name != MAX_AUTOTUNE]
    rows: list[dict[str, object]] = []
    module = build_model(source, kind).module
    for one in sizes:
        forget(kind)
        for name in names:
            row: dict[str, object] = {"workload": one.label, "contestant": name}
            try:
                run = Generation(name, module, one, how_compiled(name, kind, dispatch_options(session)))
                run()
                row["device_us"] = device_step_us(run) if kind == "cuda" else None
                row["guards_us"], row["call_us"] = (name != EAGER and host_step_us(run)) or (None, None)
            except Exception as error:  # what one contestant cannot do costs no other
                row["note"] = failure(error)
            rows.append(row)
    del module
    forget(kind)
    labels = {one.label: one for one in sizes}
    starts: list[dict[str, object]] = []
    for row in rows:
        name, label = str(row["contestant"]), str(row["workload"])
        order = Order(source, labels[label], name, kind, dispatch_options(session))
        start: dict[str, object] = {"workload": label, "contestant": name}
        try:
            first_s, second_s, *_, all_s = fresh_times(order, options.cold_caches)
            start |= {"first_s": first_s, "second_s": second_s, "all_s": all_s}
        except Exception as error:
            start["note"] = failure(error)
        starts.append(start)
    state = "empty" if options.cold_caches else "as the processes before left them (--cold-caches empties them)"
    said = [f"fresh processes: compilers' caches on disk were {state}; building the model is not counted"]
    frames = {"steps": pd.DataFrame(rows), "starts": pd.DataFrame(starts)}
    publish(session, results_name(source, sizes), frames, said, options.out, legend=(
        "Of a step, in microseconds as a profiler sees them: `device_us` is the time in which the GPU was at work, "
        "`guards_us` what the host takes to find the compiled code and `call_us` to call it. `first_s`, `second_s` and "
        "`all_s` are seconds from the call to these tokens in a fresh process."))


def main() -> None:
    topics = {"launch": launch, "headlines": headlines, "planner": planner, "groups": groups, "tokens": tokens,
              "generate": generate}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", choices=topics)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--db", help="tuning database; default: the user's own")
    parser.add_argument("--seconds", type=float, default=0.5, help="of rounds for each comparison")
    parser.add_argument("--out", type=Path, help="folder; default: results/<device>")
    parser.add_argument("--model", help="groups, tokens, generate: a preset")
    parser.add_argument("--config", help="the same: a folder with a config.json, in its place")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", help="tokens, generate: sequences, such as 1,16")
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--cold-caches", action="store_true", help="generate: fresh processes get empty caches")
    options = parser.parse_args()
    in_graphs = options.device == "cuda" and options.topic in ("headlines", "tokens", "generate")
    settings = plan_settings(options.device, "fp32", "graph" if in_graphs else "eager")
    tunes = options.topic in ("launch", "headlines")
    session = open_session(options.device, options.db, settings, mode="write" if tunes else "inspect")
    topics[options.topic](session, options)


if __name__ == "__main__":
    main()
