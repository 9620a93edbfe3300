"""Places in words: readable for every way in which ops lie in modules, and they lose no module."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.planner import module_paths
from fuseplan.planner.module_paths import (
    RepeatedPaths,
    group_place,
    joined_places,
    located,
    patterns,
    place,
    user_paths,
)


def test_the_examples_hold() -> None:
    assert doctest.testmod(module_paths).failed == 0


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["L['self'].model.layers[0].self_attn.q_proj"], ["model.layers.0.self_attn.q_proj"]),
        (["L['args'][0].model.layers.0"], ["model.layers.0"]),  # a decorated forward(*args)
        (["G['model']", "G['model'].layers.0"], ["", "layers.0"]),  # a function that calls the model
        (["L['self']", "L['self'].plain[0]"], ["", "plain.0"]),
        (["L['self']._modules['layers']._modules['0'].fc"], ["layers.0.fc"]),
        (["L['self'].experts.a b", "L['self'].experts['c']"], ["experts.a b", "experts.c"]),
        (["L['self']._orig_mod.fc"], ["fc"]),  # a compiled module in another
        (["G['encoder'].layers.0", "G['decoder'].layers.0"], ["encoder.layers.0", "decoder.layers.0"]),
        (["L['self'].fc", "G['head'].fc"], ["fc", "head.fc"]),
        (["L['models'][0].fc", "L['models'][1].fc"], ["0.fc", "1.fc"]),
        (["", "model.layers.0.mlp"], ["", "model.layers.0.mlp"]),  # torch.export
    ],
)
def test_modules_are_spelled_as_by_their_user(names: list[str], paths: list[str]) -> None:
    assert list(user_paths(names).values()) == paths


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        ([""], "(top level)"),
        (["lm_head"], "lm_head"),
        (["layers.3.mlp.act_fn"], "layers.3.mlp.act_fn"),
        (["mlp.gate", "mlp.up"], "mlp: gate, up"),
        (["mlp", "mlp.gate"], "mlp: (itself) -> gate"),
        (["", "norm"], "(top level) -> norm"),
        (["embed", "layers.0.norm"], "embed -> layers.0.norm"),
        (["m.norm", "m.attn.q", "m.attn.k", "m.attn.v"], "m: norm -> attn.q, k, v"),
        (["m.attn.q", "m.norm", "m.attn.o"], "m: attn.q -> norm -> attn.o"),
        (["m.0", "m.1", "m.2"], "m.0-2"),  # Sequential
        (["m.0", "m.2", "m.3"], "m.0, 2-3"),
        (["m.layers.0", "m.layers.1.norm"], "m: layers.0 -> layers.1.norm"),
        ([f"moe.experts.{n}.up" for n in range(8)], "moe.experts.0-7.up"),
        ([f"m.{letter}" for letter in "abcdefgh"], "m: a, b, c, d, e, f and 2 more"),
    ],
)
def test_the_place_of_a_group_that_is_there_once(paths: list[str], text: str) -> None:
    assert place([paths]) == text


def test_repetitions_are_counted_and_their_numbers_are_stars() -> None:
    layers = [
        [f"model.layers.{n}.{name}" for name in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj")]
        for n in range(32)
    ]
    assert place(layers) == "model.layers.*: input_layernorm -> self_attn.q_proj, k_proj  x32"
    assert place([[f"layers.{n}", f"layers.{n + 1}.norm"] for n in range(31)]) == "layers.* -> layers.*+1.norm  x31"
    experts = [[f"m.layers.{n}.moe.experts.{k}.{name}" for name in ("gate", "up")] for n in range(4) for k in range(8)]
    assert place(experts) == "m.layers.*.moe.experts.*: gate, up  x32"
    same = [[f"layers.{n}.experts.3"] for n in range(4)]
    assert place(same) == "layers.*.experts.3  x4"


def test_different_places_of_one_group_stand_side_by_side_the_most_frequent_first() -> None:
    norms = [["model.norm"], *([f"layers.{n}.{name}"] for name in ("pre", "post") for n in range(3))]
    assert place(norms) == "layers.*.pre  x3; layers.*.post  x3; model.norm"
    many = [[letter] for letter in "abcdef"]
    assert place(many) == "a; b; c; and 3 more"
    assert place([["fc"], ["fc"], []]) == "fc  x2"


def test_the_place_of_a_group_of_several_regions_counts_them_together() -> None:
    found = [(30, ["layers.*.mlp", "layers.*+1.norm"]), (1, ["layers.31.mlp", "norm"]), (1, ["layers.0.mlp", "norm"])]
    assert joined_places(found) == "layers.*.mlp -> layers.*+1.norm  x30; layers.*.mlp -> norm  x2"
    assert joined_places([(30, ["layers.*+1.attn"]), (1, ["layers.0.attn"])]) == "layers.*.attn  x31"
    assert joined_places([(1, ["layers.5.norm"]), (2, ["layers.*.norm"])]) == "layers.*.norm  x3"
    assert joined_places([(2, ["layers.*+1.b", "layers.*.a"])]) == "layers.*.b -> layers.*-1.a  x2"
    assert joined_places([(2, ["m.*.e.*+1.up"]), (1, ["m.0.e.x.up"])]) == "m.*.e.*.up  x2; m.0.e.x.up"


def test_the_place_of_a_part_of_a_region() -> None:
    found = [RepeatedPaths(3, ((2, "layers.*.q"), (0, "layers.*.k"), (0, "layers.*.v"))), RepeatedPaths(1, ((2, "q"),))]
    assert group_place(found, (0, 2)) == "layers.*: q, k, v  x3; q"
    assert group_place(found, {0}) == "layers.*: k, v  x3"
    assert group_place(found, [1]) == group_place([], [0]) == ""


def test_a_name_without_a_place_is_itself() -> None:
    assert located("silu 1x64", "") == "silu 1x64"
    assert located("silu 1x64", "mlp.act_fn") == "silu 1x64 (mlp.act_fn)"


_paths = st.lists(st.lists(st.sampled_from(["a", "b", "0", "1", "2"]), max_size=4).map(".".join), max_size=5)


@given(st.lists(_paths, min_size=1, max_size=6))
def test_patterns_match_exactly_what_they_stand_for(occurrences: list[list[str]]) -> None:
    found = patterns(occurrences)
    assert sum(times for times, _ in found) == len(occurrences)
    for times, paths in found:
        pattern = re.compile("\\n".join(re.sub(r"\\\*(\\[+-]\d+)?", r"\\d+", re.escape(path)) for path in paths))
        assert sum(bool(pattern.fullmatch("\n".join(one))) for one in occurrences if len(one) == len(paths)) >= times


@given(_paths)
def test_a_place_names_every_module_of_a_group(paths: list[str]) -> None:
    """Read back by a reader's rules: the prefix, then modules, of which those after a comma have the parent before."""
    text = place([paths])
    prefix, colon, rest = text.partition(": ")
    modules: list[str] = []
    for item in (rest if colon else text).split(" -> "):
        first, *siblings = item.split(", ")
        parent = first.rpartition(".")[0]
        modules += [first, *(f"{parent}.{name}" if parent else name for name in siblings)]
    read: set[str] = set()
    for module in modules if text else []:
        spelled = "" if module in ("(itself)", "(top level)") else module
        runs = [
            [str(number) for number in range(int(part.split("-")[0]), int(part.split("-")[1]) + 1)]
            if "-" in part else [part] for part in (f"{prefix}.{spelled}" if colon else spelled).strip(".").split(".")
        ]
        whole = [""]
        for run in runs:
            whole = [f"{start}.{part}".strip(".") for start in whole for part in run]
        read.update(whole)
    assert read == set(paths)
