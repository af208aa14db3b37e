"""``eval=ruler``: scores by task, with dense and with sparse attention."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from msattn.trainer import models
from msattn.trainer.config import ModelConfig
from msattn.trainer.config.select import select_config
from msattn.trainer.data.tasks.ruler import Sample
from msattn.trainer.evaluate.compared import Compared, ComparedSelection, MethodSetting
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.tasks import answers, ruler
from msattn.trainer.evaluate.tasks.answers import Question
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.chat import encode_prompt
from tests.data.texts import WORDS, paragraph, write
from tests.evaluate.runs import config, read_rows
from tests.factory import TEMPLATE
from tests.running import exit_code, succeed


@pytest.fixture
def haystack(tmp_path: Path) -> str:
    (tmp_path / "words.txt").write_text(" ".join(WORDS))
    return str(tmp_path / "words.txt")


def test_interval_of_the_ratio_is_of_paired_differences() -> None:
    """A method that loses a tenth of each prompt's score loses exactly that, however much prompts
    differ.
    """
    samples = {name: [Sample("", "", list("abcdefghij"))] * 3 for name in ("vt", "fwe")}
    dense_texts = [" ".join("abcdefghij"[:number]) for number in (9, 5, 2, 8, 4, 2)]
    texts = {"dense": dense_texts, "gate": [text[:-2] for text in dense_texts]}

    def row(method: str, dense: EvalRow | None) -> EvalRow:
        found = answers.Answers([], texts[method], {"sparsity": 0.5})
        return ruler.as_row(
            MethodSetting(method, Setting(), nullcontext), samples, found, 1000, dense
        )

    dense = row("dense", None)
    gate = row("gate", dense)
    assert (dense.score, gate.score) == pytest.approx((0.5, 0.4))
    assert (dense.ratio_to_dense, dense.extra["ratio_interval"]) == (1.0, [1.0, 1.0])
    assert gate.extra["ratio_interval"] == pytest.approx([0.8, 0.8])
    assert gate.extra["scores"]["vt"] == pytest.approx([0.8, 0.4, 0.1])
    assert [(each["answer"], each["correct"]) for each in gate.extra["examples"]] == [
        (texts["gate"][n], False) for n in (0, 3)
    ]
    assert gate.interval is not None
    assert gate.interval[1] - gate.interval[0] > 0.3


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_the_leaderboard_is_one_command(
    haystack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    squad = write(
        tmp_path / "squad.json",
        {"data": [{"paragraphs": [paragraph("A mill.", ("Whose?", ["Anna's", "hers"]))]}]},
    )
    small = [
        "lengths=[1024]",
        "samples=1",
        "tasks=[vt,qa_1]",
        "sparsities=[0.25]",
        "keys=[0.25]",
        f"squad={squad}",
    ]
    methods = ["eval.baselines=[quest]", "eval.routers=[window]", "eval.key_shares=[0.75]"]
    ours = [f"eval.ruler.{each}" for each in (*small, f"haystack={haystack}")]
    succeed("eval", "eval=leaderboard", "tracker=none", "device=cpu", *ours, *methods)
    folder = Path("outputs/tiny/base/eval")
    heading, *lines = (folder / "ruler.md").read_text().splitlines()
    assert heading.startswith("RULER, 2 prompts of 1,024 tokens")
    assert lines[1] == "| method | 0 % | 25 % | 75 % |"
    expected = {"| dense", "| gate and question", "| gate", "| Quest bounds", "| sink and window"}
    assert {line.split(" | ")[0] for line in lines[3:]} >= expected
    assert {"ruler.png", "ruler_grid.svg"} <= {each.name for each in folder.iterdir()}
    assert {"vt", "qa_1"} <= set((folder / "results.csv").read_text().partition("\n")[0].split(","))
    rows = read_rows(folder)
    assert all(
        row["score"] == pytest.approx((row["extra"]["vt"] + row["extra"]["qa_1"]) / 2)
        for row in rows.values()
    )
    assert rows["gate_question, top-k", "sparsity 0.25"]["sparsity"] == pytest.approx(0.25, abs=0.1)


def test_generation_ends_when_the_answer_is_complete() -> None:
    cfg = config(Path("unused"), "unused")
    loaded = models.load(cfg.model, device="cpu")
    ids = ruler.encode(loaded.tokenizer, Sample("a prompt", " begun", []), None)
    (dense,) = Compared([], []).cases(loaded.model, [])
    free = answers.answer(loaded, [Question(ids, 12)], dense, lambda: None)
    third = loaded.tokenizer.decode(free.tokens[0][:3])
    questions = [
        Question(ids, 12, lambda text: text == third),
        Question(ids, 12, lambda text: False),
    ]
    for batch_tokens in (0, 2 * ids.shape[1]):
        stopped = answers.answer(loaded, questions, dense, lambda: None, batch_tokens)
        assert stopped.tokens == [free.tokens[0][:3], free.tokens[0]]


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_batches_get_the_answers_of_single_prompts(sparsity: float | None) -> None:
    loaded = models.load(ModelConfig(name="tiny", path="embedded"), device="cpu")
    gate = ComparedSelection(
        "gate", select_config({"sink_blocks": 0, "local_blocks": 0}), Gate.load("embedded")
    )
    tried = Compared([] if sparsity is None else [gate], []).cases(loaded.model, [sparsity or 0])
    texts = ["Once upon a time there was " + "a river and " * number for number in (90, 20, 55)]
    questions = [Question(encode_prompt(loaded.tokenizer, text, None), 8) for text in texts]
    single, batched = (
        answers.answer(loaded, questions, tried[-1], lambda: None, tokens) for tokens in (0, 4096)
    )
    assert batched.tokens == single.tokens
    # blocks of queries begin elsewhere
    assert batched.spent["sparsity"] == pytest.approx(single.spent["sparsity"], abs=0.05)


def test_batches() -> None:
    questions = [
        Question(torch.zeros(1, length, dtype=torch.long), new)
        for length, new in ((5, 1), (8, 1), (3, 1), (3, 2), (9, 2))
    ]
    assert [len(batch) for batch in answers.batches(questions, 0)] == [1] * 5
    assert [len(batch) for batch in answers.batches(questions, 16)] == [2, 1, 1, 1]
    assert [len(batch) for batch in answers.batches(questions, 24)] == [3, 2]


def test_a_chat_begins_its_reply_with_the_prefix() -> None:
    tokenizer = models.load(config(Path("unused"), "unused").model, device="cpu").tokenizer
    sample = Sample("the question", " The answer is", ["x"])
    assert (
        tokenizer.decode(ruler.encode(tokenizer, sample, None)[0]) == "the question The answer is"
    )
    tokenizer.chat_template = TEMPLATE
    assert (
        tokenizer.decode(ruler.encode(tokenizer, sample, None)[0])
        == "<user>the question\n<assistant>The answer is"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["eval.ruler.lengths=[64]"],
            "eval.ruler.lengths=64: niah_single_1: length=64: the shortest prompt has",
        ),
        (
            ["eval.ruler.haystack=few.txt"],
            "eval.ruler.haystack: the haystack has 2 different words, but 500 are needed",
        ),
        (
            ["eval.ruler.tasks=[qa_3]"],
            "eval.ruler.tasks=qa_3: expected one or more of niah_single_1",
        ),
        (
            ["eval.ruler.tasks=[qa_1]"],
            "eval.ruler.tasks=qa_1: needs a file of questions, eval.ruler.squad=FILE",
        ),
        (["eval.ruler.squad=few.txt"], "eval.ruler.squad=few.txt: not JSON"),
        (
            ["eval.tasks=[recall,ruler]", "eval.ruler.lengths=[500]"],
            "eval.ruler.lengths=500: niah_single_2",
        ),
    ],
)
def test_mistakes_are_one_line(
    changes: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("only words " * 400)
    (tmp_path / "words.txt").write_text(" ".join(WORDS))
    arguments = [
        "eval",
        "eval=ruler",
        "tracker=none",
        "device=cpu",
        "eval.ruler.haystack=words.txt",
        *changes,
    ]
    assert exit_code(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
