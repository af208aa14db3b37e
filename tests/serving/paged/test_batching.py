"""Managers of continuous batching: their configuration, what is refused in one line, and other ways
to create one.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.untrained.routers.random import RandomBuckets
from msattn.trainer.models import tap
from msattn.trainer.serving.attach import attach, disable, enable
from msattn.trainer.serving.engines.whole_blocks import WholeBlocks
from msattn.trainer.serving.graphs import steps
from msattn.trainer.serving.statistics import Statistics
from tests.factory import prompts_of, random_partition, tiny_model
from tests.serving.paged.batches import GREEDY, PAGE, alone, answer, together
from tests.sparse import BUCKETS, EVERY_BLOCK, attach_reading_all, gate_for

ROUTED: dict[str, Any] = {"qmodel": random_partition(), "probes": 2}
ATTACHED: dict[str, tuple[dict[str, Any], str]] = {
    "decode gates": (
        {"qmodel": "decode_gate", "probes": 1},
        "generate_batch: qmodel may be a query classifier",
    ),
    "pages": ({"qmodel": "quest"}, "generate_batch: qmodel may be a query classifier"),
    "independent": ({**ROUTED, "independent": True}, "independent=True is not supported"),
    "buckets": (
        {"qmodel": RandomBuckets(2**15 + 1, [1], 2), "probes": 1},
        "up to 32,768 buckets, this router has 32,769",
    ),
    "rotated keys": ({"gate": "rotated_gate"}, "generate_batch: pages pool keys before RoPE"),
    "zooms": ({"gate": "gate", "select": "multiscale"}, "select.policy=multiscale reads no pages"),
    "recall": (
        {**ROUTED, "measure_recall": True},
        "measure_recall and measure_time are not supported",
    ),
    "time": ({**ROUTED, "measure_time": True}, "measure_recall and measure_time are not supported"),
}
CONFIGURED: dict[str, tuple[dict[str, Any], str]] = {
    "page": (
        {"page_size": 24},
        "page_size=24: expected a multiple of 16, the block size of the selection",
    ),
    "tokens": (
        {"max_batch_tokens": 31},
        "max_batch_tokens, server.batch_tokens=31: expected 32 or more, two blocks",
    ),
    "offload": ({"cpu_offload_space": 0.5}, "cpu_offload_space=0.5: expected 0"),
    "prompts": ({"use_cuda_graph": True}, "use_cuda_graph=True: prompts are not captured"),
    "both": ({"use_cuda_graph": (True, True)}, "use_cuda_graph="),
    "level": ({"default_compile_level": 1}, "default_compile_level"),
    "compile": ({"varlen_compile_config": CompileConfig()}, "varlen_compile_config"),
}


def test_prompts_that_wait_for_room_are_not_overtaken() -> None:
    """Six requests decode; of a prompt of 31 tokens neither all nor a block before its last 16
    tokens fits beside them.
    """

    def request(tokens: int, status: str = "PENDING") -> Any:
        name = SimpleNamespace(name=status)
        return SimpleNamespace(
            status=name,
            position_offset=0,
            remaining_prefill_tokens=[0] * tokens,
            tokens_to_process=[],
        )

    def schedule(state: Any, tokens: list[int], budget: int) -> None:
        state.tokens_to_process = tokens[:budget]

    def process(candidates: Iterable[Any], budget: int) -> list[int]:
        taken = []
        for state in candidates:
            scheduler._schedule_request(state, state.remaining_prefill_tokens, budget)
            taken.append(len(state.tokens_to_process))
        return taken

    scheduler: Any = SimpleNamespace(
        _process_candidates=process,
        _schedule_request=schedule,
        cache=SimpleNamespace(search_prefix_match=None),
    )
    WholeBlocks(scheduler, block=16, last=16)
    decoded = [request(1, "DECODING") for _ in range(6)]
    assert scheduler._process_candidates([*decoded, request(31), request(5)], 36) == [1] * 6
    assert scheduler._process_candidates([request(5), *decoded, request(31), *decoded[:1]], 36) == [
        5,
        *[1] * 7,
    ]
    assert scheduler._process_candidates([request(31), request(2), request(50)], 36) == [31, 2]
    # 18 are left, of which 16 stay together
    assert scheduler._process_candidates([request(50), request(5)], 36) == [32]


@pytest.mark.parametrize("name", ATTACHED)
def test_what_cannot_be_served_over_pages_is_refused(name: str) -> None:
    model = tiny_model()
    options, message = ATTACHED[name]
    built = {
        "gate": lambda: gate_for(model),
        "rotated_gate": lambda: Gate.build(model.config, GateConfig(block_size=16, rope="model")),
        "decode_gate": lambda: DecodeGate.build(
            model.config, GateConfig(block_size=16, phase="decode")
        ),
    }
    given = {
        key: built[value]() if isinstance(value, str) and value in built else value
        for key, value in options.items()
    }
    with attach(model, **given), pytest.raises(UserError, match=message):
        model.generate_batch(prompts_of(20), GREEDY)


@pytest.mark.parametrize("name", CONFIGURED)
def test_configurations_that_cannot_be_served_are_refused(name: str) -> None:
    model = tiny_model()
    options, message = CONFIGURED[name]
    with attach_reading_all(model) as sparse, pytest.raises(UserError, match=message):
        model.init_continuous_batching(GREEDY, sparse.batching_config(**options))


def test_other_versions_of_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    # A test that ran before may have imported transformers anew.
    monkeypatch.setattr("transformers.__version__", "5.22.1")
    with attach_reading_all(model) as sparse:
        for call in (lambda: model.generate_batch(prompts_of(20), GREEDY), sparse.batching_config):
            with pytest.raises(
                UserError, match=r"needs transformers 5.23 or newer, 5.22.1 is installed"
            ):
                call()


def test_managers_of_another_attention_are_refused() -> None:
    model = tiny_model()
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=16, max_batch_tokens=64)
    prompts = prompts_of(40)
    expected = [
        output.generated_tokens for output in model.generate_batch(prompts, GREEDY, config).values()
    ]
    manager = model.init_continuous_batching(GREEDY, config)
    with attach_reading_all(model):
        manager.start()
        assert "outside the attached context" in answer(manager, prompts[0]).error
        manager.stop(hard_stop=True)
    model.generate_batch(prompts, GREEDY, config, persistent_manager=True)
    with (
        attach_reading_all(model),
        pytest.raises(UserError, match="destroy_cached_continuous_batching_manager"),
    ):
        model.generate_batch(prompts, GREEDY, config)
    model.destroy_cached_continuous_batching_manager()
    assert [
        output.generated_tokens for output in model.generate_batch(prompts, GREEDY, config).values()
    ] == expected


def test_prompts_that_would_end_all_requests_are_refused() -> None:
    model, (good,) = tiny_model(), prompts_of(20)
    with attach_reading_all(model) as sparse:
        config = sparse.batching_config(page_size=PAGE, num_blocks=16, max_batch_tokens=64)
        with model.continuous_batching_context_manager(
            GREEDY, continuous_batching_config=config
        ) as manager:
            for bad, message in (
                ([], "one token"),
                ([3, 128], "0 to 127"),
                ([-1], "0 to 127"),
                ([1] * 257, "prompt of 257"),
            ):
                with pytest.raises(UserError, match=message):
                    manager.add_request(bad)
                with pytest.raises(UserError, match=message):
                    model.generate_batch([good, bad], GREEDY, config)
            assert answer(manager, good).error is None
        with torch.inference_mode(), pytest.raises(UserError, match="inference_mode"):
            model.generate_batch([good], GREEDY, config)
    assert "generate_batch" not in vars(model)


def test_generate_reads_no_mask_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a name that has "flash", which managers need, it keeps masks of ones; so the tap has one
    for managers only.
    """
    model, (prompt,) = tiny_model(), prompts_of(40)
    names, read, left_padding = list[str](), list[torch.Tensor](), tap.left_padding

    def reading(mask: torch.Tensor) -> list[int]:
        read.append(mask)
        return left_padding(mask)

    for module in (tap, steps):
        monkeypatch.setattr(module, "left_padding", reading)
    with attach_reading_all(model) as sparse:
        names.append(model.config._attn_implementation)
        model.generate(
            torch.tensor([prompt]), max_new_tokens=4, do_sample=False, cache_implementation="static"
        )
        assert read == []
        for _ in range(2):
            model.init_continuous_batching(GREEDY, sparse.batching_config(page_size=PAGE))
        names.append(model.config._attn_implementation)
        assert together(model, sparse, [prompt]) == [alone(model, prompt)]
    assert [*names, model.config._attn_implementation] == ["msattn_tap", "msattn_flash_tap", "sdpa"]


