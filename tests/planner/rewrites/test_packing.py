"""Parameters moved side by side: the same objects and numbers in one piece of memory, or a reason why not."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fuseplan.planner.graph.merged_linear import as_one
from fuseplan.planner.rewrites.packing import pack, pack_operands

ROWS = (5, 1, 3)


def parameters(rows: Sequence[int] = ROWS, width: int = 7, **how: Any) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(count, width, **how)) for count in rows]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("made_in_inference", [False, True])
def test_parameters_stay_what_they_are(trainable: bool, inference: bool, made_in_inference: bool) -> None:
    with torch.inference_mode(made_in_inference):
        given = [nn.Parameter(one.detach().clone(), requires_grad=trainable) for one in parameters()]
    before = [(id(one), one.detach().clone(), one.stride(), one.requires_grad) for one in given]
    with torch.inference_mode(inference):
        assert pack(given, range(3)) is None
    for one, (number, value, strides, trains) in zip(given, before, strict=True):
        assert (id(one), one.stride(), one.requires_grad) == (number, strides, trains)
        assert torch.equal(one, value) and one.is_leaf and type(one) is nn.Parameter
        assert one.is_inference() == made_in_inference
    assert len({storage(one) for one in given}) == 1
    # No second copy: what they share is as large as they are.
    assert given[0].untyped_storage().nbytes() == sum(one.nbytes for one in given)


def test_weights_and_biases_are_packed_apart() -> None:
    weights, biases = parameters(), [nn.Parameter(torch.randn(count)) for count in ROWS]
    mixed = [one for pair in zip(weights, biases, strict=True) for one in pair]
    assert pack(mixed, range(0, 6, 2), range(1, 6, 2)) is None
    assert as_one(weights) is not None and as_one(biases) is not None
    assert storage(weights[0]) != storage(biases[0])


def test_what_is_packed_stays_where_it_is() -> None:
    given = parameters()
    assert pack(given, range(3)) is None
    places = [one.data_ptr() for one in given]
    for again in (range(3), range(1, 3), range(1)):  # a part of it, too: another graph may use fewer
        assert pack(given, again) is None
    assert [one.data_ptr() for one in given] == places
    assert "packed with others" in str(pack(given, (2, 0)))
    assert "packed with others" in str(pack([*given, *parameters((2,))], (0, 3)))
    assert [one.data_ptr() for one in given] == places


def _shared(given: list[Any]) -> None:
    given.append(given[1].detach())


def _alias_elsewhere(given: list[Any]) -> None:
    given[0].alias = given[1].data  # nothing that a graph is called with


def _part(given: list[Any]) -> None:
    given[1] = nn.Parameter(torch.randn(4, 7)[:1])


def _buffer(given: list[Any]) -> None:
    given[1] = given[1].detach()


def _subclass(given: list[Any]) -> None:
    class Wrapped(torch.Tensor):
        pass

    given[1] = nn.Parameter(given[1].detach().as_subclass(Wrapped))


def _meta(given: list[Any]) -> None:
    given[1] = nn.Parameter(torch.randn(1, 7, device="meta"))


def _in_shared_memory(given: list[Any]) -> None:
    given[1].data.share_memory_()


def _fake(given: list[Any]) -> None:
    with torch._subclasses.FakeTensorMode():
        given[1] = nn.Parameter(torch.randn(1, 7))


@pytest.mark.parametrize(("change", "reason"), [
    (_shared, "shares its memory"), (_alias_elsewhere, "shares its memory"), (_part, "part of a larger tensor"),
    (_buffer, "is a Tensor"), (_subclass, "is a Wrapped"), (_meta, "on device meta"),
    (_in_shared_memory, "processes share"), (_fake, "FakeTensor"),
])
def test_what_cannot_be_moved_stays(change: Any, reason: str) -> None:
    given: list[Any] = list(parameters())
    change(given)
    places = [id(one) if one.device.type == "meta" else one.data_ptr() for one in given if not _is_fake(one)]
    assert reason in str(pack(given, range(3)))
    assert places == [
        id(one) if one.device.type == "meta" else one.data_ptr() for one in given if not _is_fake(one)
    ]


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def test_nothing_of_a_site_is_moved_when_its_biases_cannot_be() -> None:
    weights, biases = parameters(), [nn.Parameter(torch.randn(count)) for count in ROWS]
    biases[2] = biases[0]
    alias = biases[0].detach()
    assert not pack_operands(weights, biases)
    assert as_one(weights) is None and alias.data_ptr() == biases[0].data_ptr()


def test_no_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for 1 GiB")

    monkeypatch.setattr("fuseplan.planner.rewrites.packing.side_by_side", fail)
    given = parameters()
    assert "no room for 1 GiB" in str(pack(given, range(3)))
    assert as_one(given) is None


def test_a_compilers_fake_mode_is_left() -> None:
    given = parameters()
    with torch._subclasses.FakeTensorMode():
        assert pack(given, range(3)) is None
    assert not any(_is_fake(one.data) for one in given) and as_one(given) is not None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(7, 5), nn.Linear(7, 3)

    def packed(self) -> Layer:
        given = [self.q.weight, self.k.weight, self.q.bias, self.k.bias]
        assert pack(given, (0, 1), (2, 3)) is None
        return self


def test_a_packed_model_is_saved_loaded_copied_and_cast() -> None:
    model = Layer().packed()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(values) == ["q.weight", "q.bias", "k.weight", "k.bias"]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    size = file.tell()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    plain = Layer()
    other = io.BytesIO()
    torch.save(plain.state_dict(), other)
    assert size <= other.tell()
    plain.load_state_dict(loaded)
    for found in (loaded, plain.state_dict(), copy.deepcopy(model).state_dict()):
        assert all(torch.equal(found[name], value) for name, value in values.items())
    # A copy is the copy's own.
    twin = copy.deepcopy(model)
    assert storage(twin.q.weight) != storage(model.q.weight)
    twin.q.weight.data.zero_()
    assert torch.equal(model.q.weight, values["q.weight"])
    # What is loaded lands where the parameters are.
    model.load_state_dict({name: value * 2 for name, value in values.items()})
    whole = as_one([model.q.weight, model.k.weight])
    assert whole is not None and torch.equal(whole, torch.cat([values["q.weight"], values["k.weight"]]) * 2)
    model.to(torch.float64)
    assert as_one([model.q.weight, model.k.weight]) is None
    assert torch.equal(model.k.weight, values["k.weight"].double() * 2)
    assert model.packed().k.weight.dtype == torch.float64


def test_safetensors_holds_each_once() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Layer().packed()
    found = safetensors.load(safetensors.save(model.state_dict()))
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_a_packed_model_still_trains() -> None:
    model, plain = Layer(), Layer()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 7)
    for one in (model.packed(), plain):
        optimiser = torch.optim.SGD(one.parameters(), 0.1)
        (one.q(x).sum() + one.k(x).square().sum()).backward()
        optimiser.step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
