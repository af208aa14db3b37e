"""conf/ against its schema: YAML files parse, every key has a default and a comment, bad values are refused by name."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from msattn.trainer import config as schemas
from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.commands.keys import keys_of
from msattn.trainer.config import ModelPresets, SelectConfig, known_keys, nearest
from msattn.trainer.config.model import packaged_models
from msattn.trainer.errors import UserError

CONF = Path(__file__).parents[2] / "conf"
MODELS = packaged_models()
WITH_A_MODEL = [name for name, command in COMMANDS.items() if issubclass(command.schema, schemas.RunConfig)]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def nested_keys(node: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in node.items():
        found.add(prefix + key)
        if isinstance(value, dict) and prefix + key not in ("model.architecture", "model.rope_scaling"):
            found |= nested_keys(value, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONF)))
def test_every_yaml_parses_and_starts_with_a_comment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    assert text.startswith("#")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_explained_by_a_comment(command: str) -> None:
    known = keys_of(command, whole="select").keys
    assert len(known) > 10
    assert not [name for name, key in known.items() if not key.comment]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_name_every_key(command: str) -> None:
    """A key that is missing from conf/ could not be overridden on the command line."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from omegaconf import OmegaConf

    assert compose(command)
    with initialize_config_module("msattn.conf", version_base="1.3"):
        node = OmegaConf.to_container(hydra_compose(COMMANDS[command].config))
    assert isinstance(node, dict)
    known = set(known_keys(COMMANDS[command].schema))
    if "select" in node:
        known -= {f"select.{key}" for key in ("threshold", "mass", "tokens", "shares")}  # of policies that are no default
    assert nested_keys(node) == known


@pytest.mark.parametrize("command", WITH_A_MODEL)
def test_defaults_need_nothing(command: str) -> None:
    cfg = compose(command)
    assert (cfg.model.name, cfg.data.source) == ("tiny", "stdlib")


@pytest.mark.parametrize("model", MODELS)
def test_models_carry_their_architecture(model: str) -> None:
    cfg = compose("train-gate", [f"model={model}", "model.init=random"])
    assert cfg.model.name == model
    shape = cfg.model.architecture
    assert shape is not None
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0
    assert cfg.data.seq_len <= shape["max_position_embeddings"]
    from transformers import AutoConfig

    assert AutoConfig.for_model(**shape).to_dict()["num_hidden_layers"] == shape["num_hidden_layers"]


@pytest.mark.parametrize("presets", options("model/presets"))
def test_presets_are_complete(presets: str) -> None:
    given = yaml.safe_load((CONF / f"model/presets/{presets}.yaml").read_text())
    inherited = yaml.safe_load((CONF / "model/presets/long.yaml").read_text()) if "defaults" in given else {}
    assert {*given, *inherited} - {"defaults"} == {item.name for item in fields(ModelPresets)}


@pytest.mark.slow
@pytest.mark.parametrize("option", options("select"))
def test_every_selection_composes(option: str) -> None:
    cfg = compose("eval", [f"select={option}", "select.sink_blocks=2"])
    assert isinstance(cfg, schemas.EvalRunConfig)
    assert option in (cfg.select.policy, cfg.select.scores)
    assert cfg.select == SelectConfig(cfg.select.policy, scores=cfg.select.scores, sink_blocks=2)


@pytest.mark.parametrize("group", ["data", "gate", "kmeans", "qmodel", "mta", "eval", "train", "tracker", "bench"])
def test_every_option_composes(group: str) -> None:
    owners = {"kmeans": "fit-kmeans", "qmodel": "train-qmodel", "mta": "train-mta", "eval": "eval", "bench": "bench"}
    command = owners.get(group, "train-gate")
    for option in options(group):
        path = ["data.path=some/file.txt"] if option in ("text", "hub") else []
        whole = ["select.sparsity=0"] if option in ("finetune", "scratch") else []
        assert compose("finetune" if whole else command, [f"{group}={option}", *path, *whole])


@pytest.mark.parametrize(
    ("command", "override", "says"),
    [
        ("train-gate", "gate.block_size=48", "gate.block_size=48: a power of two"),
        ("train-gate", "data.seq_len=32", "gate.block_size=64: at most data.seq_len=32"),
        ("train-gate", "gate.loss=mze", "did you mean mse?"),
        ("train-gate", "gate.qk_norm=true", "gate.qk_norm=True: accepted with gate.phase=decode alone"),
        ("train-gate", "gate.q_pool=[avg,avg]", "each once"),
        ("train-gate", "train.steps=many", "train.steps='many': accepted is an integer"),
        ("train-gate", "train.micro_batch_size=3", "a multiple of train.micro_batch_size=3"),
        ("train-gate", "name=a/b", "name=a/b: a folder name"),
        ("train-gate", "+train.stepz=3", "unknown key train.stepz (did you mean train.steps?)"),
        ("train-gate", "~model.architecture", "model.init=random"),
        ("eval", "select.sparsity=1.0", "select.sparsity=1.0: in [0, 1)"),
        ("eval", "eval.perplexity.sparsities=[0.5,-0.1]", "each in [0, 1)"),
        ("eval", "eval.tasks=[neddle]", "did you mean needle?"),
        ("eval", "keys=0.7", "keys=0.7: null, or in [0.001, 0.5]"),
        ("eval", "eval.needle.keys=[0]", "eval.needle.keys=[0.0]: each in [0.001, 0.5]"),
        ("generate", "keys=0.05 probes=2", "keys=0.05: accepted is null with probes=2"),
        ("bench", "op=bucket_mas", "did you mean bucket_mass?"),
        ("bench", "bench.lengths=[0]", "bench.lengths=[0]: null, or each in [1, 1e9]"),
        ("bench", "bench.heads=[8,3]", "the first a multiple of the second"),
        ("bench", "bench.head_size=100", "a multiple of 8 up to 256"),
        ("bench", "bench.queries=[17]", "each in [1, 16]"),
        ("bench", "bench.kernels=[3x33]", "of 1 to 32 queries and keys"),
        ("bench", "bench.kernels=[3,x3]", "each as in 6x11"),
        ("bench", "bench.dtype=float64", "accepted are auto, float32"),
        ("bench", "op=merge_states bench.direction=backward", "merge_states has no backward pass"),
        ("bench", "op=conv_attention bench.softcap=50", "conv_attention cannot cap scores"),
    ],
)
def test_bad_values_are_named(command: str, override: str, says: str) -> None:
    extra = ["model.init=random"] if "architecture" in override else []
    with pytest.raises(UserError) as caught:
        compose(command, [*override.split(), *extra])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_known_keys_reach_the_leaves() -> None:
    keys = known_keys(schemas.EvalRunConfig)
    assert {"model.presets.recent", "eval.needle.depths", "artifacts.gate", "overwrite"} <= set(keys)
    assert nearest("eval.needel.depths", keys) == " (did you mean eval.needle.depths?)"
    assert nearest("qwertyuiop", keys) == ""


def test_every_schema_is_frozen() -> None:
    classes = [c for c in vars(schemas).values() if isinstance(c, type) and is_dataclass(c)]
    assert len(classes) > 10
    assert all(c.__dataclass_params__.frozen for c in classes)  # pyrefly: ignore[missing-attribute]
