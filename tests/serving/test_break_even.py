"""Dense attention below the break-even length."""

import pytest
import torch

from msattn.trainer.models import break_even
from msattn.trainer.models.break_even import BREAK_EVEN, DECODING_COST
from msattn.trainer.serving.attach import attach
from tests.factory import random_tokens, tiny_model
from tests.serving.decoding import ROUTED, close, generate
from tests.sparse import gate_for


@torch.no_grad()
def test_tokens_are_dense_up_to_the_break_even_length(where: str) -> None:
    model = tiny_model().to(where)
    ids = random_tokens(1, 60)
    dense = generate(model, ids, max_new_tokens=60)
    with attach(model, **ROUTED, dense_below=100) as sparse:
        found, stats = generate(model, ids, max_new_tokens=60), sparse.stats()
    close(found[:40], dense[:40])
    assert not torch.allclose(found[42:], dense[42:], atol=1e-2)
    assert stats["dense_by_choice"] == 39, "tokens over 61 to 99 keys, in the one routed layer"
    assert stats["dense_fallbacks"] == 0
    assert stats["selectivity"] < 1


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The break-even lengths that users get, which other tests leave out."""
    monkeypatch.setattr(break_even, "BREAK_EVEN", BREAK_EVEN)
    monkeypatch.setattr(break_even, "DECODING_COST", DECODING_COST)


@torch.no_grad()
def test_short_contexts_are_dense_as_users_get_them(shipped: None) -> None:
    model = tiny_model(max_position_embeddings=1024)
    ids = random_tokens(1, 300)
    dense = generate(model, ids)
    with attach(model, gate=gate_for(model), select="topk", **ROUTED) as sparse:
        close(generate(model, ids), dense)
        stats = sparse.stats()
    assert (stats["sparsity"], stats["selectivity"], stats["dense_fallbacks"]) == (0, 1, 0)
    assert stats["dense_by_choice"] == 2 + 19


def test_break_even_length_of_decoding(shipped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_even, "_measured_device", lambda device, measured: 90)
    device, key_bytes = torch.device("cuda"), 4096

    def keys(batch: int, share: float = 1 / 32, window: int = 2048) -> int:
        return break_even.decoding_break_even(device, key_bytes, window, share, batch)

    assert 25_000 < keys(1) < 31_000
    assert [keys(batch) for batch in (1, 2, 4, 8, 16, 32)] == sorted(
        (keys(2**i) for i in range(6)), reverse=True
    )
    assert keys(1, share=0.9) > 2**31, "never, if nearly all buckets are read"
    assert keys(1, window=8192) > keys(1)
    monkeypatch.setattr(break_even, "_measured_device", lambda device, measured: -1)
    assert break_even.decoding_break_even(device, key_bytes, 1, 0.1, 7) == 0, (
        "not measured on such a GPU"
    )
