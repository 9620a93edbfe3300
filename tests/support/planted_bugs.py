"""Bugs to plant, one at a time, each with the check that must notice it: rows of ``check_checks.py``.

``old`` stands exactly once in ``file``; ``check_checks.py`` says where it does not, and then the row follows the code.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Mutated databases, among them rows whose checksum, key or configuration is wrong.
DATABASES = ("tests/checks/check_database.py", "--count", "20", "--seed", "0", "--jobs", "1")
#: Configurations that no search has chosen, through every writer.
WRITERS = ("tests/kernels/test_stored_configs.py", "-k", "hostile")
CANONICAL = ("tests/planner/groups/test_canonical.py", "-k", "every_change or same_in_every")
COMMANDS = ("tests/checks/check_commands.py", "--processes", "0", "-k", "wrong_hidden")
OUT = ("tests/checks/check_commands.py", "--processes", "0", "-k", "patterns --out")
SCANS = ("tests/planner/lowering/test_scans.py",)
EXTREMES = ("tests/planner/lowering/test_running_extremes.py", "-k", "special")
VERIFY = ("tests/search/timing/test_verify.py",)


def fault(name: str) -> tuple[str, ...]:
    """A small tune that meets one fault."""
    return ("tests/checks/check_faults.py", "--count", "1", "--only", name)


def programs(*words: str) -> tuple[str, ...]:
    """Programs of the ops whose names have one of the words."""
    return ("tests/checks/check_programs.py", "--count", "0", "--jobs", "1", "--ops", ",".join(words))


@dataclass(frozen=True)
class Bug:
    """A wrong text in the place of a right one. ``limit_s`` is what its check may take on an idle machine, by far."""

    name: str
    file: str
    old: str
    new: str
    check: tuple[str, ...]
    limit_s: float = 600.0


BUGS = (
    # -- what is stored ----------------------------------------------------------------------------------------
    Bug("any checksum is right", "search/store/rows.py",
        'if codec.checksum(payload) != row["checksum"]:', "if False:", DATABASES),
    Bug("verify finds nothing", "search/store/maintenance.py",
        "[Problem(table.name, name, what, cure)] if what else []",
        "[Problem(table.name, name, what, cure)] if not what else []",
        DATABASES),
    Bug("a record is read under another key", "search/store/rows.py",
        "if any(row[name] != value for name, value in asdict(key).items()):", "if False:", DATABASES),
    Bug("an import leaves the first row out", "search/store/transfer.py",
        "        for entry in entries:", "        for entry in entries[1:]:", DATABASES),
    Bug("a damaged plan is served", "planner/partition/plan_check.py",
        'raise RefusedPlanError("an op is in two groups")', "pass", ("tests/planner/partition/test_plan_check.py",)),
    Bug("a configuration of no search is stored", "kernels/registry.py",
        "return misfit(config, known[backend], complete=False) if backend in known else None", "return None",
        DATABASES),
    Bug("any stored configuration becomes source (Triton)", "kernels/triton/emitter.py",
        "config = checked(config, PARAMETERS)", "config = dict(config)", WRITERS),
    Bug("any stored configuration becomes source (ninetoothed)", "kernels/ninetoothed/emitter.py",
        "config = checked(config, PARAMETERS)", "config = dict(config)", WRITERS),
    Bug("a lease is taken twice", "search/store/leases.py",
        "free = (tables.LEASES.c.expires < clock(connection)) | (tables.LEASES.c.owner == self.owner)",
        "free = tables.LEASES.c.expires > 0",
        ("tests/search/store/test_leases.py", "-k", "three_owners", "--hypothesis-profile", "ci")),
    # -- numbers -----------------------------------------------------------------------------------------------
    Bug("a sigmoid 1.0005 times too large (C++)", "kernels/cpp/cpp_maths.h",
        "FP_INLINE vf fp_sigmoid(vf x) { return 1.0f /", "FP_INLINE vf fp_sigmoid(vf x) { return 1.0005f /",
        programs("aten.sigmoid")),
    Bug("a sigmoid 1.0005 times too large (Triton)", "kernels/triton/helpers.py",
        "        result = root * root\n", "        result = root * root * 1.0005\n",
        ("tests/kernels/triton/test_triton_helpers.py",)),
    Bug("float16 is cut off, not rounded", "kernels/cpp/cpp_prelude.h",
        "U normal = (shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13;", "U normal = shifted >> 13;",
        programs("aten.sigmoid")),
    Bug("the mask at the end of a row is dropped (C++)", "kernels/cpp/cpp_loops.h",
        "FP_INLINE vm counts(Last m) { return lanes() >= m.skip; }",
        "FP_INLINE vm counts(Last m) { return lanes() >= 0 * m.skip; }", programs("aten.layer_norm")),
    Bug("the mask at a tile's edge is dropped (Triton)", "kernels/triton/segment.py",
        """return f", mask={' & '.join(conditions)}" if conditions else \"\"""", 'return ""',
        ("tests/kernels/triton/test_triton_kernels.py", "-k", "right_under_the_interpreter")),
    Bug("the end of a row is left out", "kernels/cpp/emitter.py",
        '"  if (j < high) {",', '"  if (j + L <= high) {",', programs("aten.sigmoid")),
    Bug("the last row of a thread is left out", "kernels/cpp/emitter.py",
        '"for (i64 row = begin; row < end; ++row) {", *rows', '"for (i64 row = begin; row + 1 < end; ++row) {", *rows',
        programs("aten.sigmoid")),
    Bug("a scan forgets the vectors before (C++)", "kernels/cpp/cpp_loops.h",
        "    carried = combine(carried, last);", "    carried = last;", SCANS),
    Bug("a scan begins anew at the end of a row (C++)", "kernels/cpp/emitter.py",
        "ends = [part] if self.segment.has_scan() else", "ends =", SCANS),
    Bug("a scan forgets the blocks before (rows side by side)", "kernels/cpp/row_vectors_emitter.py",
        "if value in self.carried\n                 else", "if False\n                 else", SCANS),
    Bug("a scan forgets the blocks before (Triton)", "kernels/triton/segment.py",
        "f\"{total} = {spec.triton_combine.format(total, f'after{self.prefix}{value}')}\",", "",
        ("tests/kernels/triton/test_triton_kernels.py", "-k", "right_under_the_interpreter")),
    Bug("a program adds its own columns to those before it", "kernels/triton/segment.py",
        "< split, all_", "<= split, all_", ("tests/kernels/triton/test_shared_scans.py", "-k", "interpreter")),
    Bug("programs that share a row hand over nothing", "kernels/gpu/launch.py",
        "for number in range(self.launches):", "for number in range(self.launches - 1, self.launches):",
        ("tests/kernels/triton/test_shared_scans.py", "-k", "interpreter")),
    Bug("a tail of -inf is no number (Triton)", "kernels/triton/segment.py",
        "base = self.name(top) if self.launches == 1 else", "base = self.name(top) if True else",
        ("tests/kernels/triton/test_shared_scans.py", "-k", "other_sizes")),
    Bug("a running extreme stays at its first element", "planner/ops/scan.py",
        'p.scan("max", node, position', 'p.scan("min", node, position', EXTREMES),
    Bug("a running extreme forgets where NaN was", "planner/ops/scan.py",
        'hit = x.eq(best) | x.ne(x) if x.dtype.startswith("float") else x.eq(best)\n        extent',
        'hit = x.eq(best)\n        extent', EXTREMES),
    Bug("a logarithm of two infinities is no number (C++)", "kernels/cpp/cpp_maths.h",
        "gap = a == b ? 0.0 : fp_minimum(a, b) - top;", "gap = fp_minimum(a, b) - top;", EXTREMES),
    Bug("a logarithm of two infinities is no number (Triton)", "kernels/triton/helpers.py",
        "tl.where(a == b, 0.0, tl.minimum(a, b) - top)", "tl.minimum(a, b) - top",
        ("tests/kernels/triton/test_shared_scans.py", "-k", "right_under_the_interpreter")),
    Bug("a running extreme forgets NaN (Triton)", "kernels/triton/helpers.py",
        'title="Maximum", pair="_larger"),\n        _SCAN.format(name="_scan_min"',
        'title="Maximum", pair="tl.standard._elementwise_max"),\n        _SCAN.format(name="_scan_min"',
        ("tests/kernels/triton/test_shared_scans.py", "-k", "right_under_the_interpreter")),
    Bug("rows are scanned again and again", "planner/ops/builder.py",
        "if any(extent != 1 and axis not in others for axis, extent in enumerate(space.rows)):", "if False:", SCANS),
    Bug("NaN agrees with any number", "search/timing/verify.py",
        "agree |= torch.isnan(wide) & torch.isnan(exact)", "agree |= torch.isnan(wide)", VERIFY),
    Bug("a stray write passes", "search/timing/verify.py",
        "if guarded.touched_outside())", "if False)", VERIFY),
    # -- keys and plans ----------------------------------------------------------------------------------------
    Bug("the dtype is no part of a workload's key", "planner/groups/canonical.py",
        'return f"{spec.dtype}[', 'return f"[', CANONICAL),
    Bug("strides are no part of a workload's key", "planner/groups/canonical.py",
        "]@[{','.join(map(str, spec.strides))}]", "]", CANONICAL),
    Bug("a kernel that fails is not counted", "planner/implementations/first_call.py",
        'self.give_up(f"first call failed: {failure_reason(error)}")', "pass",
        ("tests/planner/runtime/test_dispatch_failures.py",)),
    Bug("results take memory that is still read", "planner/runtime/buffer_donation.py",
        "return is_whole and self._last[storage] is call and len(sharing) == 1", "return is_whole",
        ("tests/planner/runtime/test_buffer_donation.py",)),
    # -- what people read --------------------------------------------------------------------------------------
    Bug("every error says no", "planner/cli/main.py",
        'typer.echo(f"plan: error: {line}", err=True)', 'typer.echo("plan: error: no", err=True)', COMMANDS),
    Bug("a floor ten times too low", "costmodel/roofline.py",
        "return RooflineTerms(launch_us, host_us, memory_us, compute_us).time_us",
        "return RooflineTerms(launch_us, host_us, memory_us, compute_us).time_us / 10",
        ("tests/costmodel/test_roofline.py",)),
    Bug("a step counts each region once", "planner/reports/steps.py",
        "math.fsum(region.occurrences * plan.unfused_us for", "math.fsum(plan.unfused_us for",
        ("tests/planner/report/test_steps.py",)),
    Bug("--out is ignored", "planner/cli/output/options.py",
        '                check_writable(file, "--out")\n', "                file = None\n", OUT),
    Bug("--trials is ignored", "search/tune/resources.py",
        '"trials": trials, "steep_trials": trials, "seconds": seconds', '"seconds": seconds',
        ("tests/planner/cli/test_tune_study.py",)),
    # -- what the environment fails at --------------------------------------------------------------------------
    Bug("a failing compiler ends in two lines", "planner/cli/main.py",
        "            line, status = describe(error)\n",
        '            line, status = describe(error)\n            typer.echo(f"plan: error: {line}", err=True)\n',
        fault("failing compiler")),
    Bug("a compiler that fails is an answer: do not fuse", "search/tune/group_search.py",
        'raise NothingCompilesError(f"{self._subject.label}: nothing has compiled in this tune ({failed[0]})")', "pass",
        ("tests/planner/tuning/test_machine_failures.py", "-k", "nothing_compiles")),
)
