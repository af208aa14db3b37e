"""--help and msattn help: order, explanations and choices from the schema, width, topics and their
nearest names.
"""

import re

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import COMMANDS, imported
from msattn.trainer.commands.keys import CONF, first_sentence, keys_of
from msattn.trainer.config import BASELINES, POLICIES
from msattn.trainer.errors import UserError
from tests.commands.conftest import Run


def test_every_command_has_its_job() -> None:
    """Jobs are named by strings, which no import checks."""
    for command in COMMANDS.values():
        assert callable(imported(command.job))
        assert command.after_sweep is None or callable(imported(command.after_sweep))


@pytest.mark.slow
def test_the_first_keys_of_a_command_are_its_own() -> None:
    for command in COMMANDS:
        known = keys_of(command)
        assert set(COMMANDS[command].first.split()) <= {*known.groups, *known.keys}


def test_help_of_a_command(msattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = msattn("train-gate", "--help")
    assert code == 0
    order = [
        "Usage: msattn train-gate",
        "Options:",
        "--multirun",
        "Main keys, with defaults for model=tiny:",
        "model=tiny",
    ]
    order += ["gate.loss=kl", "data=OPTION, by default by_model:", "Other keys", "gate.skip_rows=0"]
    places = [out.index(part) for part in order]
    assert places == sorted(places)
    assert re.search(r"  hub +A dataset of the Hugging Face Hub, streamed\.\n", out)
    assert "${" not in out, "interpolations are resolved"
    assert max(map(len, out.splitlines())) < 80


@pytest.mark.slow
def test_help_leaves_out_what_a_command_does_not_use(msattn: Run) -> None:
    """Commands that answer prompts read no text and write no artifacts."""
    topics = [msattn("help", topic)[1] for topic in ("data", "data.path", "experiment", "resume")]
    for command in ("generate", "serve"):
        out = msattn(command, "--help")[1]
        assert "select=OPTION" in out
        assert not re.search(
            r"^ {0,2}(data|experiment|overwrite|resume)[.=]", out, flags=re.MULTILINE
        )
        assert not [topic for topic in topics if f"msattn {command} --help" in topic]


@pytest.mark.slow
def test_a_command_lists_the_selections_that_it_can_use(msattn: Run) -> None:
    """Each of the others is refused, and the page of the group says by which commands."""
    options = {
        command: keys_of(command).groups["select"].options.keys()
        for command in ("eval", "generate", "serve", "finetune")
    }
    assert options["eval"] == {*POLICIES}
    assert options["generate"] == {*POLICIES, *BASELINES} - {"a_shape"}
    assert options["generate"] - options["serve"] == {"multiscale"}
    assert options["finetune"] == {"topk", "multiscale"}
    for command, refused in (
        ("eval", "scores=quest"),
        ("generate", "scores=a_shape"),
        ("serve", "policy=multiscale"),
        ("finetune", "scores=quest"),
    ):
        with pytest.raises(UserError, match=f"^select.{refused}: "):
            compose(command, [f"select={refused.partition('=')[2]}", "artifacts.gate=embedded"])
    for command, scores in (
        ("generate", "gate_question"),
        ("finetune", "gate"),
        ("eval", "gate_question"),
    ):
        assert {
            compose(command, [f"select={each}"]).select.scores for each in ("topk", "multiscale")
        } == {scores}
    shown = " ".join(msattn("help", "select")[1].split())
    assert "by default calibrated in msattn eval" in shown
    assert "(Quest, Tang et al. 2024). Not in eval, finetune." in shown
    assert "a_shape " not in shown.partition("Keys, ")[0]


def test_a_section_and_a_key(msattn: Run) -> None:
    assert "eval.needle.samples=8" in msattn("help", "eval.needle")[1]
    out = msattn("help", "gate.heads")[1]
    assert "default      query in msattn train-gate\n" in out
    assert "choices      query, kv\n" in out
    assert "msattn train-gate --help" in out


def test_a_command_is_explained_as_by_its_help(msattn: Run) -> None:
    assert msattn("help", "fit-kmeans") == msattn("fit-kmeans", "--help")
    assert msattn("help", "doctor") == msattn("doctor", "--help")


@pytest.mark.parametrize(
    ("topic", "near"), [("gte.heads", "gate.heads"), ("trian-gate", "train-gate")]
)
def test_unknown_topics_name_the_nearest(msattn: Run, topic: str, near: str) -> None:
    assert msattn("help", topic) == (
        2,
        "",
        f"msattn: help {topic}: no command, group or key has this name (did you mean {near}?)\n",
    )


def test_every_option_has_an_explanation() -> None:
    for path in CONF.glob("*/**/*.yaml"):
        assert 10 < len(first_sentence(str(path.parent.relative_to(CONF)), path.stem)) < 260, path