def test_a_manager_that_cannot_be_created_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = tiny_model(), prompts_of(40)
    with attach_reading_all(model) as sparse:
        with monkeypatch.context() as broken:
            broken.setattr(model, "generation_config", None)
            with pytest.raises(ValueError, match="GenerationConfig"):
                model.init_continuous_batching()
        assert model.config._attn_implementation == "msattn_tap"
        assert together(model, sparse, [prompt]) == [alone(model, prompt)]


def test_attention_sinks_are_refused() -> None:
    """In layers that are all served; those of gpt-oss have a window, too."""
    model = tiny_model()
    with attach_reading_all(model):
        model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(UserError, match="attention sinks are not supported"):
            model.generate_batch(prompts_of(20), GREEDY)


def test_the_default_configuration() -> None:
    model = tiny_model()
    with attach_reading_all(model) as sparse:
        config = sparse.batching_config(num_blocks=8)
        assert (config.page_size, config.auto_switch_to_flash, config.num_blocks) == (256, False, 8)
        resolved = model.init_continuous_batching(
            GREEDY, sparse.batching_config(page_size=PAGE)
        ).continuous_batching_config
        assert resolved.max_blocks_per_request == model.config.max_position_embeddings // PAGE
        assert not any(resolved.use_cuda_graph)
        for hints, pages in (((20, 12), 1), ((20, 0), 8), ((0, 12), 8), ((300, 300), 8)):
            asked = WorkloadHints(
                max_prompt_length=min(hints[0], 256), max_generated_length=hints[1]
            )
            manager = model.init_continuous_batching(
                GREEDY, sparse.batching_config(page_size=PAGE), asked
            )
            assert manager.continuous_batching_config.max_blocks_per_request == pages
        given = sparse.batching_config(page_size=PAGE, max_blocks_per_request=3)
        assert (
            model.init_continuous_batching(
                GREEDY, given
            ).continuous_batching_config.max_blocks_per_request
            == 3
        )


