"""Generated answers to prompts, with dense attention and with each method."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.intervals import paired_proportions
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import Difference
from msattn.trainer.evaluate.tasks.timing import cost
from msattn.trainer.models.ends import end_tokens
from msattn.trainer.models.loading import Loaded
from msattn.trainer.serving.attach import Sparse


def read_and_spent(sparse: Sparse | None, seconds: float, peak_mb: float) -> dict[str, Any]:
    """Returns the fields of a row for the cost and for what was read; without ``sparse``, dense
    attention read everything.
    """
    stats = sparse.stats() if sparse else {"sparsity": 0.0}
    sparsity = stats["sparsity"]
    read = {
        "sparsity": sparsity,
        "selectivity": stats["selectivity"] if sparsity is None else 1 - sparsity,
    }
    return {**read, "latency_s": seconds, "peak_memory_mb": peak_mb}


class Answers(NamedTuple):
    """Generated tokens and text of each prompt, and the result of :func:`read_and_spent`, with the
    mean seconds of a prompt.
    """

    tokens: list[list[int]]
    texts: list[str]
    spent: dict[str, Any]


class Question(NamedTuple):
    """A prompt ``ids [1, N]``, the largest number of answer tokens, and a function that says if an
    answer's text is complete.

    Without ``complete`` an answer ends at an end token or at the largest number of tokens.
    """

    ids: Tensor
    max_new_tokens: int
    complete: Callable[[str], bool] | None = None


@torch.inference_mode()
def answer(
    loaded: Loaded,
    questions: Sequence[Question],
    case: MethodSetting,
    advance: Callable[[], None],
    batch_tokens: int = 0,
) -> Answers:
    """Generates answers greedily, to batches of prompts in succession with up to ``batch_tokens``
    tokens, padding included.
    """
    device = loaded.model.device
    if device.type == "cuda":  # not timed: kernels compile at their first call
        with case.attach():
            _generate(loaded, [questions[0]._replace(max_new_tokens=2)])
    tokens: list[list[int]] = []
    seconds, peak = 0.0, 0.0
    with case.attach() as sparse:
        for batch in batches(questions, batch_tokens):
            with cost(device) as measured:
                tokens += _generate(loaded, batch)
            seconds, peak = seconds + measured.seconds, max(peak, measured.peak_mb)
            for _ in batch:
                advance()
        spent = read_and_spent(sparse, seconds / len(questions), peak)
    return Answers(tokens, [_text(loaded, row) for row in tokens], spent)


def batches(questions: Sequence[Question], tokens: int) -> Iterator[list[Question]]:
    """Yields questions in succession with equal ``max_new_tokens``, as many as have ``tokens``
    tokens with padding.
    """
    batch: list[Question] = []
    for question in questions:
        longest = max(prompt.ids.shape[1] for prompt in [*batch, question])
        if batch and (
            batch[0].max_new_tokens != question.max_new_tokens
            or longest * (len(batch) + 1) > tokens
        ):
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _generate(loaded: Loaded, batch: Sequence[Question]) -> list[list[int]]:
    """Returns the new tokens after each prompt, up to an end token or a complete answer; prompts
    are left-padded.
    """
    model: Any = loaded.model
    ends = end_tokens(model)
    padding = ends[0] if ends else 0
    longest = max(question.ids.shape[1] for question in batch)
    ids = torch.cat(
        [
            pad(question.ids, (longest - question.ids.shape[1], 0), value=padding)
            for question in batch
        ]
    )
    mask = torch.cat(
        [
            pad(torch.ones_like(question.ids), (longest - question.ids.shape[1], 0))
            for question in batch
        ]
    )
    options: dict[str, Any] = {
        "max_new_tokens": batch[0].max_new_tokens,
        "do_sample": False,
        "pad_token_id": padding,
    }

    lengths: dict[int, int] = {}  # of the complete answers; later tokens are padding

    def complete(input_ids: Tensor, scores: Any) -> Tensor:
        for row, (question, new) in enumerate(zip(batch, input_ids[:, longest:], strict=True)):
            if (
                row not in lengths
                and question.complete is not None
                and question.complete(_text(loaded, new))
            ):
                lengths[row] = len(new)
        return torch.tensor([row in lengths for row in range(len(batch))], device=input_ids.device)

    if any(question.complete for question in batch):
        options["stopping_criteria"] = [complete]
    generated: Tensor = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), **options
    )
    rows = [
        row[: lengths.get(number)] for number, row in enumerate(generated[:, longest:].tolist())
    ]
    return [[*takewhile(lambda token: token not in ends, row)] for row in rows]


def _text(loaded: Loaded, tokens: Any) -> str:
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def paired_answers(one: EvalRow, other: EvalRow) -> Difference:
    return one.score - other.score, paired_proportions(one.extra["correct"], other.extra["correct"])
