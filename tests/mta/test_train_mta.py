"""msattn train-mta through the command line: results, resuming, sweeps, refused settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError
from msattn.trainer.mta import block_retrieval
from msattn.trainer.mta.train_mta import load
from tests.running import exit_code, metrics_lines

SMALL = [
    "device=cpu",
    "tracker=none",
    "train.num_workers=0",
    "train.log_every=1",
    "train.warmup_steps=1",
    "train.lr=1e-2",
]
SMALL += [
    "mta.blocks=3",
    "mta.letters=2",
    "mta.hidden_size=16",
    "mta.num_layers=1",
    "mta.test_problems=9",
]
SMALL += ["train.steps=4", "train.batch_size=4", "train.eval_every=2", "train.save_every=2"]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs ``msattn train-mta`` in an empty folder and returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> int:
        return exit_code("train-mta", *SMALL, *overrides)

    return run


def solver(name: str = "base") -> Path:
    return Path("outputs/mta") / name / "solver"


def metrics(name: str = "base") -> dict[str, float]:
    return json.loads((solver(name) / "result.json").read_text())["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["plain", "multi_token"])
def test_the_written_model_has_the_written_accuracy(
    train: Callable[..., int], attention: str
) -> None:
    assert train(f"mta.attention={attention}", "mta.mask=key") == 0
    found, trained = metrics(), load(solver())
    problems = block_retrieval.Problems(compose("train-mta", SMALL).mta, 9, seed=(0, 1))
    figures = block_retrieval.accuracy(trained, problems, batch_size=4)
    assert figures == {
        name: pytest.approx(found[name], rel=1e-5) for name in ("exact_match", "test_loss")
    }
    assert (found["steps"], set(found)) == (
        4,
        {"loss", "first_letter", "exact_match", "test_loss", "steps", "seconds"},
    )
    if attention == "multi_token":
        assert trained.model.model.layers[0].self_attn.mask == "key"
    has_kernel = any(name.endswith("score_kernel") for name, _ in trained.named_parameters())
    assert has_kernel == (attention == "multi_token")
    logged = metrics_lines(Path("outputs/mta/base/runs/solver"))
    assert [line["step"] for line in logged if "exact_match" in line] == [2, 4]


@pytest.mark.slow
def test_a_result_is_replaced_only_on_request(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    before = (solver() / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert train("seed=1") == 2
    assert (
        "solver: an artifact already exists; overwrite=true replaces it" in capsys.readouterr().err
    )
    assert (solver() / "model.safetensors").read_bytes() == before
    assert train("seed=1", "overwrite=true") == 0
    assert (solver() / "model.safetensors").read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mta.attention=multi", "mta.attention=multi: expected plain, multi_token"),
        ("mta.asked=3", "mta.asked=3: expected at most mta.letters=2"),
        ("mta.letters=17", "mta.letters=17: expected at most 16 with mta.attention=multi_token"),
        (
            "mta.hidden_size=24",
            "mta.hidden_size=24: expected mta.num_heads=2 times a head size that is a multiple of "
            "8 up to 256",
        ),
    ],
)
def test_settings_that_cannot_train_are_refused(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert train(override) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not solver().exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", "{}", "a value is needed"),
        ("model.safetensors", "x", "model.safetensors cannot be loaded"),
    ],
)
def test_damaged_results_are_refused(
    train: Callable[..., int], file: str, content: str, message: str
) -> None:
    assert train("train.steps=1") == 0
    (solver() / file).write_text(content)
    with pytest.raises(UserError, match=message):
        load(solver())
