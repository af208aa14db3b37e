"""conf/ against its schema: YAML files parse, every key has a help text, bad values are refused by
name.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import yaml

from msattn.trainer import config as schemas
from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.commands.keys import CONF
from msattn.trainer.config import SelectConfig, defaults, known_keys, leaves, nearest
from msattn.trainer.config.model import packaged_models
from msattn.trainer.errors import UserError

WITH_A_MODEL = [
    name for name, command in COMMANDS.items() if issubclass(command.schema, schemas.RunConfig)
]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_every_yaml_parses_and_starts_with_a_comment() -> None:
    for path in CONF.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert isinstance(yaml.safe_load(text) or {}, dict)
        assert text.startswith("#"), path


def test_every_key_has_a_help_text_and_a_frozen_schema() -> None:
    for schema in (*(command.schema for command in COMMANDS.values()), SelectConfig):
        values = {key: value for key, value in defaults(schema).items() if key != "select"}
        keys = list(leaves(schema, values))
        assert len(keys) > 5
        assert all(len(item.metadata["help"]) > 5 for _, item, _ in keys)
        nested = [item.type for item in fields(schema) if is_dataclass(item.type)]
        assert all(kind.__dataclass_params__.frozen for kind in [schema, *nested])  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize("command", WITH_A_MODEL)
def test_defaults_need_nothing(command: str) -> None:
    cfg = compose(command)
    assert (cfg.model.name, cfg.data.source) == ("tiny", "stdlib")


@pytest.mark.parametrize("model", packaged_models())
def test_models_carry_their_architecture(model: str) -> None:
    cfg = compose("train-gate", [f"model={model}", "model.init=random"])
    assert cfg.model.name == model
    shape = cfg.model.architecture
    assert shape is not None
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0
    assert cfg.data.seq_len <= shape["max_position_embeddings"]
    from transformers import AutoConfig

    assert (
        AutoConfig.for_model(**shape).to_dict()["num_hidden_layers"] == shape["num_hidden_layers"]
    )


def test_sizes_follow_the_model() -> None:
    tiny, llama = (compose("eval", [f"model={m}"]) for m in ("tiny", "llama3"))
    assert (tiny.model.presets.probes, tiny.model.presets.recent, tiny.eval.needle.lengths) == (
        2,
        256,
        [4096],
    )
    assert (llama.model.presets.probes, llama.model.presets.recent, llama.eval.needle.lengths) == (
        32,
        2047,
        [65536],
    )
    assert llama.eval.needle.probes == [0, 4, 16, 32]
    assert llama.model.path == "meta-llama/Llama-3.1-8B"
    assert llama.data.needles is False, "held-out text is read as it is"


@pytest.mark.parametrize(
    "group", ["data", "gate", "kmeans", "qmodel", "mta", "eval", "train", "tracker", "bench"]
)
def test_every_option_composes(group: str) -> None:
    owners = {
        "kmeans": "fit-kmeans",
        "qmodel": "train-qmodel",
        "mta": "train-mta",
        "eval": "eval",
        "bench": "bench",
    }
    command = owners.get(group, "train-gate")
    for option in options(group):
        path = ["data.path=some/file.txt"] if option in ("text", "hub") else []
        whole = ["select.sparsity=0"] if option in ("finetune", "scratch") else []
        assert compose("finetune" if whole else command, [f"{group}={option}", *path, *whole])


@pytest.mark.parametrize(
    ("command", "override", "says"),
    [
        (
            "eval",
            "eval.baselines=quest",
            "vertical_slash, xattention; written as eval.baselines=[quest]",
        ),
        ("eval", "eval.baselines=qest", "vertical_slash, xattention (did you mean quest?)"),
        (
            "finetune",
            "artifacts.gate=embedded select.scores=gate_question",
            "select.scores=gate_question: finetune trains with gate",
        ),
        (
            "eval",
            "select=quest",
            "select.scores=quest: eval measures gates and the scores of eval.baselines=[quest]",
        ),
        (
            "eval",
            "artifacts.qmodel=quest",
            "artifacts.qmodel=quest: eval measures the routers of eval.routers=[quest]",
        ),
        ("train-gate", "data.seq_len=32", "gate.block_size=64: expected at most data.seq_len=32"),
        (
            "train-gate",
            "gate.loss=mze",
            "gate.loss=mze: expected mse, kl, smooth_l1 (did you mean mse?)",
        ),
        (
            "train-gate",
            "gate.qk_norm=true",
            "gate.qk_norm=True: allowed only with gate.phase=decode",
        ),
        (
            "train-gate",
            "gate.q_pool=[avg,avg]",
            "gate.q_pool=['avg', 'avg']: expected one or more of avg, max, min, each once",
        ),
        ("train-gate", "train.steps=0", "train.steps=0: expected an integer in [1, 1e7]"),
        ("train-gate", "train.steps=true", "train.steps=True: expected an integer in [1, 1e7]"),
        ("train-gate", "overwrite=1", "overwrite=1: expected true or false"),
        ("train-gate", "train.lr=inf", "train.lr=inf: expected a number in (0, 1000]"),
        (
            "train-gate",
            "train.micro_batch_size=3",
            "train.batch_size=4: expected a multiple of train.micro_batch_size=3",
        ),
        ("train-gate", "name=a/b", "name=a/b: expected a folder name"),
        ("train-gate", "outputs=", "outputs='': expected a folder"),
        ("train-gate", "data.path=book.txt", "data.path=book.txt: data=stdlib reads no files"),
        ("train-gate", "~model.name", "model.name=???: a value is needed"),
        (
            "train-gate",
            "~model.architecture model.init=random",
            "model.init=random: random needs model.architecture",
        ),
        ("serve", "server=3", "server=3: this is a section"),
        ("eval", "eval.tasks=[neddle]", "(did you mean needle?)"),
        ("eval", "probes=-1", "probes=-1: expected an integer in [0, 1e6], or null"),
        (
            "eval",
            "eval.needle.keys=[0]",
            "eval.needle.keys=[0]: expected a list, each a number in [0.001, 0.5]",
        ),
        (
            "train-gate",
            "gate.phase=decode gate.recent=4096",
            "gate.recent=4096: expected gate.sink + gate.recent below",
        ),
        ("serve", "chat=true", "chat=True: expected null"),
        (
            "serve",
            "dense=true artifacts.gate=embedded",
            "dense=True: expected false with artifacts.gate",
        ),
        ("generate", "keys=0.05 probes=2", "keys=0.05: probes=2 is given too"),
        (
            "generate",
            "keys=0.7",
            "keys=0.7: expected null, a share in [0.001, 0.5], or a whole number of keys",
        ),
        ("generate", "threshold=0.1 keys=64", "threshold=0.1: keys=64 is given too"),
        (
            "train-qmodel",
            "train.compile=true qmodel.source=online",
            "train.compile=True: expected false",
        ),
        (
            "bench",
            "bench.lengths=[0]",
            "bench.lengths=[0]: expected one or more, each an integer in [1, 1e9], or null",
        ),
        (
            "bench",
            "bench.queries=[]",
            "bench.queries=[]: expected one or more, each an integer in [1, 16]",
        ),
        ("bench", "bench.heads=[8,3]", "the first a multiple of the second"),
        ("bench", "bench.kernels=[3x33]", "of 1 to 32 queries and keys"),
        ("bench", "op=merge_states bench.direction=backward", "merge_states has no backward pass"),
        ("bench", "op=conv_attention bench.softcap=50", "conv_attention cannot cap scores"),
        (
            "bench",
            "op=flash_decode bench.fp8=true",
            "bench.fp8=True: flash_decode reads none; paged",
        ),
    ],
)
def test_bad_values_are_named(command: str, override: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(command, override.split())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_integers_stand_for_numbers_and_text() -> None:
    cfg = compose("train-gate", ["name=7", "train.lr=1"])
    assert (cfg.name, cfg.train.lr) == ("7", 1.0)
    select = schemas.SelectConfig("topk", sparsity=Fraction(1, 2), sink_blocks=np.int64(3))
    assert [type(value) for value in (select.sparsity, select.sink_blocks)] == [float, int]  # pyrefly: ignore


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schemas.GateConfig(blocksize=64),  # pyrefly: ignore[unexpected-keyword]
            r"^unknown key gate.blocksize \(did you mean gate.block_size\?\)$",
        ),
        (
            lambda: replace(schemas.GateConfig(), hidden="9"),
            r"^gate.hidden='9': expected an integer in \[2, 16384\], or null$",
        ),
        (
            lambda: schemas.ModelPresets(recent=0),
            r"^model.presets.recent=0: expected an integer in \[1, 1e9\]$",
        ),
        (
            lambda: schemas.GateConfig(key_block_size=128),
            r"^gate\.key_block_size=128: expected gate\.block_size=64 or a part of it$",
        ),
        (
            lambda: schemas.GateConfig(phase="decode", key_block_size=16),
            r"^gate\.key_block_size=16: allowed only with gate\.phase=prefill$",
        ),
    ],
)
def test_dataclasses_check_what_python_gives_them(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_an_instance_changes_no_defaults() -> None:
    assert schemas.GateConfig().q_pool is not schemas.GateConfig().q_pool


@pytest.mark.parametrize(("length", "distance"), [(4096, 256), (512, 128), (2, 0)])
def test_long_range_queries_exist_in_short_chunks(length: int, distance: int) -> None:
    cfg = compose("train-qmodel", [f"data.seq_len={length}"])
    assert cfg.qmodel.long_range == distance


def test_known_keys_reach_the_leaves() -> None:
    keys = known_keys(schemas.EvalRunConfig)
    assert {
        "model.presets.recent",
        "eval.needle.depths",
        "artifacts.gate",
        "overwrite",
        "select.mass",
    } <= set(keys)
    assert len(keys) == len(set(keys)), "policies share keys"
    assert nearest("eval.needel.depths", keys) == " (did you mean eval.needle.depths?)"
    assert nearest("qwertyuiop", keys) == ""
