"""Manifests: what tables say, what they share, and that each mistake is one line with file, table and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseplan.planner.errors import ConfigError
from fuseplan.planner.models.manifest import Manifest, read_manifest

H200, CPU = "cuda-nvidia-h200-4702ed953224", "cpu-amd-epyc-family-26-model-2-fc1e222d5618"


def read(folder: Path, text: str) -> Manifest:
    path = folder / "models.toml"
    path.write_text(text)
    return read_manifest(path)


def test_tables_say_what_the_options_say_and_defaults_stand_in(tmp_path: Path) -> None:
    found = read(tmp_path, """
        [defaults]
        decode = [1, 8]
        kv_len = 256
        numerics = "eager"

        [[model]]
        config = "configs/llama"
        prefill = [128, "4x512", [2, 64]]
        calls = false

        [[model]]
        model = "llama-3.2-1b"
        name = "chat"
        decode = "16"
        numerics = "fp32"
        layers = 2
        pack_weights = true
        devices = ["h200", "cpu"]
    """)
    first, second = found.models
    assert first.config == tmp_path / "configs" / "llama" and first.model is None and not first.calls
    assert (first.decode, first.kv_len, first.prefill) == ((1, 8), 256, (128, "4x512", (2, 64)))
    assert (second.name, second.source, second.decode, second.kv_len) == ("chat", "chat", "16", 256)
    assert (first.numerics, second.numerics) == ("eager", "fp32")
    assert second.layers == 2 and second.pack_weights and second.calls and second.regime == "eager"
    assert first.is_for(H200) and first.is_for(CPU)
    assert second.is_for(H200) and second.is_for(CPU) and not second.is_for("cuda-nvidia-h100-80gb-hbm3-0123456789ab")


@pytest.mark.parametrize(("devices", "here"), [
    (["cuda"], [H200]), (["cpu"], [CPU]), (["NVIDIA H200"], [H200]), (["h100"], []), (["epyc", "h200"], [H200, CPU]),
    (["cuda-nvidia"], [H200]),
])
def test_devices_are_kinds_or_parts_of_names(tmp_path: Path, devices: list[str], here: list[str]) -> None:
    (one,) = read(tmp_path, f"[[model]]\nmodel = 'llama'\ndevices = {devices}").models
    assert [key for key in (H200, CPU) if one.is_for(key)] == here


def test_several_dtypes_and_regimes_are_several_models(tmp_path: Path) -> None:
    found = read(tmp_path, """
        [[model]]
        model = "llama"
        dtype = ["bfloat16", "float16"]
        regime = ["eager", "graph"]
    """)
    assert [(one.dtype, one.regime) for one in found.models] == [
        ("bfloat16", "eager"), ("bfloat16", "graph"), ("float16", "eager"), ("float16", "graph")]
    assert len({one.where for one in found.models}) == 1


def test_what_models_share_is_not_for_patterns_and_modules(tmp_path: Path) -> None:
    found = read(tmp_path, """
        [defaults]
        decode = [1]
        layers = 2
        dtype = "float32"
        [[model]]
        pattern = "swiglu"
        shape = "16x64"
        [[model]]
        module = "mine:block"
    """)
    assert [(one.decode, one.layers, one.dtype) for one in found.models] == [(None, None, "float32")] * 2


MODEL = "[[model]]\nmodel = 'llama'\n"


@pytest.mark.parametrize(("text", "words"), [
    ("", ["has no models", "[[model]]"]),
    ("[model]\nmodel = 'llama'", ["has no models", "[[model]]"]),
    ("model = [1]", ["has no models"]),
    ("[[model]]\nmodel = llama\n", ["not TOML", "line 2"]),
    (f"defaults = 3\n{MODEL}", ["defaults is no table"]),
    (f"{MODEL}[[modle]]\nmodel = 'llama'", ["unknown key 'modle'", "did you mean model"]),
    (f"[defaults]\nmodel = 'llama'\n{MODEL}", ["defaults", "unknown key 'model'"]),
    (f"{MODEL}kvlen = 3", ["model 1 (llama)", "unknown key 'kvlen'", "kv_len"]),
    (f"{MODEL}x9 = 3", ["model 1 (llama)", "unknown key 'x9'", "decode"]),
    (f"{MODEL}\n{MODEL}kv_len = 'long'", ["model 2 (llama)", 'kv_len = "long"', "a whole number from 2"]),
    (f"{MODEL}kv_len = 1", ["kv_len = 1", "from 2"]),
    (f"{MODEL}kv_len = true", ["kv_len = true"]),
    (f"{MODEL}layers = 2.5", ["layers = 2.5", "a whole number"]),
    (f"{MODEL}decode = [1, 0]", ["decode = [1, 0]", "a size"]),
    (f"{MODEL}decode = 1.5", ["decode = 1.5"]),
    (f"{MODEL}prefill = [[1, 2, 3]]", ["prefill"]),
    (f"{MODEL}dtype = 'int3'", ['dtype = "int3"', "bfloat16, float16, float32"]),
    (f"{MODEL}dtype = []", ["dtype = []"]),
    (f"{MODEL}regime = ['eager', 'eager']", ["regime"]),
    (f"{MODEL}calls = 'no'", ['calls = "no"', "true or false"]),
    (f"{MODEL}name = ''", ['name = ""', "text"]),
    (f"{MODEL}devices = 'h100\\n' + 'x'", ["not TOML"]),
    ("[[model]]\ndecode = [1]", ["model 1: give one of model, config, module, pattern"]),
    (f"{MODEL}config = 'x'", ["give one of", "not model and config"]),
    (f"{MODEL}shape = '3x8'", ["shape does not go with model"]),
    ("[[model]]\npattern = 'swiglu'\nshape = '3x8'\ndecode = [1]", ["decode does not go with pattern"]),
    ("[[model]]\nmodule = 'a:b'\nlayers = 2", ["layers does not go with module"]),
    (f"[defaults]\nkv_len = 0\n{MODEL}", ["defaults: kv_len = 0"]),
])
def test_a_mistake_is_named_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    said = str(raised.value)
    assert "models.toml" in said and "\n" not in said
    assert not [word for word in words if word not in said], said


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"[" * 5000, b"a = " + b"[" * 5000])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "models.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"models\.toml"):
        read_manifest(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_manifest(tmp_path)
