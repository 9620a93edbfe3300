"""Every named pattern as Triton and ninetoothed kernels, without a GPU.

    python tests/checks/check_patterns_gpu.py [pattern ...]

Plans each pattern by the number of launches, compiles every group's default config for sm_90 at the example's shape and
reads registers and spills back, then runs the kernels of a small odd shape under Triton's interpreter against float64.
Exits with status 1 on an unexpected number of kernels, a refusal by Triton, a spill or a wrong result. pytest does not
collect it: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fuseplan.kernels.ir.backend import SM90
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.table import PATTERNS, pattern_graph
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from check_llama_gpu import compiled
from interpret_kernels import backend_under_test, run_interpreted
from reference_backend import ReferenceBackend

BACKENDS = ("triton", "ninetoothed")
DTYPES = ("float32", "bfloat16")
#: Shapes that divide nothing, by the number of dimensions that a pattern takes, and where the pattern wants its own.
ODD = {1: "4097", 2: "3x127", 3: "3x11x33", 4: "2x3x5x12"}
#: Kernels of a pattern that cannot be one: a library call cuts it, or one op by itself is left as it is.
KERNELS = {"moe_sigmoid": 2, "layer_norm": 0}
ODD_OWN = {"dequantise_awq": "256x24", "causal_softmax": "2x3x5x9", "soft_cap_softmax": "2x3x5x9"}


def subjects(name: str, shape: str, folder: str, dtype: str | None = None) -> Iterator[TunableGroup]:
    """The fused groups of a pattern's plan."""
    graph = pattern_graph(name, shape, dtype)
    store = Database(Path(folder) / "none.db", "read")
    # Without a GPU the GPU back ends are unavailable; any that is here lets the planner choose groups.
    plan = Planner(store, None, "none", SM90, (ReferenceBackend(),)).plan_graph(graph)
    for region in plan.unique():
        for choice in region.record.groups:
            if choice.is_kernel:
                yield group_subject(graph, region.group_ops(choice), choice.workload)


def odd_shape(name: str) -> str:
    return ODD_OWN.get(name, ODD[LISTING[name].ranks[0]])


def interpret(names: Sequence[str], kinds: Sequence[str], dtypes: Sequence[str], folder: str) -> None:
    """In a process with TRITON_INTERPRET=1: print the error of every kernel, in units of the tolerance, as JSON."""
    from triton_interpreter import mend

    mend()
    rows = {}
    for kind in kinds:
        backend = backend_under_test(kind, folder)
        for name in names:
            for dtype in dtypes:
                for number, subject in enumerate(subjects(name, odd_shape(name), folder, dtype)):
                    reason = backend.refuse(subject.ir, SM90)
                    inputs = subject.make_inputs(0, "cpu")
                    found = reason or run_interpreted(backend, subject.ir, inputs)
                    rows[f"{kind} {name} {odd_shape(name)} {dtype} group {number}"] = found
    print(json.dumps(rows))


def compile_all(names: Sequence[str], kinds: Sequence[str], folder: str) -> int:
    """Compile default configs for sm_90; the number of complaints. A refusal by ninetoothed is none."""
    failed = 0
    for name in names:
        groups = list(subjects(name, LISTING[name].example, folder))
        if len(groups) != KERNELS.get(name, 1):
            failed += 1
            print(f"{name}: {len(groups)} kernels, not {KERNELS.get(name, 1)}", flush=True)
        for kind in kinds:
            backend = backend_under_test(kind, folder)
            for subject in groups:
                said = compiled(backend, subject)
                failed += not said.startswith("ok") and not (kind == "ninetoothed" and said.startswith("refused"))
                print(f"sm_90 {kind:11} {name} ({len(groups)} kernels): {said}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=sorted(PATTERNS), help="All of them by default.")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="Repeatable; both by default.")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="To interpret; repeatable; both by default.")
    parser.add_argument("--interpret", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.backend = arguments.backend or list(BACKENDS)
    arguments.dtype = arguments.dtype or list(DTYPES)
    torch.set_grad_enabled(False)
    if arguments.interpret:
        interpret(arguments.patterns, arguments.backend, arguments.dtype, arguments.interpret)
        return
    chosen = [word for kind in arguments.backend for word in ("--backend", kind)]
    chosen += [word for dtype in arguments.dtype for word in ("--dtype", dtype)]
    with tempfile.TemporaryDirectory() as folder:
        failed = compile_all(arguments.patterns, arguments.backend, folder)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--interpret", folder, *chosen, *arguments.patterns],
            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
        )
        if done.returncode != 0:
            sys.exit(f"the interpreter failed: {done.stderr[-2000:]}")
        for kernel, found in json.loads(done.stdout.splitlines()[-1]).items():
            failed += isinstance(found, float) and not found <= 1.0
            said = f"refused: {found}" if isinstance(found, str) else f"{found:.2f} of the tolerance"
            print(f"interpreter {kernel}: {said}", flush=True)
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
