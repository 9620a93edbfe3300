"""Peers: names, reasons for absence, and libraries called in their own layouts, on stand-ins that follow their APIs."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.registry import backends_for, local_target
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.tunable_group import reference_results
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, Case, Contestant, PeerError, make_case
from fuseplan.planner.peers.libraries import FLASHINFER_OPS, LIGER_OPS
from fuseplan.planner.peers.peers import FLASHINFER, LIGER, PEERS, _same, peer_names, without_chatter
from fuseplan.search.timing.verify import errors

SHAPES = {
    "swiglu": "3x128", "geglu": "3x16", "geglu_tanh": "2x3x16", "rms_norm": "3x127", "rms_norm_gemma": "3x16",
    "add_rms_norm": "2x3x16", "add_rms_norm_gemma": "5x16", "layer_norm": "2x3x16", "softmax": "2x3x17",
    "sampling_softmax": "3x17", "rope": "2x4x5x16", "rope_partial": "2x4x5x16", "rope_interleaved": "1x2x3x8",
    "rope_partial_interleaved": "1x2x3x8",
}


def case_of(name: str, shape: str, dtype: str = "float32") -> Case:
    """A case on the CPU whose plan is one kernel of everything."""
    backend = backends_for("cpu")[0]
    case = make_case(cell(name, shape, dtype), local_target("cpu"), (backend,))
    graph = case.traced.graph
    ops = tuple(node.name for node in graph if kind_of(node, graph.specs) == "compute")
    return replace(case, groups=(PlannedGroup(ops, GeneratedKernel((backend,), case.target)),))


def results(case: Case, contestant: Contestant) -> list[torch.Tensor]:
    operands = contestant.prepare(*case.inputs)
    return list(contestant.outputs(contestant.run(*operands), operands))


def assert_right(case: Case, contestant: Contestant, allowed: float = 1e-5) -> None:
    before = [tensor.clone() for tensor in case.inputs]
    found = results(case, contestant)
    graph = case.traced.graph
    references = reference_results(tuple(graph), graph.inputs, graph.outputs, case.inputs, case.target.device_type)
    assert [one.shape for one in found] == [one.shape for one in references]
    for own, exact in zip(found, references, strict=True):
        assert errors(own, exact)[0] <= allowed
    for tensor, old in zip(case.inputs, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0)  # a peer that overwrites works on copies


# -- names ------------------------------------------------------------------------------------------------------


def test_a_device_has_its_own_peers() -> None:
    assert peer_names(None, "cpu") == (EAGER, INDUCTOR, MAX_AUTOTUNE, "cpp default")
    assert peer_names(None, "cuda", without=(MAX_AUTOTUNE,)) == (
        EAGER, INDUCTOR, LIGER, FLASHINFER, "triton default", "ninetoothed default"
    )


@pytest.mark.parametrize("text", ["max-autotune,Liger", "liger, inductor-max-autotune", "inductor max-autotune,liger,"])
def test_peers_are_named_in_any_spelling_and_order(text: str) -> None:
    assert peer_names(text, "cuda") == (MAX_AUTOTUNE, LIGER)


def test_an_unknown_peer_is_a_mistake_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="no peer 'ligr'; did you mean liger"):
        peer_names("eager,ligr", "cuda")


@pytest.mark.parametrize("text", ["zzz", ","])
def test_peers_are_listed_as_they_are_accepted(text: str) -> None:
    with pytest.raises(ConfigError, match="known: ") as refused:
        peer_names(text, "cpu")
    listed = str(refused.value).partition("known: ")[2].split(", ")
    assert len(listed) == len(PEERS) and "inductor-max-autotune" in listed
    assert all(" " not in name and len(peer_names(name, "cpu")) == 1 for name in listed)


# -- peers of our own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EAGER, "cpp default"])
@pytest.mark.parametrize("pattern", ["swiglu", "add_rms_norm", "rope"])
def test_own_peers_compute_the_pattern(name: str, pattern: str) -> None:
    case = case_of(pattern, SHAPES[pattern])
    assert_right(case, PEERS[name].build(case))


def test_a_default_configuration_needs_a_plan_that_fuses_and_a_back_end_of_the_device() -> None:
    case = case_of("swiglu", "3x16")
    unfused = Case(**{**case.__dict__, "groups": ()})
    with pytest.raises(PeerError, match="fuses nothing"):
        PEERS["cpp default"].build(unfused)
    with pytest.raises(PeerError, match="triton has no kernels for cpu"):
        PEERS["triton default"].build(case)


def test_a_kernel_that_falls_back_is_no_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BuildError("no such register")

    monkeypatch.setattr(CppBackend, "load", fail)
    case = case_of("swiglu", "3x16")
    with pytest.raises(PeerError, match="no such register"):
        PEERS["cpp default"].build(case)


def test_float8_results_can_be_compared() -> None:
    one = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    assert _same([one], [one.clone()])
    assert not _same([one], [torch.tensor([0.5, 2.5]).to(torch.float8_e4m3fn)])
    assert not _same([one], [one.float()])


# -- libraries --------------------------------------------------------------------------------------------------


def test_a_library_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name, missing in ((LIGER, "liger_kernel"), (FLASHINFER, "flashinfer")):
        with pytest.raises(PeerError, match=f"{missing} cannot be imported"):
            PEERS[name].build(case_of("swiglu", "3x128", "bfloat16"))


def test_an_op_that_a_library_does_not_have_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="liger has no op for geglu"):
        PEERS[LIGER].build(case_of("geglu", "3x16"))
    install(monkeypatch, "flashinfer.activation")
    with pytest.raises(PeerError, match=r"this version of flashinfer has no activation.silu_and_mul"):
        PEERS[FLASHINFER].build(case_of("swiglu", "3x16", "bfloat16"))
    with pytest.raises(PeerError, match="not float32"):
        PEERS[FLASHINFER].build(case_of("swiglu", "3x16"))


def test_a_pattern_with_other_inputs_is_refused() -> None:
    case = case_of("swiglu", "3x16")
    turned = Case(**{**case.__dict__, "names": ("up", "gate")})
    with pytest.raises(PeerError, match="takes gate, up, the pattern up, gate"):
        PEERS[LIGER].build(turned)


def install(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """Put a stand-in module where the library's would be."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if depth == len(parts) or name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        setattr(sys.modules[path], name, function)


