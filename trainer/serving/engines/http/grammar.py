"""Answers that follow a JSON schema (``response_format``), by llguidance. Needs the extra
``grammar``.
"""

from collections.abc import Collection
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.serving.engines.http.answers import ApiError

# As Python's json.dumps: with free white space, small models repeat it to the end.
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PARAM = "response_format"


class Grammars:
    """Makes the grammars of one model, whose answers end with one of ``ends``."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)

    @cached_property
    def _prepared(self) -> Any:
        """llguidance's tokenizer, which takes a second to make."""
        if find_spec("llguidance") is None:
            raise ApiError(
                400,
                f"{PARAM}: this server lacks llguidance; pip install 'msattn[grammar]'",
                param=PARAM,
            )
        if not self._ends:
            raise ApiError(400, f"{PARAM}: the model has no token that ends a text", param=PARAM)
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        except ValueError as error:  # a tokenizer without the fast form
            raise ApiError(400, f"{PARAM}: {error}", param=PARAM) from error

    def of_schema(self, schema: dict[str, Any]) -> "JsonGrammar":
        """Returns the grammar of a JSON schema; ApiError for one that is not valid, or has parts
        that are not supported.
        """
        tokenizer = self._prepared
        from llguidance import LLMatcher

        matcher = LLMatcher(
            tokenizer, LLMatcher.grammar_from_json_schema(schema, overrides=FORM), log_level=0
        )
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise ApiError(
                400, f"{PARAM}.json_schema.schema: {reason}", param=f"{PARAM}.json_schema.schema"
            )
        return JsonGrammar(matcher, self._ends, self._vocabulary)


class JsonGrammar:
    """The state of one answer."""

    def __init__(self, matcher: Any, ends: list[int], vocabulary: int) -> None:
        self._matcher, self._ends, self._vocabulary = matcher, ends, vocabulary

    @property
    def failed(self) -> bool:
        """True if the grammar got too complex, or no token can go on; such an answer ends at
        once.
        """
        return self._matcher.is_error()

    def allowed(self) -> Tensor:
        """Returns the tokens that may come next."""
        if not self._matcher.is_stopped():
            mask = torch.frombuffer(
                bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8
            ).bool()
            if not self.failed:
                return mask
        ends = torch.zeros(self._vocabulary, dtype=torch.bool)
        ends[self._ends] = True
        return ends

    def accept(self, token: int) -> None:
        """Goes on to the state after ``token``."""
        self._matcher.consume_token(token)
