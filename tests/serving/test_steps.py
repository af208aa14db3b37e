"""Decoding steps with lengths on the device: the same results as ordinary passes, with and without CUDA graphs."""

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from msattn.trainer.attach import Sparse, attach
from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import ModelWarning
from msattn.trainer.models.families import FAMILIES
from msattn.trainer.serving import buffer
from msattn.trainer.serving.cache import GrowingLayer
from msattn.trainer.serving.steps import DecodingSteps
from tests.factory import left_padded, random_tokens, tiny_model
from tests.test_attach import BUCKETS, gate_for, random_partition

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUTED: dict[str, Any] = {"qmodel": random_partition(), "probes": 2, "recent": 5, "dense_layers": (0,)}
ALL_BUCKETS = {**ROUTED, "probes": BUCKETS}


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which single tokens are steps; on the CPU they are launched kernel by kernel."""
    monkeypatch.setattr(DecodingSteps, "device_type", request.param)
    return request.param


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow every few tokens."""
    monkeypatch.setattr(buffer, "MIN_FREE", 4)
    monkeypatch.setattr(buffer, "STEP", 1)


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Returns the logits of greedy generation ``[tokens, B, vocabulary]``."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    return torch.stack(model.generate(**inputs, **arguments).logits).cpu()


def check_steps(sparse: Sparse, device: str, tokens: int) -> None:
    """Asserts that ``tokens`` were decoded in steps, nearly all of them as graphs on a GPU."""
    stats = sparse.stats()
    assert stats["graph_steps"] + stats["eager_steps"] == tokens
    if device == "cuda":
        assert stats["graph_steps"] > 0.7 * tokens


def close(a: Tensor, b: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_all_buckets_are_dense_attention(family: str, where: str) -> None:
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (70, 41)])
    dense = generate(model, ids, mask)
    with attach(model, **ALL_BUCKETS) as sparse:
        close(generate(model, ids, mask), dense)
        check_steps(sparse, where, 19)
        assert sparse.stats()["selectivity"] == 1
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.0)) as sparse:
        close(generate(model, ids, mask), dense)
        check_steps(sparse, where, 19)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_ordinary_passes(family: str, where: str, monkeypatch: pytest.MonkeyPatch, small_buffers: None) -> None:
    """With few buckets, through growth of the buffers and new indices."""
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (50, 41)])
    with attach(model, **ROUTED) as sparse:
        steps, read = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
    monkeypatch.setattr(DecodingSteps, "device_type", "none")
    with attach(model, **ROUTED) as sparse:
        ordinary, expected = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
    close(steps, ordinary)
    assert read["selectivity"] == pytest.approx(expected["selectivity"], rel=1e-6)
    assert read["graph_steps"] + read["eager_steps"] == 149 - 2, "the index was rebuilt twice"
    assert expected["graph_steps"] + expected["eager_steps"] == 0
