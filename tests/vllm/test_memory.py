"""The memory beside the KV cache is part of what vLLM may use."""

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from msattn.trainer.serving.engines.vllm import memory
from tests.factory import prompts_of
from tests.vllm.engines import answers, builder_of, engine

# not imported, because this module replaces functions of torch.cuda
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
AVAILABLE = 2**26
OPTIONS: dict[str, Any] = {
    "gate": "embedded",
    "qmodel": "embedded",
    "keys": 0.05,
    "dense_below": 0,
}


@pytest.mark.skipif(not current_platform.is_cpu(), reason="for the worker of CPUs")
@pytest.mark.parametrize(
    ("cache_dtype", "said_of_cache", "said_of_state"),
    [("auto", "0.06", "0.00"), ("fp8", "0.05", "0.01")],
)
def test_cache_and_state_fit_in_the_available_memory(
    cache_dtype: str,
    said_of_cache: str,
    said_of_state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(f"{CPU_WORKER}.determine_available_memory", lambda self: AVAILABLE)
    said: list[str] = []
    monkeypatch.setattr(memory._log, "info", lambda text, *args: said.append(text % args))
    limits = {"gpu_memory_utilization": 0.1, "max_num_seqs": 8}
    with engine(OPTIONS, kv_cache_dtype=cache_dtype, **limits) as llm:
        answers(llm, prompts_of(100))
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        builder = builder_of(worker)
        state = builder.state()
        # layers may share a storage
        caches = [keys.untyped_storage() for keys, _ in state.caches.values()]
        used = sum({cache.data_ptr(): cache.nbytes() for cache in caches}.values())
        kept = [
            *state.buckets.values(),
            *state.pooled.values(),
            state.is_pooled,
            state.sizes._sizes,
        ]
        counts = [builder.sparse.statistics.share_of_keys()]
        for size in ((1, 256), (8, 1)):
            memory.largest_pass(
                worker.vllm_config,
                builder.sparse,
                worker.model_runner.get_kv_cache_spec(),
                torch.device("cpu"),
                *size,
            )
        assert [builder.sparse.statistics.share_of_keys()] == counts
    total = used + sum(x.nbytes for x in kept)
    assert 0.98 * AVAILABLE < total <= AVAILABLE
    (line,) = said
    assert line.startswith(
        f"msattn: {said_of_cache} GiB of KV cache; beside it {said_of_state} GiB of pooled keys"
    )
