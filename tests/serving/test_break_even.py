"""Dense attention below the break-even length."""

import re
import sys

import pytest
import torch

from msattn.trainer.models import break_even
from msattn.trainer.models.break_even import (
    BREAK_EVEN,
    DECODING_COST,
    decoding_break_even,
    prefill_break_even,
)
from msattn.trainer.serving.attach import attach
from tests.factory import random_tokens, tiny_model
from tests.house.modules import ROOT
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


@pytest.mark.parametrize(("row", "kind"), [("H200, Llama-3.1-8B's shape", "cuda"), ("CPU", "cpu")])
def test_the_guide_shows_the_shipped_lengths(
    row: str, kind: str, shipped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    lengths = [prefill_break_even(x, torch.device(kind)) for x in (0.5, 0.8, 0.9)]
    if kind == "cuda":  # 8 heads of 128 in bf16, 32 of 1024 buckets
        shape = torch.device(kind), 2 * 8 * 128 * 2, 2048, 32 / 1024
        lengths += [decoding_break_even(*shape, batch) for batch in (1, 32)]
    text = (ROOT / "docs/guide/models.md").read_text("utf-8")
    (cells,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", text, flags=re.MULTILINE)
    shown = cells.replace(",", "").replace("always dense", str(sys.maxsize)).split(" | ")
    assert [int(x) for x in shown if x.strip(" |")] == pytest.approx(lengths, rel=0.003)


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
