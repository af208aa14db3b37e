"""FineTuner: gradients against plain autograd, with checkpointing, sliced loss, torch.compile and
FSDP2.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.config import BlockSizes, GateConfig, SelectConfig
from msattn.trainer.data.chunking import Chunks
from msattn.trainer.data.mixture import RetrievalMixture
from msattn.trainer.data.tasks.sequences import ANSWER_WEIGHT
from msattn.trainer.finetune import trainer as tuner
from msattn.trainer.finetune.trainer import FineTuner, checkpoint_activations, language_loss
from msattn.trainer.methods.blocks import visible_blocks
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.distillation import gate_loss
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import selected_attention
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from tests.factory import FAMILIES, embedded_tokenizer, random_tokens, tiny_model
from tests.jobs import Job

SELECT = SelectConfig(sparsity=0.5)
MEANS = SelectConfig("multiscale", shares=[0.2, 0.2, 0.3, 0.3])
IDS = random_tokens(2, 97, seed=1)
EQUAL = BlockSizes(16, 16)


def fine_tuner(
    family: str = "llama",
    *,
    sparse: bool = True,
    dtype: torch.dtype = torch.float32,
    select: SelectConfig = SELECT,
    sizes: BlockSizes = EQUAL,
    **changes: Any,
) -> FineTuner:
    model = tiny_model(family, "yarn", **changes).requires_grad_(True)
    gate = Gate.build(model.config, GateConfig(**sizes.arguments)) if sparse else None
    return FineTuner(model, gate, select, gate_weight=0.5, dtype=dtype).train()


def gradients(module: FineTuner, ids: Tensor = IDS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of a pass, and the gradient of every weight."""
    with module.attached():
        outputs = module(ids)
        outputs["loss"].backward()
    found = {name: weight.grad for name, weight in module.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return outputs, found


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_training_equals_that_of_transformers(family: str) -> None:
    module = fine_tuner(family, sparse=False)
    plain = tiny_model(family, "yarn").requires_grad_(True)
    outputs, found = gradients(module)
    loss = plain(input_ids=IDS, labels=IDS).loss
    loss.backward()
    torch.testing.assert_close(outputs["loss"], loss)
    assert torch.equal(outputs["loss"], outputs["parts"]["language"])
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "select", "sizes"),
    [
        *((family, SELECT, EQUAL) for family in FAMILIES),
        ("llama", MEANS, EQUAL),
        ("llama", SELECT, BlockSizes(32, 16)),
    ],
)
def test_sparse_training_equals_one_autograd_graph(
    family: str, select: SelectConfig, sizes: BlockSizes
) -> None:
    """The reference has the losses of the gates, on detached inputs, and of the language model in
    one graph.
    """
    module, plain = (fine_tuner(family, select=select, sizes=sizes) for _ in range(2))
    outputs, found = gradients(module)
    gate, losses = plain.gate, []
    assert gate is not None

    def gated_attention(x: LayerInputs) -> Tensor:
        cfg = gate.cfg
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        pooled = maxpool_attention(
            q, k, v, **sizes.arguments, scale=x.scale, pool=cfg.target
        ).pooled
        losses.append(gate_loss(gate.logits(x), pooled, visible_blocks(x, cfg.sizes), cfg))
        return selected_attention(x, Selection.from_config(select, gate).blocks(x), cfg.sizes).out

    with tap(plain.model, gated_attention):
        logits = plain.model.lm_head(run_backbone(plain.model, IDS))
        language = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        (language + 0.5 * sum(losses)).backward()
    torch.testing.assert_close(outputs["parts"]["language"], language)
    for i, loss in enumerate(losses):
        torch.testing.assert_close(outputs["parts"][f"layer {i}"], loss)
    torch.testing.assert_close(outputs["loss"], language + 0.5 * sum(losses))
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sparse", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)]
)
def test_checkpointing_changes_nothing_and_maps_blocks_once(
    sparse: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = []
    true_map = Gate.true_map
    monkeypatch.setattr(Gate, "true_map", lambda *a: maps.append(1) or true_map(*a))
    kept, again = fine_tuner(sparse=sparse, dtype=dtype), fine_tuner(sparse=sparse, dtype=dtype)
    checkpoint_activations(again.model)
    layers = []
    again.model.get_submodule("model.layers.0.mlp.gate_proj").register_forward_hook(
        lambda *_: layers.append(1)
    )
    (before, expected), (after, found) = gradients(kept), gradients(again)
    assert len(layers) == 2, "the layer must run again in the backward pass"
    assert len(maps) == (4 if sparse else 0)  # two layers, two modules
    assert torch.equal(before["loss"], after["loss"])
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_bfloat16_products_are_near_float32_and_weights_stay_float32() -> None:
    whole, half = fine_tuner(), fine_tuner(dtype=torch.bfloat16)
    expected, outputs = gradients(whole)[0], gradients(half)[0]
    assert {weight.dtype for weight in half.parameters()} == {torch.float32}
    assert not torch.equal(outputs["loss"], expected["loss"])
    torch.testing.assert_close(outputs["loss"], expected["loss"], rtol=0.02, atol=0)


def test_evaluation_computes_no_gate_targets() -> None:
    module = fine_tuner()
    with module.attached():
        trained = module(IDS)["parts"]["language"]
        module.eval()
        with torch.no_grad():
            outputs = module(IDS)
    assert outputs["parts"].keys() == {"language"}
    torch.testing.assert_close(outputs["loss"], trained)
    assert not module._targets


def test_the_sliced_loss_equals_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = nn.Linear(8, 32, bias=False), []
    head.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    hidden, targets = torch.randn(2, 13, 8, requires_grad=True), torch.randint(32, (2, 13))
    weights = torch.rand(2, 13)
    each = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="none").view(
        2, 13
    )
    expected = ((each * weights).sum(1) / weights.sum(1)).mean()
    expected.backward()
    gradients = [hidden.grad, head.weight.grad]
    hidden.grad = head.weight.grad = None
    rows.clear()
    monkeypatch.setattr(tuner, "LOGIT_BYTES", 4 * 32 * 7)
    loss = language_loss(head, hidden, targets, weights, vocabulary=32)
    assert rows == [7, 7, 7, 5]
    loss.backward()
    assert max(rows) == 7
    assert len(rows) == 8
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([hidden.grad, head.weight.grad], gradients)


