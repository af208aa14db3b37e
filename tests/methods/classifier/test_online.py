"""Batches drawn while the classifiers train: their content, the rotation over prompts, and jobs
with `qmodel.source=online`.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from msattn.trainer import artifacts
from msattn.trainer.config import ArtifactsConfig, QModelConfig, TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.distillation import Distiller
from msattn.trainer.methods.classifier.fit_kmeans import fit_kmeans
from msattn.trainer.methods.classifier.online import OnlineBatches, OnlineTargets
from msattn.trainer.methods.classifier.train import train_qmodel
from tests.factory import inputs_of_layers, random_partition, tiny_model
from tests.jobs import Job
from tests.methods.classifier.runs import BUCKETS, configs, write_documents
from tests.training.small import interrupted_after

TOKENS, LONG_RANGE = 60, 12


def batches(
    layers: list[int], num_heads: int = 2, num_prompts: int = 3, **qmodel: Any
) -> OnlineBatches:
    """Returns batches of 8 queries over random prompts, 2 of each of 2 prompts in a round; equal
    arguments, equal batches.
    """
    model = tiny_model()
    torch.manual_seed(1)
    # distinct tokens, so distinct queries
    prompts = torch.stack([torch.randperm(128)[:TOKENS] for _ in range(num_prompts)])
    partition = random_partition(BUCKETS)
    settings: dict[str, Any] = {
        "steps_per_prompt": 2,
        "prompts_at_once": 2,
        "batch_queries": 8,
        "long_range": LONG_RANGE,
    }
    _, cfg = configs(Path(), Path())
    cfg = replace(cfg, qmodel=QModelConfig(source="online", **settings | qmodel))
    chunks: Any = [{"input_ids": prompt} for prompt in prompts]
    return OnlineBatches(OnlineTargets(model, chunks, partition, cfg), layers, num_heads)


def prompt_of(drawn: OnlineBatches, queries: torch.Tensor, layer: int, head: int) -> int:
    """Returns the one prompt in which all ``queries [n, D]`` of a classifier occur."""
    group = 4 // drawn.num_heads
    for number, chunk in enumerate(drawn.source.chunks):
        x = inputs_of_layers(drawn.source.model, chunk["input_ids"][None])[layer]
        known = x.q_nope[0, group * head : group * (head + 1)].half().flatten(0, 1)
        if all((known == query).all(-1).any() for query in queries):
            return number
    raise AssertionError("the queries are not of one prompt")


@pytest.mark.parametrize("num_heads", [2, 4])
def test_a_batch_has_long_range_queries_of_one_prompt_and_their_attention_mass(
    num_heads: int,
) -> None:
    drawn = batches([0, 1], num_heads)
    queries, targets, entropy = drawn([1])
    assert queries.shape == (2, num_heads, 8, 16)
    assert targets.shape == (2, num_heads, 8, BUCKETS)
    group, keys = 4 // num_heads, torch.arange(TOKENS)
    for layer in range(2):
        prompt = {prompt_of(drawn, queries[layer, head], layer, head) for head in range(num_heads)}
        assert len(prompt) == 1
        x = inputs_of_layers(
            drawn.source.model, drawn.source.chunks[prompt.pop()]["input_ids"][None]
        )[layer]
        buckets = drawn.source.partition.assign(layer, x.k_nope, x.k)[0]
        for head in range(num_heads):
            found = 0
            for query_head in range(group * head, group * (head + 1)):
                scores = x.q[0, query_head].double() @ x.k[0, query_head // 2].double().T * x.scale
                scores[:, 0] = -torch.inf  # the sink
                mass = (
                    scores.softmax(-1)
                    @ torch.nn.functional.one_hot(buckets[query_head // 2].long(), BUCKETS).double()
                )
                far = (keys - scores.argmax(-1)).abs() > LONG_RANGE
                # [positions, batch]
                same = (x.q_nope[0, query_head].half()[:, None] == queries[layer, head]).all(-1)
                position, row = same.nonzero(as_tuple=True)
                assert far[position].all()
                # fp16
                torch.testing.assert_close(
                    targets[layer, head, row].double(), mass[position], rtol=0, atol=1e-3
                )
                found += len(row)
            assert found == 8
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(targets.float()).entropy(), rtol=1e-3, atol=1e-3
    )


def test_batches_do_not_depend_on_other_layers_or_on_where_a_run_begins() -> None:
    both, alone = batches([0, 1]), batches([1])
    for number in (0, 1, 5):
        for wide, narrow in zip(both([number]), alone([number]), strict=True):
            assert torch.equal(wide[1:], narrow)
    resumed = batches([1])([6])
    for several, one in zip(alone([5, 6]), resumed, strict=True):
        assert torch.equal(several[:, :, 8:], one)


def test_few_rows_are_repeated_evenly_and_none_are_refused() -> None:
    drawn = batches([1])
    rows = drawn._rows(torch.tensor([2, 1, 100, 0]))
    assert rows[0].bincount().tolist() == [3, 3, 2]
    assert rows[1].min() >= 3
    assert len(rows[1].unique()) == 8
    with pytest.raises(
        UserError,
        match=r"qmodel.min_distance=59: some head has no query with keys that far away in a prompt",
    ):
        batches([1], min_distance=59, causal=True)([0])


def online(text: Path, outputs: Path, kmeans: Path) -> TrainQModelConfig:
    """Returns the configuration of a small online training."""
    _, cfg = configs(text, outputs)
    qmodel = replace(cfg.qmodel, source="online", steps_per_prompt=3, prompts_at_once=2)
    return replace(cfg, qmodel=qmodel, artifacts=ArtifactsConfig(kmeans=str(kmeans)))


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> TrainQModelConfig:
    folder = tmp_path_factory.mktemp("online")
    text = write_documents(folder / "text")
    return online(text, folder, fit_kmeans(configs(text, folder)[0]))


@pytest.fixture(scope="module")
def whole(cfg: TrainQModelConfig) -> dict[str, Any]:
    """The manifest of an uninterrupted run."""
    return artifacts.read(train_qmodel(cfg)).manifest


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_bits_of_another_grouping(
    cfg: TrainQModelConfig, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = whole["metrics"]
    for probes in (1, 2, 4):
        assert (
            metrics[f"recall_kmeans@{probes}"]
            < metrics[f"recall_qmodel@{probes}"]
            <= metrics[f"recall_oracle@{probes}"]
        )
    cached = Path(cfg.outputs) / "toy" / "base" / "runs" / "qmodel" / "cache"
    assert {path.stem.partition("_")[0] for path in cached.glob("*.safetensors")} == {"heldout"}

    single = replace(
        cfg, outputs=str(tmp_path), resume=True, qmodel=replace(cfg.qmodel, layers_at_once=1)
    )
    with monkeypatch.context() as patch:
        # within a round of the second layer
        patch.setattr(Distiller, "forward", interrupted_after(45, Distiller.forward))
        with pytest.raises(KeyboardInterrupt):
            train_qmodel(single)
    with pytest.raises(UserError, match=r"layers has qmodel.steps_per_prompt=\d+, not 2;"):
        train_qmodel(replace(single, qmodel=replace(single.qmodel, steps_per_prompt=2)))
    # fails if a layer restarts
    monkeypatch.setattr(Distiller, "forward", interrupted_after(20, Distiller.forward))
    assert artifacts.read(train_qmodel(single)).manifest["content_hash"] == whole["content_hash"]


JOB = """
import sys
from pathlib import Path
from msattn.trainer.methods.classifier.train import train_qmodel
from tests.methods.classifier.test_online import online

