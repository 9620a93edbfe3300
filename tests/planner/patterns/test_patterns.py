"""Named patterns against their formulas in float64, and the errors of their shapes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paths import CHECKS
from reference_backend import ReferenceBackend, use

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.errors import ShapeError, UnknownPatternError
from fuseplan.planner.groups.regions import find_regions, is_anchor, region_parts
from fuseplan.planner.implementations.sample_inputs import random_tensor
from fuseplan.planner.implementations.tunable_group import group_subject
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.table import PATTERNS, parse_shape, pattern, pattern_graph
from fuseplan.planner.runtime.scheduler import FusionConfig, FusionScheduler
from fuseplan.search.timing.verify import check_result, make_oracle

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

Tensor = torch.Tensor
REASON = CppBackend().unavailable()
CPU = Target("cpu", "native", 2)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of each pair (x_i, x_{i + D/2}), as complex multiplication. x: [B, S, H, D], tables: [B, S, D]."""
    half = x.shape[-1] // 2
    low, high = x.transpose(1, 2)[..., :half], x.transpose(1, 2)[..., half:]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([low * c[..., :half] - high * s[..., :half], high * c[..., half:] + low * s[..., half:]], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of each pair (x_2i, x_2i+1) as a complex number. x: [B, S, H, D], tables: [B, S, D / 2]."""
    pairs = torch.view_as_complex(x.transpose(1, 2).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def partly(turn: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([turn(x[..., :half], cos, sin), x[..., half:].transpose(1, 2)], -1)


def causal_softmax(scores: Tensor) -> Tensor:
    """Softmax of scores that are scaled already."""
    queries, keys = scores.shape[-2:]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    weights = torch.where(visible, torch.exp(scores - scores.amax(-1, keepdim=True)), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def softmax(x: Tensor) -> Tensor:
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def norm_add_norm(residual: Tensor, x: Tensor, post: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    hidden = residual + rms_norm(x, 1 + post)
    return hidden, rms_norm(hidden, 1 + pre)


def pointwise_chain(x: Tensor) -> Tensor:
    return 0.5 * torch.exp(torch.tanh(torch.sigmoid(((x + 1) * 2 - 0.5).clamp(min=0)))).sqrt()


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def quantised(x: Tensor, target: str, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Quantised numbers as float64, and the scales of rows where none is given."""
    low, high = {"fp8": (-448.0, 448.0), "int8": (-128.0, 127.0)}[target]
    given = scale is not None
    if scale is None:
        scale = torch.maximum(x.abs().amax(-1, keepdim=True) / high, torch.tensor(1 / (512 * high)))
    number = (x / scale).clamp(low, high)
    number = number.round() if target == "int8" else number.to(torch.float8_e4m3fn).double()
    return (number,) if given else (number, scale)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def unpack_awq(words: Tensor) -> Tensor:
    """[R, C] int32 words -> [R, 8 C] nibbles in AWQ's order."""
    nibbles = [(words.long() >> (4 * place)) & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    return torch.stack(nibbles, -1).flatten(1)


def dequantise_awq(weight: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    groups = torch.arange(weight.shape[0]) // 128
    return (unpack_awq(weight) - unpack_awq(zeros)[groups]) * scales[groups]


def quantised_formulas() -> dict[str, tuple[str, Callable[..., tuple[Tensor, ...]]]]:
    found: dict[str, tuple[str, Callable[..., tuple[Tensor, ...]]]] = {}
    for t in ("fp8", "int8"):
        found |= {
            f"rms_norm_{t}_token": ("3x127", lambda x, w, t=t: quantised(rms_norm(x, w), t)),
            f"rms_norm_{t}_tensor": ("2x3x33", lambda x, w, s, t=t: quantised(rms_norm(x, w), t, s)),
            f"add_rms_norm_{t}_token": ("3x33", lambda r, x, w, t=t: (r + x, *quantised(rms_norm(r + x, w), t))),
            f"add_rms_norm_{t}_tensor": ("3x9", lambda r, x, w, s, t=t: (r + x, *quantised(rms_norm(r + x, w), t, s))),
            f"swiglu_{t}_token": ("3x127", lambda gate, up, t=t: quantised(swiglu(gate, up), t)),
            f"swiglu_{t}_tensor": ("1x4097", lambda gate, up, s, t=t: quantised(swiglu(gate, up), t, s)),
        }
    return found


def moe_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = softmax(logits).topk(max(1, min(8, logits.shape[-1] // 4)))
    return weights / weights.sum(-1, keepdim=True), experts


def moe_sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    experts = (scores + bias).topk(max(1, min(8, logits.shape[-1] // 4))).indices
    weights = torch.take_along_dim(scores, experts, -1)
    return 2.5 * weights / weights.sum(-1, keepdim=True), experts


#: Kernels of a pattern that cannot be one: a library call cuts it, or one op by itself is left as it is.
KERNELS = {"moe_sigmoid": 2, "layer_norm": 0}
FORMULAS: dict[str, tuple[str, Callable[..., tuple[Tensor, ...]]]] = {
    "swiglu": ("3x127", lambda gate, up: (swiglu(gate, up),)),
    "geglu": ("2x3x33", lambda gate, up: (0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up,)),
    "geglu_tanh": ("1x4097", lambda gate, up: (tanh_gelu(gate) * up,)),
    "rms_norm": ("3x33", lambda x, weight: (rms_norm(x, weight),)),
    "add_rms_norm": ("2x1x65", lambda residual, x, weight: (residual + x, rms_norm(residual + x, weight))),
    "layer_norm": ("5x123", lambda x, weight, bias: (F.layer_norm(x, x.shape[-1:], weight, bias),)),
    "rope": ("2x3x5x6", lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))),
    "rms_norm_gemma": ("3x33", lambda x, weight: (rms_norm(x, 1 + weight),)),
    "add_rms_norm_gemma": ("3x127", lambda r, x, weight: (r + x, rms_norm(r + x, 1 + weight))),
    "norm_add_norm_gemma": ("2x3x65", norm_add_norm),
    "residual_chain": ("3x129", lambda r, a, m, s, weight: (r + a + m + s, rms_norm(r + a + m + s, weight))),
    "rope_interleaved": ("2x3x5x6", lambda q, k, c, s: (rotate_pairs(q, c, s), rotate_pairs(k, c, s))),
    "rope_partial": ("2x3x5x8", lambda q, k, c, s: (partly(rotate, q, c, s), partly(rotate, k, c, s))),
    "rope_partial_interleaved": (
        "2x3x5x8", lambda q, k, c, s: (partly(rotate_pairs, q, c, s), partly(rotate_pairs, k, c, s))
    ),
    "qk_norm_rope": (
        "2x3x5x6",
        lambda q, k, c, s, q_weight, k_weight: (
            rotate(rms_norm(q, q_weight), c, s), rotate(rms_norm(k, k_weight), c, s)
        ),
    ),
    "soft_cap": ("3x127", lambda x: (30 * torch.tanh(x / 30),)),
    "softmax": ("2x3x129", lambda x: (softmax(x),)),
    "causal_softmax": ("2x3x5x9", lambda scores: (causal_softmax(scores / 8),)),
    "soft_cap_softmax": ("2x3x5x9", lambda scores: (causal_softmax(50 * torch.tanh(scores / 16 / 50)),)),
    "sampling_softmax": ("3x4097", lambda logits, temperature: (softmax(logits / temperature[:, None]),)),
    "pointwise_chain": ("3x33", lambda x: (pointwise_chain(x),)),
    "sin_chain": ("4097", lambda x: (torch.sin((x + 1) * 2),)),
    **quantised_formulas(),
    "embedding_rms_norm": (
        "5x33x9", lambda ids, table, weight: (table[ids], rms_norm(table[ids], weight))
    ),
    "moe_softmax": ("5x33", lambda logits: moe_softmax(logits)),
    "moe_sigmoid": ("5x33", lambda logits, bias: moe_sigmoid(logits, bias)),
    "dequantise_int8": ("5x33", lambda weight, scale: (weight * scale,)),
    "dequantise_awq": ("256x24", lambda weight, zeros, scales: (dequantise_awq(weight, zeros, scales),)),
}


def test_every_pattern_has_a_formula_here() -> None:
    assert FORMULAS.keys() == PATTERNS.keys() == LISTING.keys()


def assert_quantised(actual: Tensor, expected: Tensor) -> None:
    """Equal but for ties, which may fall to either side: at most one step apart, and hardly anywhere."""
    apart = (actual.double() - expected).abs()
    step = torch.ones(()) if actual.dtype == torch.int8 else (expected.abs() / 8).clamp(min=2.0**-9)
    assert bool((apart <= step).all())
    assert float((apart > 0).double().mean()) < 0.01


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_computes_its_formula_in_one_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ReferenceBackend()
    use(monkeypatch, kernels)
    shape, formula = FORMULAS[name]
    graph, specs = pattern(name, shape, "bfloat16")
    generator = torch.Generator().manual_seed(0)
    inputs = {value: random_tensor(spec, generator) for value, spec in specs.items()}
    config = FusionConfig(min_nodes_for_fusion=1)
    result = FusionScheduler(config, tmp_path / "tuning.db").dispatch(graph, inputs)
    eager = FusionScheduler(FusionConfig(enable_fusion=False)).dispatch(graph, inputs)
    exact = formula(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs.values()))
    for value, expected in zip(graph.output_names, exact, strict=True):
        if result[value].dtype == torch.int64:
            assert torch.equal(result[value], expected)
            continue
        if result[value].element_size() == 1:
            assert_quantised(result[value], expected)
            continue
        error = float((result[value].double() - expected).norm() / expected.norm())
        eager_error = float((eager[value].double() - expected).norm() / expected.norm())
        assert error <= eager_error * 1.05 + 1e-7
        assert result[value].dtype == eager[value].dtype and result[value].stride() == eager[value].stride()
    assert len(kernels.calls) == KERNELS.get(name, 1)


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize("name", PATTERNS)
def test_the_cpp_kernels_of_a_pattern_are_right(name: str, cpp: CppBackend) -> None:
    """Each island as one kernel, judged as the search judges it: guard zones, poisoned outputs, eager's error."""
    graph = pattern_graph(name, FORMULAS[name][0], "float32")
    parts = [part for region in find_regions(graph) for part in region_parts(graph, region)]
    for part in (one for one in parts if not is_anchor(graph, one)):
        ops = [op for op in part.ops if kind_of(graph.op(op), graph.specs) == "compute"]
        subject = group_subject(graph, ops, part.key)
        assert cpp.refuse(subject.ir, CPU) is None
        kernel = cpp.load(subject.ir, cpp.default_config(subject.ir, CPU), CPU)
        verdict = check_result(kernel, subject, make_oracle(subject, subject.make_inputs(0, "cpu")), "cpu")
        assert verdict.ok, verdict.reason


def test_the_triton_kernels_of_every_pattern_are_right_under_the_interpreter(tmp_path: Path) -> None:
    script = CHECKS / "check_patterns_gpu.py"
    command = [sys.executable, "-W", "ignore", str(script), "--interpret", str(tmp_path)]
    command += ["--backend", "triton", "--dtype", "bfloat16"]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) >= len(PATTERNS) - 1
    assert {kernel: error for kernel, error in rows.items() if not (isinstance(error, float) and error <= 1.0)} == {}


@pytest.mark.parametrize("name", PATTERNS)
def test_examples_and_keys(name: str) -> None:
    example = LISTING[name].example
    text, sizes, other = (
        [region.key for region in find_regions(graph)]
        for graph in (
            pattern_graph(name, example), pattern_graph(name, parse_shape(example)),
            pattern_graph(name, example, "float16"),
        )
    )
    assert len(text) == 1 and text == sizes != other


@pytest.mark.parametrize(
    ("text", "shape"), [("32x4096", (32, 4096)), (" 1X2x3 ", (1, 2, 3)), ("(8, 16)", (8, 16)), ("7", (7,))]
)
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "x", "32x", "32x-1", "32 4096", "axb", "3.5x2"])
def test_unreadable_shapes(text: str) -> None:
    with pytest.raises(ShapeError) as caught:
        parse_shape(text)
    assert str(caught.value) == f"cannot read shape {text!r}; write sizes joined by x, such as 32x4096"


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("swiglu", "0x8", "float32", "shape '0x8' has an empty dimension; every size is at least 1"),
        ("swiglu", "8", "float32", "pattern swiglu takes rows x columns (or batch x rows x columns), not 1 sizes (8)"),
        ("rope", "2x2", "float32", "try 1x32x128x64"),
        ("rope", "1x2x3x5", "float32", "the head dimension must be even, not 5"),
        ("causal_softmax", "9x5", "float32", "at least as many keys as queries, not 9x5"),
        ("rms_norm", "2x8", "int32", "cannot be built in dtype 'int32'; use bfloat16"),
        ("rms_norm", "2x8", "float99", "cannot be built in dtype 'float99'"),
    ],
)
def test_shapes_that_do_not_fit(name: str, shape: str, dtype: str, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        pattern(name, shape, dtype)
    assert message in str(caught.value)


def test_an_unknown_pattern_suggests_the_nearest() -> None:
    with pytest.raises(UnknownPatternError) as caught:
        pattern_graph("swigloo", "2x2")
    assert "unknown pattern 'swigloo'; did you mean swiglu" in str(caught.value)