def test_an_enabled_model_and_one_with_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    base, prompts = tiny_model(), prompts_of(70)
    model = get_peft_model(
        base, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    expected = [alone(model, prompt) for prompt in prompts]
    sparse = enable(
        model, gate=gate_for(base), select=EVERY_BLOCK, qmodel=random_partition(), probes=BUCKETS
    )
    assert together(model, sparse, prompts) == expected
    disable(model)
    assert [alone(model, prompt) for prompt in prompts] == expected


def test_statistics_leave_out_what_is_not_counted() -> None:
    statistics, cpu = Statistics(), torch.device("cpu")
    for _ in range(2):
        statistics.add("sparsity", torch.tensor(0.5))
        statistics.add_visible(torch.tensor(10))
        statistics.add_visible(10, all_read=True)
        statistics.key_counts(1, 2, cpu).add_(1)
        before = statistics.mean("sparsity"), statistics.share_of_keys()
        with statistics.unchanged():
            statistics.add("sparsity", torch.tensor(0.9))
            statistics.count("dense_by_choice")
            statistics.add_visible(torch.tensor(1000), all_read=True)
            statistics.key_counts(1, 2, cpu).add_(7)
            statistics.key_counts(3, 2, cpu).add_(7)
        assert (statistics.mean("sparsity"), statistics.share_of_keys()) == before == (0.5, 0.6)
        assert statistics.counts["dense_by_choice"] == 0
