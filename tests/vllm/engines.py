"""Engines of vLLM over the embedded model, and their answers."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from vllm.entrypoints.llm import LLM
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.version import __version_tuple__

from msattn.trainer.serving.engines.vllm.plugin import backend_name
from tests.house.modules import ROOT

MODEL = ROOT / "trainer/embedded/model"
NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 256,
    "block_size": 64,
}
EVERY_KEY = {
    "gate": "embedded",
    "qmodel": "embedded",
    "select": "topk",
    "sparsity": 0.0,
    "probes": 64,
    "dense_below": 0,
}
SPARSE: dict[str, Any] = {
    "gate": "embedded",
    "qmodel": "embedded",
    "sparsity": 0.9,
    "recent": 64,
    "dense_below": 0,
}

NO_DRAFTS = pytest.mark.skipif(
    current_platform.is_cpu() and __version_tuple__[:2] in {(0, 24), (0, 30)},
    reason="on a CPU this vLLM fails with any drafts",
)

# vLLM 0.32 looks for kernels in all modules when an engine starts, which fails once drafts of
# n-grams have loaded numba; the first time is enough
REGISTER = "register_triton_kernel_overrides"
PLATFORM = type(current_platform)
if hasattr(PLATFORM, REGISTER):
    setattr(PLATFORM, REGISTER, staticmethod(cache(getattr(PLATFORM, REGISTER))))


@contextmanager
def engine(msattn: Any = None, *, model: Any = MODEL, **options: Any) -> Iterator[LLM]:
    """Yields an engine whose prompts are chunked: vLLM's own, or with ``msattn`` as
    ``additional_config``.
    """
    if msattn is not None:
        options |= {"attention_backend": backend_name(), "additional_config": {"msattn": msattn}}
    dtype = torch.get_default_dtype()
    try:
        llm = LLM(model=str(model), **{**OPTIONS, **options})
    finally:
        torch.set_default_dtype(dtype)  # vLLM 0.24 leaves the model's if a layer is refused
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def answers(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY
) -> list[list[list[int]]]:
    """Returns the tokens of each answer to each prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def builder_of(worker: Any) -> Any:
    """Returns the builder of the backend in a worker."""
    ((group,),) = worker.model_runner.attn_groups
    return group.get_metadata_builder()


def cached_tokens(llm: LLM, prompt: list[int]) -> int:
    """Returns the number of tokens of a prompt that are found in the cache."""
    (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    return output.num_cached_tokens or 0
