"""Generated answers to prompts, with dense attention and with each method."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from msattn.trainer.evaluate.cost import cost
from msattn.trainer.evaluate.methods import ComparedMethods

if TYPE_CHECKING:
    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded


class Case(NamedTuple):
    """A method in a setting; ``attach`` returns the context in which it runs."""

    method: str
    setting: str
    attach: Callable[[], AbstractContextManager["Sparse | None"]]


class Answers(NamedTuple):
    """Generated tokens and text of each prompt, mean seconds of a prompt, peak MiB and ``stats()`` of a method."""

    tokens: list[list[int]]
    texts: list[str]
    seconds: float
    peak_mb: float
    stats: dict[str, Any]

    @property
    def sparsity(self) -> float | None:
        """The share of the visible blocks that was not read; None for routing."""
        return self.stats["sparsity"]

    @property
    def selectivity(self) -> float | None:
        """The share of the visible keys that was read."""
        return self.stats["selectivity"] if self.sparsity is None else 1 - self.sparsity


def cases(loaded: "Loaded", methods: ComparedMethods, sparsities: list[float], probes: list[int] | None = None) -> list[Case]:
    """Returns dense attention, each block selection at ``sparsities``, and each routing with ``probes``.

    Parameters
    ----------
    probes : None: the number that is configured for a routing, or that its artifact records.
    """
    found = [Case("dense", "", nullcontext)]
    for method in methods.block_selections:
        found += [
            Case(method.name, label, partial(method.attach, loaded.model, select))
            for label, select in method.settings(sparsities)
        ]
    for routing in methods.bucket_routings:
        numbers = [routing.probes] if probes is None else probes
        found += [
            Case(routing.name, label, partial(routing.attach, loaded.model, number))
            for label, number in routing.settings(numbers)
        ]
    return found


@torch.inference_mode()
def answer(
    loaded: "Loaded",
    encoded: Sequence[Tensor],
    case: Case,
    max_new_tokens: Sequence[int],
    advance: Callable[[], None],
    complete: Sequence[Callable[[str], bool]] = (),
) -> Answers:
    """Generates greedily up to ``max_new_tokens`` tokens after each prompt ``[1, N]``.

    Parameters
    ----------
    complete : for each prompt, whether an answer's text needs no further tokens; none: answers end by themselves.
    """
    model: Any = loaded.model
    tokenizer = loaded.tokenizer
    tokens, seconds, peaks = [], [], []

    def text_of(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def generate(ids: Tensor, new_tokens: int, complete: Callable[[str], bool] | None = None) -> Tensor:
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        if complete is not None:
            options["stopping_criteria"] = [
                lambda found, scores: torch.tensor([complete(text_of(found[0, ids.shape[1] :]))], device=found.device)
            ]
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    if model.device.type == "cuda":  # not timed: kernels compile at their first call
        with case.attach():
            generate(encoded[0].to(model.device), 2)
    with case.attach() as sparse:
        for ids, new_tokens, enough in zip_longest(encoded, max_new_tokens, complete):
            ids = ids.to(model.device)
            with cost(model.device) as spent:
                output = generate(ids, new_tokens, enough)
            tokens.append(output[0, ids.shape[1] :].tolist())
            seconds.append(spent.seconds)
            peaks.append(spent.peak_mb)
            advance()
        stats = sparse.stats() if sparse else {"sparsity": 0.0, "selectivity": None}
    return Answers(tokens, [text_of(each) for each in tokens], fmean(seconds), max(peaks), stats)