train_qmodel(online(*map(Path, sys.argv[1:])))
"""


@pytest.mark.slow
def test_two_ranks_give_the_result_of_one_process(
    cfg: TrainQModelConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(JOB, tmp_path, cfg.data.path, tmp_path, cfg.artifacts.kmeans, processes=2)
    printed = job.output()
    assert [line for line in printed.splitlines() if line.startswith("layers ")] == [
        "layers 0: 2 classifiers train at once"
    ]
    assert (
        artifacts.read(tmp_path / "toy" / "base" / "qmodel").manifest["content_hash"]
        == whole["content_hash"]
    )


def test_settings_that_do_not_fit_are_refused(
    cfg: TrainQModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"train.compile=True: expected false with qmodel.source=online"
    ):
        replace(cfg, train=replace(cfg.train, compile=True))
    with pytest.raises(UserError, match=r"qmodel.source=disk: .*cache.*online"):
        replace(cfg.qmodel, source="disk")
    monkeypatch.setattr("msattn.trainer.config.text_files.free_memory", lambda: 2**40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    message = (
        r"qmodel.steps_per_prompt=3: beside a pass of the model, training one layer takes "
        r".* lower it or qmodel.prompts"
    )
    with pytest.raises(UserError, match=message):
        train_qmodel(replace(cfg, name="second"))