@pytest.mark.parametrize("sparse", [True, False])
def test_splitting_a_batch_with_token_weights_changes_nothing(sparse: bool) -> None:
    weights = torch.rand(IDS.shape) * torch.tensor([[1.0], [9.0]])
    weights[0, :50] = 0
    whole, split = fine_tuner(sparse=sparse), fine_tuner(sparse=sparse)
    with whole.attached():
        whole(IDS, weights)["loss"].backward()
    with split.attached():
        for row in range(2):
            (split(IDS[row : row + 1], weights[row : row + 1])["loss"] / 2).backward()
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(
            split.get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
def test_dense_training_compiles_to_one_graph() -> None:
    module, plain = fine_tuner(sparse=False), fine_tuner(sparse=False)
    module.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    (outputs, found), (before, expected) = gradients(module), gradients(plain)
    torch.testing.assert_close(outputs["loss"], before["loss"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_retrieval_tasks_are_distinct_and_weight_their_answers() -> None:
    tokenizer = embedded_tokenizer()
    text = np.random.default_rng(0).integers(len(tokenizer), size=(3, 256), dtype=np.int32)
    items = RetrievalMixture(Chunks(text, tokenizer), tokenizer, share=0.5, length=40, seed=1)
    drawn = [items[i] for i in range(40)]
    assert all(item["input_ids"].shape == item["weights"].shape == (256,) for item in drawn)
    plain = [i for i, item in enumerate(drawn) if torch.equal(item["weights"], torch.ones(256))]
    assert 8 < len(plain) < 32
    assert all(
        torch.equal(drawn[i]["input_ids"], torch.from_numpy(text[i % 3]).long()) for i in plain
    )
    made = [item for i, item in enumerate(drawn) if i not in plain]
    assert {item["weights"].max().item() for item in made} == {1.0, ANSWER_WEIGHT}
    assert len({item["input_ids"].numpy().tobytes() for item in made}) == len(made)
    for i in (0, 39):
        assert torch.equal(drawn[i]["input_ids"], items[i]["input_ids"])


SHARED = """
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from tests.finetune.test_trainer import checkpoint_activations, fine_tuner, gradients, random_tokens

init_process_group("gloo")
rank, ids = torch.distributed.get_rank(), random_tokens(2, 97, seed=1)
for sparse in (True, False):
    whole, shared = fine_tuner(sparse=sparse, tie_word_embeddings=True), fine_tuner(sparse=sparse,
        tie_word_embeddings=True)
    checkpoint_activations(shared.model)
    for layer in shared.model.base_model.layers:
        fully_shard(layer)
    fully_shard(shared)
    (before, expected), (after, found) = gradients(whole, ids), gradients(shared,
        ids[rank : rank + 1])
    loss = after["loss"].detach().clone()
    torch.distributed.all_reduce(loss)
    torch.testing.assert_close(loss / 2, before["loss"])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].full_tensor(), gradient, rtol=1e-4, atol=1e-6,
            msg=name)
destroy_process_group()
"""


@pytest.mark.slow
def test_fsdp2_gradients_equal_those_of_one_process(tmp_path: Path) -> None:
    """Applies FSDP2 as accelerate does, which shards on GPUs only, to each layer on CPUs."""
    Job(SHARED, tmp_path, processes=2).output()
