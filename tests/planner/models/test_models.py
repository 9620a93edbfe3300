"""Flags to models and workloads: defaults, overrides, and one-line errors for every mistake."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_samples import CONFIGS, write_config
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseplan.planner.errors import ConfigError, ShapeError, UnknownModelError
from fuseplan.planner.models.build import build_model, cache_name, construct, rewind
from fuseplan.planner.models.sources import PRESETS, find_source, generates, hf_config, workloads_for
from fuseplan.planner.models.workload import Workload, decode, parse_workloads, prefill

# -- workloads --------------------------------------------------------------------------------------------


def test_flags_become_workloads() -> None:
    found = parse_workloads("cuda", "1, 8,32", 512, "512,4x2048")
    assert found == (decode(1, 512), decode(8, 512), decode(32, 512), prefill(1, 512), prefill(4, 2048))


def test_defaults_follow_the_device() -> None:
    assert parse_workloads("cpu") == (decode(1, 256), decode(8, 256), prefill(1, 128))
    assert [workload.label for workload in parse_workloads("cuda")] == [
        "decode 1 @ 1024",
        "decode 8 @ 1024",
        "decode 16 @ 1024",
        "decode 64 @ 1024",
        "prefill 1x512",
        "prefill 1x2048",
        "prefill 4x2048",
    ]


def test_one_list_given_means_none_of_the_other() -> None:
    assert parse_workloads("cpu", decode_batches="3") == (decode(3, 256),)
    assert parse_workloads("cpu", prefills="7") == (prefill(1, 7),)


def test_repeated_sizes_count_once() -> None:
    assert parse_workloads("cpu", "2,2") == (decode(2, 256),)


def test_a_workload_without_sizes_is_called_by_its_kind() -> None:
    assert Workload("forward").label == "forward"


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (("x", None, None), "'x'"),
        (("0", None, None), "'0'"),
        (("-1", None, None), "'-1'"),
        ((None, None, "4x"), "'4x'"),
        (("1,,2", None, None), "''"),
        (("1,8,", None, None), "''"),
        ((None, None, "4x8x2"), "'4x8x2'"),
        (("1", 1, None), "kv_len 1"),
        (("", None, ""), "nothing to plan"),
    ],
)
def test_bad_sizes_are_named(flags: tuple[str | None, int | None, str | None], culprit: str) -> None:
    with pytest.raises(ShapeError, match=culprit):
        parse_workloads("cpu", *flags)


# -- sources ----------------------------------------------------------------------------------------------


def test_llama_means_the_size_that_fits_the_device() -> None:
    assert find_source().name == "llama-3.2-1b"
    assert find_source("llama", device_type="cuda").name == "llama-3.1-8b"
    assert find_source("llama-3.1-70b").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("preset", "billions"), [("llama-3.2-1b", 1.236), ("llama-3.1-8b", 8.030), ("llama-3.1-70b", 70.554)]
)
def test_presets_have_the_published_number_of_parameters(preset: str, billions: float) -> None:
    config = hf_config(find_source(preset))
    h, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    kv = config.num_key_value_heads * config.head_dim
    layer = 2 * h * h + 2 * h * kv + 3 * h * config.intermediate_size + 2 * h
    embeddings = vocab * h * (1 if config.tie_word_embeddings else 2)
    assert (embeddings + layers * layer + h) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["rope_theta"] == 500000.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_layers_are_overridden_whatever_the_family_calls_them(family: str, tmp_path: Path) -> None:
    config = hf_config(find_source(config=write_config(tmp_path, family), layers=1))
    assert config.num_hidden_layers == 1
    assert len(getattr(config, "layer_types", None) or [0]) == 1


def test_kinds_of_layers_that_follow_from_their_number_are_left_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "mamba.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 3}))
    config = hf_config(find_source(config=tmp_path / "mamba.json", layers=1))
    assert config.num_hidden_layers == len(config.layer_types) == 1


def test_a_folder_stands_for_the_config_in_it(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3")
    source = find_source(config=path.parent, layers=2)
    assert source.config_json == find_source(config=path).config_json
    assert source.label == "qwen3:2L"


@pytest.mark.parametrize(
    ("entries", "dtype"), [({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32"), ({}, "bfloat16")]
)
def test_a_config_brings_its_dtype(entries: dict[str, str], dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["llama"], **entries}))
    assert find_source(config=path).dtype == dtype
    assert find_source(config=path, dtype="fp32").dtype == "float32"


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match=r"llama-3\.1-8b"):
        find_source("llama-3.1-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read config"), ("{", "is not JSON"), ("[]", "model_type"), ('{"a": 1}', "model_type")],
)
def test_an_unreadable_config_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        find_source(config=path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"model_type": "nosuchmodel"}, "nosuchmodel"), ({"model_type": "llama", "num_attention_heads": "x"}, "config")],
)
def test_a_config_that_transformers_refuses_is_named(entries: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=message):
        build_model(find_source(config=path), "cpu")


def test_what_transformers_logs_of_a_config_stays_unsaid(tmp_path: Path) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    entries = json.loads(write_config(tmp_path, "llama").read_text()) | {"vocab_size": 1, "bos_token_id": 7}
    (tmp_path / "odd.json").write_text(json.dumps(entries))
    logging.getLogger("transformers").addHandler(handler)
    try:
        hf_config(find_source(config=tmp_path / "odd.json"))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not said


def test_flags_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not several"):
        find_source("llama", config=tmp_path)
    with pytest.raises(ConfigError, match="layers needs a config"):
        find_source(module="a:b", layers=2)
    with pytest.raises(ConfigError, match="at least one layer"):
        find_source("llama", layers=0)
    with pytest.raises(ConfigError, match="int4"):
        find_source("llama", dtype="int4")
    with pytest.raises(ConfigError, match="describes only 2 layers"):
        hf_config(find_source(config=write_config(tmp_path, "gemma3"), layers=3))


def test_decoders_and_encoders_are_told_apart(tmp_path: Path) -> None:
    assert all(generates(find_source(name)) for name in PRESETS)
    assert generates(find_source(config=write_config(tmp_path, "gpt2")))
    assert not generates(find_source(config=write_config(tmp_path, "bert")))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    assert not generates(find_source(config=path))


def test_workloads_fit_the_model(tmp_path: Path) -> None:
    encoder = find_source(config=write_config(tmp_path, "bert"))
    assert workloads_for(encoder, "cpu") == (prefill(1, 128),)
    with pytest.raises(ConfigError, match="no decode"):
        workloads_for(encoder, "cpu", decode_batches="1")
    module = find_source(module="a:b")
    assert workloads_for(module, "cpu") == (Workload("forward"),)
    with pytest.raises(ConfigError, match="example inputs"):
        workloads_for(module, "cpu", prefills="8")
    assert workloads_for(find_source(), "cpu") == parse_workloads("cpu")


def test_calls_that_follow_from_the_sizes_asked_for(tmp_path: Path) -> None:
    encoder = find_source(config=write_config(tmp_path, "bert"))
    assert [one.label for one in workloads_for(encoder, "cpu", calls=True)] == ["prefill 1x128", "prefill 1x128 masked"]
    found = workloads_for(find_source(), "cpu", "1,4", 64, "1x32,1x80,2x8", calls=True)
    sizes = ("decode 1 @ 64", "decode 4 @ 64", "prefill 1x32", "prefill 1x80", "prefill 2x8")
    assert [one.label for one in found if one.derived] == [
        *(f"{one} {given}" for given in ("masked", "positions") for one in sizes),
        "prefill 1x32 embeddings", "prefill 1x80 embeddings", "prefill 2x8 embeddings",
        "generate 1x32", "generate 1x80", "generate 2x8",
        "generate 1x32 @ 64", "generate 4x1 @ 64",  # 80 tokens do not fit; of 4 sequences there is no prompt
    ]


# -- real modules -----------------------------------------------------------------------------------------


def test_a_built_model_is_finite_and_not_constant(tmp_path: Path) -> None:
    model = build_model(find_source(config=write_config(tmp_path, "llama")), "cpu")
    assert not model.module.training
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    norm = dict(model.module.named_parameters())["model.norm.weight"]
    assert 0.9 < float(norm.detach().float().mean()) < 1.1
    matrix = dict(model.module.named_parameters())["model.layers.0.mlp.up_proj.weight"].float()
    assert 0.015 < float(matrix.std()) < 0.025
    _, kwargs = model.example(prefill(2, 5))
    with torch.no_grad():
        logits = model.module(**kwargs).logits
    assert logits.shape == (2, 5, CONFIGS["llama"]["vocab_size"])
    assert torch.isfinite(logits).all()
    assert float(logits.float().std()) > 0


def test_rotary_frequencies_survive_the_quick_initialisation(tmp_path: Path) -> None:
    model = build_model(find_source(config=write_config(tmp_path, "qwen3")), "cpu")
    frequencies = dict(model.module.named_buffers())["model.rotary_emb.inv_freq"]
    theta, dim = 10000.0, CONFIGS["qwen3"]["head_dim"]
    torch.testing.assert_close(frequencies, theta ** -(torch.arange(0, dim, 2).float() / dim))


def test_a_decode_call_can_be_repeated_and_rewound(tmp_path: Path) -> None:
    model, workload = build_model(find_source(config=write_config(tmp_path, "gemma3")), "cpu"), decode(2, 8)
    _, kwargs = model.example(workload)
    layers = kwargs[cache_name(kwargs) or ""].layers
    assert [int(layer.cumulative_length) for layer in layers] == [4, 4]
    assert layers[1].keys.shape == (2, 2, 8, 12)
    with torch.no_grad():
        for _ in range(4):
            model.module(**kwargs)
    assert [int(layer.cumulative_length) for layer in layers] == [8, 8]
    rewind(kwargs, workload)
    assert [int(layer.cumulative_length) for layer in layers] == [4, 4]
    assert layers[0].cumulative_length_int == 4
    rewind({}, prefill(1, 4))


@pytest.mark.parametrize("counts", [False, True])
def test_a_cache_without_data_counts_its_tokens_only_when_asked(counts: bool, tmp_path: Path) -> None:
    """PyTorch computes with a number that a fake tensor remembers: on the GPU, for a cache there."""
    with FakeTensorMode():
        model = construct(find_source(config=write_config(tmp_path, "llama")), "cpu")
        _, kwargs = replace(model, counts=counts).example(decode(2, 8))
    layers = kwargs[cache_name(kwargs) or ""].layers
    assert [layer.cumulative_length.constant for layer in layers] == [torch.tensor(4) if counts else None] * 2


def test_a_model_refuses_regimes_it_has_not(tmp_path: Path) -> None:
    encoder = build_model(find_source(config=write_config(tmp_path, "bert")), "cpu")
    assert set(encoder.example(prefill(1, 4))[1]) == {"input_ids"}
    with pytest.raises(ConfigError, match="no decode"):
        encoder.example(decode(1, 8))
    with pytest.raises(ConfigError, match="decode or prefill"):
        encoder.example(Workload("forward"))


def test_a_preset_is_known_without_its_library() -> None:
    code = (
        "import sys; from fuseplan.planner.models.sources import find_source, generates; "
        "assert generates(find_source(model='llama')); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
