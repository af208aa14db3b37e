"""Refusals in one line when the engine starts, of parts of vLLM, options, artifacts and models."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.selector import AttentionSelectorConfig

from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.serving.engines.vllm import plugin
from msattn.trainer.serving.engines.vllm.backend import Backend
from msattn.trainer.serving.engines.vllm.engine import check_engine, options_of
from tests.factory import prompts_of, random_partition, save_tokenizer, tiny_model
from tests.sparse import gate_for, save
from tests.vllm.engines import EVERY_KEY, MODEL, OPTIONS, answers, engine

ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "pages": ({"block_size": 512}, "block_size=512: expected 16, 32, 64, 128, 256"),
}
GIVEN: dict[str, tuple[Any, str]] = {
    "no mapping": (
        "embedded",
        "additional_config.msattn=embedded: expected a mapping with .*gate, select",
    ),
    "a name": ({"gates": "embedded"}, "additional_config.msattn=gates: expected .*gate, select"),
    "a type": ({"probes": "many"}, "probes='many': expected an integer"),
}
STARTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no artifact": ({}, {}, "nothing to attach"),
    "zooms": (
        {"gate": "embedded", "select": "multiscale"},
        {},
        "vLLM: select.policy=multiscale reads no pages",
    ),
    "thresholds": (
        {"qmodel": "embedded", "threshold": 0.1},
        {},
        "additional_config.msattn=threshold: expected .*gate",
    ),
    "cache": (
        EVERY_KEY,
        {"kv_cache_dtype": "fp8_e5m2"},
        "vLLM: kv_cache_dtype=fp8_e5m2 is not .* msattn reads auto, .*, fp8, fp8_e4m3",
    ),
    "probes": ({"qmodel": "embedded", "probes": 65}, {}, "probes=65: expected 0 to 64"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_that_cannot_be_served_are_refused(name: str) -> None:
    options, message = ENGINES[name]
    config = EngineArgs(model=str(MODEL), **{**OPTIONS, **options}).create_engine_config()
    with pytest.raises(UserError, match=message):
        check_engine(config)


def test_other_drafts_are_refused() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    options = OPTIONS | {"speculative_config": ngram}
    config = EngineArgs(model=str(MODEL), **options).create_engine_config()
    config.speculative_config.method = "eagle"
    message = "speculative_config.method=eagle: msattn verifies the drafts of ngram and draft_model"
    with pytest.raises(UserError, match=message):
        check_engine(config)


def test_engines_that_sleep_are_refused() -> None:
    """vLLM's CPU platform refuses them first."""
    config = EngineArgs(model=str(MODEL), **OPTIONS).create_engine_config()
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UserError, match="enable_sleep_mode: not supported by msattn; leave it out"):
        check_engine(config)


def test_caches_that_a_gpu_or_msattn_cannot_read_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineArgs(model=str(MODEL), kv_cache_dtype="fp8", **OPTIONS).create_engine_config()
    check_engine(config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    with pytest.raises(UserError, match=r"kv_cache_dtype_skip_layers: .* leave it out"):
        check_engine(config)
    config.cache_config.kv_cache_dtype_skip_layers = []
    config.device_config.device_type = "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match=r"kv_cache_dtype=fp8: .* capability 8.9 or later; use"):
        check_engine(config)


@pytest.mark.parametrize("name", GIVEN)
def test_options_of_other_names_and_types_are_refused(name: str) -> None:
    given, message = GIVEN[name]
    config = EngineArgs(
        model=str(MODEL), additional_config={"msattn": given}, **OPTIONS
    ).create_engine_config()
    with pytest.raises(UserError, match=message):
        options_of(config)


def test_without_options_those_of_the_model_are_read() -> None:
    config = EngineArgs(model=str(MODEL), **OPTIONS).create_engine_config()
    with pytest.warns(ModelWarning, match="prompts use the training-free selection vertical_slash"):
        assert options_of(config).select == "vertical_slash"
    group = {"algorithm": "msattn", "gate": ".", "sparsity": 0.8}
    config.model_config.hf_config.sparse_attention_config = {"config_groups": {"group_0": group}}
    options = options_of(config)
    assert (options.gate, options.sparsity, options.select) == (str(MODEL), 0.8, None)


@pytest.mark.parametrize("name", STARTED)
def test_engines_do_not_start(name: str) -> None:
    given, options, message = STARTED[name]
    with pytest.raises(UserError, match=message), engine(given, **options):
        pass


def test_artifacts_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    gate, buckets = (
        save(tmp_path / str(i), model, module)
        for i, module in enumerate((gate_for(model), random_partition()))
    )
    for given in ({"gate": str(gate)}, {"qmodel": str(buckets)}):
        with (
            pytest.raises(
                UserError, match=r"artifact made for .*: its num_layers is 2, this model's is 6"
            ),
            engine(given),
        ):
            pass
    with pytest.raises(UserError, match="artifact"), engine({"gate": str(tmp_path / "none")}):
        pass


@pytest.mark.parametrize(
    ("family", "rope", "message"),
    [
        ("mistral", "default", "vLLM: sliding_window=32 is not supported"),
        ("qwen2", "dynamic", "dynamic and longrope RoPE cannot be inverted"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    tmp_path: Path, family: str, rope: str, message: str
) -> None:
    model = tiny_model(
        family, rope, head_dim=32, **({"sliding_window": 32} if family == "mistral" else {})
    )
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    options = {"model": tmp_path, "max_model_len": 128, "max_num_batched_tokens": 128}
    with pytest.raises(UserError, match=message), engine({"select": "quest"}, **options):
        pass


@pytest.mark.parametrize("version", [(0, 23, 0), (0, 33, 1)])
def test_other_versions_register_nothing(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm.version

    name = ".".join(map(str, version))
    monkeypatch.setattr(vllm.version, "__version__", name)
    monkeypatch.setattr(vllm.version, "__version_tuple__", version)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert (
        f"msattn: needs vLLM 0.24 to 0.32, {name} is installed; there is no backend MSATTN"
        in caplog.text
    )


def test_the_backend_is_found_in_a_process_that_unpickles_its_name() -> None:
    import vllm.v1.attention.backends.registry as registry

    plugin.register()
    member = registry.AttentionBackendEnum[plugin.backend_name()]
    again = pickle.loads(pickle.dumps(member))
    assert again is member
    assert again.get_class().get_name() == member.name


def test_the_platform_of_gpus_accepts_the_backend() -> None:
    for cache_dtype in ("auto", "fp8"):
        asked = AttentionSelectorConfig(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype=cache_dtype, block_size=64,
            use_per_head_quant_scales=cache_dtype == "fp8",
        )  # fmt: skip
        assert (
            Backend.validate_configuration(
                device_capability=DeviceCapability(9, 0), **asked._asdict()
            )
            == []
        )
    # the pages that vLLM chooses, unless a size was asked for
    assert Backend.get_preferred_block_size(16) == 64


def test_engines_without_the_backend_are_untouched() -> None:
    """The CPU platform looks for its own backend, whose path leads to msattn's; it gets its own."""
    with engine() as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        ((group,),) = worker.model_runner.attn_groups
        assert group.backend.get_name() == "CPU_ATTN"
        assert len(answers(llm, prompts_of(5))[0][0]) > 0
