"""Choice of new tokens, for each request by its own parameters and random numbers.

:class:`Sampler` stands in for the logits processors of transformers' manager, which has one stream
of random numbers for all requests, and neither biases nor log-probabilities of other tokens. It
runs inside the pass of the model, which may be a CUDA graph, so its tensors keep their addresses.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.serving.engines.http.answers import Logprobs
from msattn.trainer.serving.engines.http.grammar import JsonGrammar

# Below this temperature, a token whose logit is 0.001 less than the greatest has e^-100 of its
# probability, so sampling takes the likeliest token but for ties. vLLM has the same limit. Below
# about 1e-37 logits become infinite in float32.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20  # likeliest tokens of which a request may ask for the log-probabilities
DRAWS = 2**24  # random numbers in [0, 1) that float32 holds exactly


@dataclass(eq=False)
class Sampling:
    """The parameters of one answer, and its state: random numbers, tokens so far, grammar."""

    seed: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: JsonGrammar | None = None
    logprobs: int | None = None  # number of likeliest tokens to report; None: nothing is reported
    stop: Sequence[str] = ()  # strings that end the answer before them
    ends: Collection[int] = ()  # tokens that end the answer

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._bias: Tensor | None = None
        self._seen: set[int] = set()

    def __deepcopy__(self, memo: object) -> "Sampling":
        # transformers copies the parameters of a request that it sets back, whose answer goes on
        return self

    def numbers(self, vocabulary: int) -> tuple[float, ...]:
        """Returns temperature, top_p, top_k, min_p and a new random number, for the next token."""
        draw = self._random.randrange(DRAWS) / DRAWS
        if self.temperature < GREEDY_BELOW:
            return 1.0, 1.0, 1.0, 0.0, draw
        return self.temperature, self.top_p, float(self.top_k or vocabulary), self.min_p, draw

    def bias(self, vocabulary: int) -> Tensor | None:
        """Returns what is added to the logits of the next token, float32 ``[V]``; None for
        nothing.
        """
        if self._bias is None and (
            self.logit_bias or self.presence_penalty or self.frequency_penalty
        ):
            self._bias = torch.zeros(vocabulary)
            self._bias[list(self.logit_bias)] = torch.tensor(
                list(self.logit_bias.values()), dtype=torch.float32
            )
        if self.grammar is None:
            return self._bias
        bias = torch.zeros(vocabulary) if self._bias is None else self._bias
        return bias.masked_fill(~self.grammar.allowed(), -torch.inf)

    def accept(self, token: int) -> None:
        """Counts a new token."""
        if self._bias is not None:
            self._bias[token] -= self.frequency_penalty + (
                0 if token in self._seen else self.presence_penalty
            )
            self._seen.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)


class Sampler:
    """Chooses the tokens of a pass; the methods without a docstring are those that the manager
    calls on its own list.
    """

    tensors_required, do_processing = 0, True

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.samplings: list[Sampling] = []  # those of the requests with a new token, by row
        self._numbers = torch.ones(5, rows, 1, device=device)
        self._bias = torch.zeros(rows, vocabulary, device=device)
        self._biased: set[int] = set()  # rows that are not 0
        best = min(MAX_LOGPROBS, vocabulary)
        self._values = torch.zeros(rows, best, device=device)
        self._tokens = torch.zeros(rows, best, device=device).long()
        self._chosen = torch.zeros(rows, device=device)

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        pass

    def fill_defaults(self, defaults: Tensor) -> None:
        pass

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Tensor) -> Tensor:
        states = [each.state for each in requests_in_batch if each.has_new_token]
        # none: warm-up
        self.samplings = [
            each.logit_processor_kwargs.get("sampling") or Sampling("") for each in states
        ]
        if not self.samplings:
            return arg_storage
        numbers = torch.tensor([each.numbers(self.vocabulary) for each in self.samplings]).T
        self._numbers[:, : len(states), 0] = numbers.to(self._bias.device)
        for row, sampling in enumerate(self.samplings):
            bias = sampling.bias(self.vocabulary)
            if bias is not None:
                self._bias[row] = bias.to(self._bias.device)
                self._biased.add(row)
            elif row in self._biased:
                self._bias[row] = 0
                self._biased.remove(row)
        if self._bias.is_cuda:  # the pass runs in another stream
            torch.cuda.current_stream(self._bias.device).synchronize()
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, arguments: Tensor) -> Tensor:
        """Returns logits of 0 for the token that each row has drawn, and -inf for all others."""
        rows = len(scores)
        temperature, top_p, top_k, min_p, draw = self._numbers[:, :rows]
        logprobs = scores.log_softmax(-1)
        values, tokens = logprobs.topk(self._values.shape[1])
        self._values[:rows], self._tokens[:rows] = values, tokens

        ordered, order = ((scores + self._bias[:rows]) / temperature).sort(
            descending=True, stable=True
        )
        place = torch.arange(scores.shape[1], device=scores.device)
        p = ordered.masked_fill(place >= top_k, -torch.inf).softmax(-1)
        kept = (p.cumsum(-1) - p < top_p) & (p >= min_p * p[:, :1]) & (p > 0)
        kept[:, 0] = True
        mass = (p * kept).cumsum(-1)
        drawn = (
            (mass <= draw * mass[:, -1:])
            .sum(-1, keepdim=True)
            .minimum(kept.sum(-1, keepdim=True) - 1)
        )
        token = order.gather(1, drawn)
        self._chosen[:rows] = logprobs.gather(1, token)[:, 0]
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def collect(
        self, update: Callable[[], tuple[Any, list[int], Any]]
    ) -> tuple[Any, list[int], list[Logprobs | None]]:
        """Stands in for the manager's ``prepare_batch_update``: counts the new tokens, and adds
        their log-probabilities.
        """
        requests, tokens, _ = update()
        reports: list[Logprobs | None] = [None] * len(tokens)
        asked = any(each.logprobs is not None for each in self.samplings)
        chosen, best, values = (
            x.tolist() if asked else [] for x in (self._chosen, self._tokens, self._values)
        )
        for row, (sampling, token) in enumerate(zip(self.samplings, tokens, strict=False)):
            sampling.accept(token)
            if sampling.logprobs is not None:
                likeliest = [*zip(best[row], values[row], strict=True)][: sampling.logprobs]
                reports[row] = Logprobs(token, chosen[row], likeliest)
        self.samplings = []
        return requests, tokens, reports
