"""State of the slots of a paged cache: pooled keys and buckets of shared, preempted, copied and
padded pages.
"""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import RoutedQueries
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.dispatch import Dispatch
from msattn.trainer.serving.paged.passes import PagedPass, TokenPages
from msattn.trainer.serving.paged.state import PagedState, PromptChunk
from tests.factory import prompts_of, random_partition, tiny_model
from tests.serving.paged.batches import GREEDY, PAGE, alone, answer, pooled_again, together
from tests.sparse import BLOCK, EVERY_BLOCK, attach_reading_all, gate_for

AFTER_ROPE = KMeans(random_partition().centroids, random_partition().layers, rope=True)


def states(model: Any) -> Any:
    """The states of the caches of an attached model, by cache."""
    return model.generate_batch.__self__._states


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Checks pooled keys and buckets wherever they are used against those of the cached keys;
    counts what it has seen.
    """
    counts: Counter[str] = Counter()
    pool, read = PagedState.pool_keys, TokenPages.queries

    def pool_keys(
        state: PagedState, x: LayerInputs, prompt: PromptChunk, rotation: Rotation | None
    ) -> Tensor:
        pooled = pool(state, x, prompt, rotation)
        expected = pooled_again(state, x, prompt, rotation)
        torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-4)
        counts["known blocks"] += prompt.pooled
        counts["recovered blocks"] += (prompt.keys - prompt.queries) // BLOCK - prompt.pooled
        return pooled

    def queries(rows: TokenPages, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        for table, length in zip(rows.table, rows.kv_len.tolist(), strict=True):
            if length > 0 and x.layer in rows.state.buckets:
                keys = rows.state.keys(x.layer, table, 0, length, x.k.dtype)
                positions = torch.arange(length)
                held = rows.state.buckets[x.layer][
                    table[positions // rows.state.page_size].long(), positions % PAGE
                ]
                assert torch.equal(held.T[None], AFTER_ROPE.assign(x.layer, keys, keys))
                counts["decoded"] += 1
        return read(rows, x, dispatch)

    monkeypatch.setattr(PagedState, "pool_keys", pool_keys)
    monkeypatch.setattr(TokenPages, "queries", queries)
    return counts


def test_state_follows_preempted_requests_and_prefixes(seen: Counter[str]) -> None:
    model, prompts = tiny_model(), prompts_of(170, 120, 150, prefix=64) + prompts_of(90, 100)
    expected = [alone(model, prompt) for prompt in prompts]
    with attach_reading_all(model, qmodel=AFTER_ROPE) as sparse:
        options = {"num_blocks": 8, "max_batch_tokens": 61, "safety_margin": 0.0}
        assert together(model, sparse, prompts, **options) == expected
    assert seen["known blocks"] > 0
    assert seen["decoded"] > 0


def test_pooled_keys_of_decoded_tokens_are_recovered(seen: Counter[str]) -> None:
    """The next turn of a chat finds pages of the answer, of whose blocks no keys before RoPE were
    kept.

    All pages were in use by another request before, which has left its own pooled keys there.
    """
    model, (other, prompt) = tiny_model(), prompts_of(230, 3 * PAGE - 5)
    with attach_reading_all(model, qmodel=AFTER_ROPE) as sparse:
        config = sparse.batching_config(page_size=PAGE, num_blocks=8, max_batch_tokens=256)
        with model.continuous_batching_context_manager(
            GREEDY, continuous_batching_config=config
        ) as manager:
            answers = []
            for turn in range(4):
                asked = prompt if turn else other
                answers.append(
                    (asked, answer(manager, asked, PAGE + 3 if turn else 2).generated_tokens)
                )
                prompt = [*asked, *answers[-1][1], 7, 8, 9] if turn else prompt
    assert seen["recovered blocks"] > 0
    assert seen["known blocks"] > 0
    for asked, tokens in answers:
        assert tokens[:10] == alone(model, asked)[: len(tokens)]


def test_a_pass_that_fails_leaves_no_pooled_keys_behind(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    """A manager that goes on after it pools the keys of the pages again, which it finds in the
    cache.
    """
    model, (prompt,), fails = tiny_model(), prompts_of(3 * PAGE - 5), False
    write = PagedPass.write

    def writing(now: PagedPass, x: LayerInputs, buckets: Tensor | None) -> None:
        if fails and x.layer == 1:
            raise RuntimeError("out of memory")
        write(now, x, buckets)

    monkeypatch.setattr(PagedPass, "write", writing)
    with attach_reading_all(model, qmodel=AFTER_ROPE) as sparse:
        manager = model.init_continuous_batching(
            GREEDY, sparse.batching_config(page_size=PAGE, num_blocks=16, max_batch_tokens=256)
        )
        manager.start()
        turn = [*prompt, *answer(manager, prompt, PAGE + 3).generated_tokens, 7, 8, 9]
        fails = True
        assert "out of memory" in answer(manager, turn).error
        manager._generation_thread.join(20)
        fails = False
        (state,) = states(model).values()
        assert all(
            bool((pooled.flatten(2)[state.is_pooled] != 0).any(-1).all())
            for pooled in state.pooled.values()
        )
        manager.start()
        assert answer(manager, turn).generated_tokens == alone(model, turn)
        manager.stop()
    assert seen["recovered blocks"] > 0


@pytest.mark.parametrize("pages_of_request", [None, 0])
def test_copied_pages_have_the_state_of_theirs(
    seen: Counter[str], pages_of_request: int | None
) -> None:
    """Requests with several answers fork: they share whole pages, and get copies of the unfinished
    one.
    """
    model, prompts = tiny_model(), prompts_of(150, 97)
    several = GenerationConfig(
        max_new_tokens=10,
        do_sample=True,
        num_return_sequences=3,
        eos_token_id=-1,
        pad_token_id=0,
        temperature=2.0,
    )
    with attach_reading_all(model, qmodel=AFTER_ROPE) as sparse:
        answers = together(model, sparse, prompts, several, max_blocks_per_request=pages_of_request)
    assert len({tuple(tokens) for tokens in answers}) > len(prompts)
    assert seen["decoded"] >= 6 * 9


@pytest.mark.parametrize("pages_of_request", [None, 0])
def test_padded_passes(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], pages_of_request: int | None
) -> None:
    """With CUDA graphs transformers pads all passes, with sequences of no tokens and tokens of no
    sequence.
    """
    create = ModelRunner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    model, prompts = tiny_model(), prompts_of(150, 97, 20, 1)
    expected = [alone(model, prompt) for prompt in prompts]
    with attach_reading_all(model, qmodel=AFTER_ROPE) as sparse:
        options = {
            "max_batch_tokens": 70,
            "max_blocks_per_request": pages_of_request,
            "max_requests_per_batch": 8,
        }
        assert together(model, sparse, prompts, **options) == expected
        stats = sparse.stats()
    assert (stats["selectivity"], stats["sparsity"]) == (1, 0)


def test_blocks_of_several_pages_are_kept_in_their_last_one() -> None:
    """Two sequences share five pages of 16, the first of which hold a block of 64; of the next
    block they share one page.
    """
    keys = torch.zeros(16, 16, 1, 8)
    gate = GateConfig(block_size=64)
    state = PagedState(
        {0: (keys, keys)}, bucket_layers=(), gate=gate, gated_layers=(0,), requests=2
    )
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 10, 11, 12, 13]
    table = torch.tensor([first, second], dtype=torch.int32)
    assert [state.whole_blocks(table[0], n).tolist() for n in (63, 64, 144)] == [[], [4], [4, 8]]
    state.mark_pooled(state.whole_blocks(table[0], 144), pooled=True)
    assert state.leading_pooled(table).tolist() == [2, 1]
    assert state.leading_pooled(table[:, :3]).tolist() == [0, 0]
    state.mark_pooled(state.blocks_of(torch.tensor([4]), torch.tensor([3])), pooled=False)
    assert state.leading_pooled(table).tolist() == [0, 0]


def test_leaving_the_context_frees_the_state() -> None:
    model, prompts = tiny_model(), prompts_of(70)
    expected = alone(model, prompts[0])
    for _ in range(2):
        with attach_reading_all(model) as sparse:
            assert together(model, sparse, prompts) == [expected]
            manager = model.init_continuous_batching(
                GREEDY, sparse.batching_config(page_size=PAGE, num_blocks=32)
            )
            manager.start()
            assert answer(manager, prompts[0]).generated_tokens == expected
            held = list(states(model).values())[-1]
            state, buckets = weakref.ref(held), weakref.ref(next(iter(held.buckets.values())))
            del held
        assert not manager.is_running()
        with pytest.raises(UserError, match="has ended with its attached context"):
            manager.start()
        del manager
        gc.collect()
        assert state() is None
        assert buckets() is None
    assert "init_continuous_batching" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_persistent_manager_ends_with_the_context() -> None:
    model, prompts = tiny_model(), prompts_of(70)
    expected = alone(model, prompts[0])
    with attach(model, gate=gate_for(model), select=EVERY_BLOCK) as sparse:
        config = sparse.batching_config(page_size=PAGE, num_blocks=32)
        for _ in range(2):
            outputs = model.generate_batch(prompts, GREEDY, config, persistent_manager=True)
            assert [output.generated_tokens for output in outputs.values()] == [expected]
        assert model._cached_continuous_batching_manager is not None
    assert not hasattr(model, "_cached_continuous_batching_manager")