# Liger's forward functions: results in the order in which its autograd functions unpack them.


def _normal(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _liger_rms_norm(
    x: torch.Tensor, w: torch.Tensor, eps: float, offset: float, casting_mode: str, row_mode: bool | None
) -> tuple[Any, ...]:
    assert casting_mode == ("gemma" if offset else "llama")
    return ((_normal(x, eps) * (w.float() + offset)).to(x.dtype), x, None, 16, 4, casting_mode)


def _liger_old_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, offset: float, casting_mode: str) -> Any:
    return _liger_rms_norm(x, w, eps, offset, casting_mode, None)


def _liger_add_rms_norm(
    x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float, offset: float, casting_mode: str
) -> tuple[Any, ...]:
    s = x + r
    return ((_normal(s, eps) * (w.float() + offset)).to(x.dtype), s, None, 16, 4, 2, casting_mode)


def _rotate_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """``x``: [B, H, S, D]; only the first half of each table row is read."""
    half = x.shape[-1] // 2
    c, s = (table[..., :half].unsqueeze(1) for table in (cos, sin))
    low, high = x[..., :half].clone(), x[..., half:].clone()
    x[..., :half] = low * c - high * s
    x[..., half:] = high * c + low * s


def _liger_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> tuple[Any, ...]:
    for x in (q, k):
        assert x.transpose(1, 2).is_contiguous()
        _rotate_in_place(x, cos, sin)
    return q, k, cos, sin


def install_liger(monkeypatch: pytest.MonkeyPatch, rms_norm: Any = _liger_rms_norm) -> None:
    ops = "liger_kernel.ops"
    install(monkeypatch, f"{ops}.swiglu", swiglu_forward=lambda a, b, gate_multiplier=1.0: (a, b, F.silu(a) * b))
    install(monkeypatch, f"{ops}.geglu", geglu_forward=lambda a, b: (a, b, F.gelu(a, approximate="tanh") * b))
    install(monkeypatch, f"{ops}.rms_norm", rms_norm_forward=rms_norm)
    install(monkeypatch, f"{ops}.fused_add_rms_norm", fused_add_rms_norm_forward=_liger_add_rms_norm)
    install(
        monkeypatch, f"{ops}.layer_norm",
        layer_norm_forward=lambda x, w, b, eps: (F.layer_norm(x, x.shape[-1:], w, b, eps), x, None, None, 16, 4),
    )
    install(
        monkeypatch, f"{ops}.softmax",
        _softmax_forward=lambda x: (torch.softmax(x.float(), -1).to(x.dtype), 16, 4, False),
    )
    install(monkeypatch, f"{ops}.rope", rope_forward=_liger_rope)


