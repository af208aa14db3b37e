"""Engines whose model is divided among processes: stages of a pipeline, and heads within them."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast

from msattn.trainer.serving.engines.vllm.backend import stats
from tests.factory import prompts_of
from tests.house.modules import ROOT
from tests.vllm.engines import SPARSE, answers, builder_of, engine

LAYERS = 6
# layer 0 is dense in decoding
ROUTED = range(1, LAYERS)


@pytest.fixture(autouse=True)
def _sockets_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM before 0.32 leaves its sockets open, and waits forever for them once they are collected
    together with their context.
    """
    contexts = list[Any]()

    def context() -> Any:
        contexts.append(zmq.Context())
        return contexts[-1]

    monkeypatch.setattr(shm_broadcast, "Context", context)
    yield
    for made in contexts:
        made.destroy(linger=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_hold_their_layers_and_give_the_tokens_of_one_process(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # more processes than cores
    monkeypatch.syspath_prepend(ROOT)  # they import this module
    prompts = prompts_of(1, 64, 900, 333)
    with engine(SPARSE) as llm:
        expected = answers(llm, prompts)
        (read,) = llm.collective_rpc(stats)
    parts = {"pipeline_parallel_size": 2, "tensor_parallel_size": ranks}
    with engine(SPARSE, distributed_executor_backend="mp", **parts) as llm:
        llm.collective_rpc(_create_buffers)
        assert answers(llm, prompts) == expected
        counted, held = llm.collective_rpc(stats), llm.collective_rpc(_held)
    stages = [range(LAYERS // 2)] * ranks + [range(LAYERS // 2, LAYERS)] * ranks
    for stage, own, layers in zip(stages, counted, held, strict=True):
        of_stage = {layer: read["sparsity_by_layer"][layer] for layer in stage}
        assert own["sparsity_by_layer"] == pytest.approx(of_stage)
        assert 0.05 < own["selectivity"] < 0.5
        routed = sorted({*stage} & {*ROUTED})
        assert layers == {
            "caches": [*stage],
            "gates": [*stage],
            "pooled": [*stage],
            "classifiers": [*stage],
            "centroids": len(stage),
            "buckets": routed,
        }


def _create_buffers(worker: Any) -> None:
    """Creates the buffers between stages, as vLLM's CPU platform does before it compiles."""
    worker.model_runner.profile_run()


def _held(worker: Any) -> dict[str, Any]:
    """Returns the layers of which a rank holds something."""
    builder = builder_of(worker)
    state, dispatch = builder.state(), builder.sparse.dispatch
    return {
        "caches": sorted(state.caches),
        "gates": dispatch.gate.layer_numbers,
        "pooled": sorted(state.pooled),
        "classifiers": dispatch.routed.router.layers,
        "centroids": len(dispatch.routed.router.partition.centroids),
        "buckets": sorted(state.buckets),
    }
