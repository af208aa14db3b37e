"""Passes of one new token for each sequence over a paged cache, or of one and its drafts, whose
description reads nothing back from the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from msattn.trainer.serving.attach import Sparse, attach
from msattn.trainer.serving.dispatch import Decision
from msattn.trainer.serving.paged.passes import PagedPass
from msattn.trainer.serving.paged.state import PagedState
from tests.factory import random_partition, tiny_model
from tests.sparse import EVERY_BLOCK, gate_for

PAGE, HEADS, SIZE, REQUESTS = 32, 2, 16, 7
LENGTHS = [1, 33, 192, 100]
LONGEST = max(LENGTHS)
PAGES = 1 + len(LENGTHS) * LONGEST // PAGE


@dataclass
class Step:
    """The tables of a pass, which may be padded, over a state with random keys; each sequence has
    ``tokens`` new tokens.
    """

    sparse: Sparse
    state: PagedState
    slots: Tensor
    table: Tensor
    kv_len: Tensor
    qkv: list[Tensor]
    tokens: int

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        slots = self.slots.clamp(min=0)
        return slots // PAGE, slots % PAGE

    def of_new_tokens(self) -> PagedPass:
        return self.sparse.paged.begin_new_tokens(
            self.state, *self.places, self.table, self.kv_len, LONGEST, self.tokens
        )

    def of_tables(self) -> PagedPass:
        cu_queries = torch.arange(len(self.kv_len) + 1, dtype=torch.int32) * self.tokens
        given = self.state, *self.places, self.table, cu_queries, self.kv_len
        return self.sparse.paged.begin_tables(*given, drafts=self.tokens - 1)

    def attend(self, now: PagedPass) -> Tensor:
        """Returns the attention of the layers, ``[layers, 1, Hq, T, D]``."""
        q, k, v = (x[:, :, : len(self.slots)] for x in self.qkv)
        cos = torch.ones(1, len(self.slots), SIZE, device=q.device)
        inputs = (
            LayerInputs(layer, q, k, v, q, k, Angles(cos, cos), Scoring(SIZE**-0.5))
            for layer in self.state.caches
        )
        return torch.stack([self.sparse.attend_pages(now, x) for x in inputs])

    def lengthen(self, lengths: list[int]) -> None:
        """Replaces the lengths in place, those of padding by 0; drafts follow at least one key."""
        self.kv_len.zero_()
        self.kv_len[: len(lengths)] = torch.tensor(lengths).clamp(
            min=self.tokens + (self.tokens > 1)
        )
        later = torch.arange(self.tokens, 0, -1, device=self.kv_len.device)
        position = self.kv_len.long()[:, None] - later
        page = self.table.gather(1, position.clamp(min=0) // PAGE).long()
        slots = torch.where(position >= 0, page * PAGE + position % PAGE, -1)
        self.slots.copy_(slots.flatten())


@contextmanager
def step(*, requests: int, tokens: int = 1, device: str = "cpu") -> Iterator[Step]:
    """Yields a pass of ``LENGTHS``, padded to a number of requests; page 0 belongs to none."""
    torch.manual_seed(0)
    model = tiny_model().to(device)
    options: dict[str, Any] = {"probes": 1, "recent": 8, "sink": 1, "dense_layers": ()}
    with attach(
        model, gate=gate_for(model), select=EVERY_BLOCK, qmodel=random_partition(), **options
    ) as sparse:
        pages = (PAGES, PAGE, HEADS, SIZE)
        caches = {layer: tuple(random(pages, pages, device=device)) for layer in range(2)}
        kept = sparse.paged.state_options(model.config, requests, tokens - 1)
        state = PagedState(caches, **kept)
        for buckets in state.buckets.values():
            buckets.random_(random_partition().num_buckets)
        table = torch.zeros(requests, LONGEST // PAGE, dtype=torch.int32, device=device)
        table[: len(LENGTHS)] = torch.arange(1, PAGES).view(len(LENGTHS), -1)
        qkv = list(
            random(
                *((1, heads, REQUESTS * tokens, SIZE) for heads in (2 * HEADS, HEADS, HEADS)),
                device=device,
            )
        )
        slots = table.new_zeros(requests * tokens).long()
        made = Step(sparse, state, slots, table, table.new_zeros(requests), qkv, tokens)
        made.lengthen(LENGTHS)
        sparse.paged.create_counters(state)
        yield made


def random(*shapes: tuple[int, ...], device: Any) -> Iterator[Tensor]:
    """Yields tensors of these shapes; equal arguments give equal ones."""
    generator = torch.Generator().manual_seed(1)
    for shape in shapes:
        yield torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize("tokens", [1, 3])
def test_padded_passes_of_new_tokens_compute_what_general_ones_do(tokens: int) -> None:
    with step(requests=len(LENGTHS), tokens=tokens) as general:
        expected = general.attend(general.of_tables())
        share = general.sparse.stats()["selectivity"]
    with step(requests=REQUESTS, tokens=tokens) as padded:
        padded.state.is_pooled.fill_(True)
        now = padded.of_new_tokens()
        got = padded.attend(now)
        assert padded.sparse.stats()["selectivity"] == share < 1
    torch.testing.assert_close(got[..., : len(LENGTHS) * tokens, :], expected)
    unpooled = {tuple(place) for place in (~padded.state.is_pooled).nonzero().tolist()}
    assert unpooled == set(
        zip(now.pages.tolist(), (now.offsets // padded.state.block_size).tolist(), strict=True)
    )
    for layer in padded.state.caches:
        of_slots = (
            (*step.state.caches[layer], step.state.buckets[layer]) for step in (padded, general)
        )
        assert all(torch.equal(own[1:], other[1:]) for own, other in zip(*of_slots, strict=True))


@pytest.mark.parametrize(
    ("queries", "sparse", "tokens"),
    [
        ([5, 7, 2, 4], {5, 7, 2, 4}, [slice(0, 5), slice(5, 12), slice(12, 14), slice(14, 18)]),
        ([5, 7, 2, 4], set(), [slice(0, 18)]),
        ([1, 6, 4, 1], set(), [slice(1, 11)]),
        ([5, 1, 7, 2], {7}, [[0, 1, 2, 3, 4, 13, 14], slice(6, 13)]),
    ],
)
def test_prompts_that_follow_one_another_are_a_slice(
    queries: list[int],
    sparse: set[int],
    tokens: list[slice | list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense ones are one group; sparse ones are here of different sizes."""
    with step(requests=len(LENGTHS)) as made:
        lengths = torch.tensor([8, 32, 192, 100], dtype=torch.int32)
        cu_queries = torch.tensor([0, *queries]).cumsum(0).int()
        selection = made.sparse.dispatch.selection
        pages = offsets = torch.zeros(sum(queries), dtype=torch.long)
        paged = made.sparse.paged
        monkeypatch.setattr(
            paged,
            "_decided",
            lambda state, item: Decision(selection if item.queries in sparse else None),
        )
        now = paged.begin_tables(made.state, pages, offsets, made.table, cu_queries, lengths)
    got = [
        each.tokens if isinstance(each.tokens, slice) else each.tokens.tolist()
        for each in now.prompts
    ]
    assert sorted(got, key=str) == sorted(tokens, key=str)


@pytest.mark.parametrize("tokens", [1, 3])
def test_passes_of_new_tokens_wait_for_no_device(tokens: int) -> None:
    """Fake tensors have no values that could be read; general passes read lengths."""
    with step(requests=REQUESTS, tokens=tokens) as made, FakeTensorMode(allow_non_fake_inputs=True):
        assert made.of_new_tokens().decoded is not None
        with pytest.raises(DataDependentOutputException):
            made.of_tables()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_cuda_graph(tokens: int) -> None:
    """A captured pass follows in-place changes of the lengths, and counts the keys of each
    replay.
    """
    with step(requests=REQUESTS, tokens=tokens, device="cuda") as made:
        made.attend(made.of_new_tokens())  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = made.attend(made.of_new_tokens())
        for lengths in ([64, 2, 17], LENGTHS, [LONGEST] * 4):
            made.lengthen(lengths)
            before = made.sparse.stats()["selectivity"]
            graph.replay()
            assert made.sparse.stats()["selectivity"] != before
            own = slice(len(lengths) * tokens)
            replayed = got[..., own, :].clone()
            again = made.attend(made.of_new_tokens())[..., own, :]
            torch.testing.assert_close(replayed, again, rtol=0, atol=0)