@pytest.mark.parametrize("pattern", sorted(LIGER_OPS.keys() & SHAPES.keys()))
def test_liger_is_asked_for_the_pattern(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_liger(monkeypatch)
    case = case_of(pattern, SHAPES[pattern])
    assert_right(case, PEERS[LIGER].build(case))


def test_liger_before_row_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    install_liger(monkeypatch, _liger_old_rms_norm)
    case = case_of("rms_norm", "3x16")
    assert_right(case, PEERS[LIGER].build(case))


# FlashInfer's public functions.


def _act_and_mul(act: Any) -> Any:
    def run(x: torch.Tensor, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        result: torch.Tensor = (act(gate.float()) * up.float()).to(x.dtype)
        return result

    return run


def _flat_norm(offset: float) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor, eps: float = 0.1) -> torch.Tensor:
        assert x.dim() == 2
        return (_normal(x, eps) * (weight.float() + offset)).to(x.dtype)

    return run


def _fused_add_norm(offset: float) -> Any:
    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 0.1) -> None:
        residual += x
        x.copy_((_normal(residual, eps) * (weight.float() + offset)).to(x.dtype))

    return run


def _layernorm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 0.1) -> torch.Tensor:
    assert (gamma.dtype, beta.dtype, x.dim()) == (torch.float32, torch.float32, 2)
    return F.layer_norm(x.float(), x.shape[-1:], gamma, beta, eps).to(x.dtype)


def _softmax(logits: torch.Tensor, temperature: Any = 1.0) -> torch.Tensor:
    assert logits.dim() == 2 and logits.dtype == torch.float32
    scale = temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    return torch.softmax(logits / scale, -1)


def _apply_rope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, table: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As documented: rows are tokens, cosine in the first half of the table and sine in the second."""
    assert table.dtype == torch.float32 and table.is_contiguous()
    angles = table.shape[-1] // 2
    cos, sin = (part[positions].unsqueeze(1) for part in table.split(angles, -1))

    def turned(flat: torch.Tensor) -> torch.Tensor:
        x = flat.view(flat.shape[0], -1, head_size).float().clone()
        first = slice(0, angles) if is_neox else slice(0, 2 * angles, 2)
        second = slice(angles, 2 * angles) if is_neox else slice(1, 2 * angles, 2)
        a, b = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
        return x.to(flat.dtype).view(flat.shape)

    return turned(query), turned(key)


@pytest.mark.parametrize("pattern", sorted(FLASHINFER_OPS.keys() & SHAPES.keys()))
def test_flashinfer_is_asked_for_the_pattern(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch, "flashinfer.activation", silu_and_mul=_act_and_mul(F.silu), gelu_and_mul=_act_and_mul(F.gelu),
        gelu_tanh_and_mul=_act_and_mul(lambda x: F.gelu(x, approximate="tanh")),
    )
    install(
        monkeypatch, "flashinfer.norm", rmsnorm=_flat_norm(0.0), gemma_rmsnorm=_flat_norm(1.0), layernorm=_layernorm,
        fused_add_rmsnorm=_fused_add_norm(0.0), gemma_fused_add_rmsnorm=_fused_add_norm(1.0),
    )
    install(monkeypatch, "flashinfer.sampling", softmax=_softmax)
    install(monkeypatch, "flashinfer.rope", apply_rope_with_cos_sin_cache=_apply_rope)
    case = case_of(pattern, SHAPES[pattern], "bfloat16")
    assert_right(case, PEERS[FLASHINFER].build(case), 2 * torch.finfo(torch.bfloat16).eps)


def test_every_library_op_is_of_a_pattern() -> None:
    from fuseplan.planner.patterns.listing import LISTING
    from fuseplan.planner.patterns.table import pattern

    for name, op in {**LIGER_OPS, **FLASHINFER_OPS}.items():
        assert tuple(pattern(name, LISTING[name].example)[1]) == op.inputs, name


def test_contestants_by_default_take_inputs_and_return_outputs() -> None:
    x = torch.ones(2)
    plain = Contestant(lambda one: one + 1)
    assert plain.prepare(x) == (x,)
    assert plain.outputs(x, ()) == [x] and plain.outputs((x, x), ()) == [x, x]


def test_what_max_autotune_prints_of_each_matmul_stays_off_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("torch._inductor.select_algorithm")
    before = log.level
    with without_chatter():
        sys.stderr.write("Autotune Choices Stats:\n")
        log.error("Runtime error during autotuning")
    assert capsys.readouterr().err == ""
    assert log.level == before
    sys.stderr.write("an error of our own\n")
    assert capsys.readouterr().err == "an error of our own\n"
