"""Hostile arguments of ``generate`` of an attached model."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.errors import UserError
from tests.adversary.attached import EVERYTHING, LENGTH, VOCABULARY, attached, model
from tests.adversary.passes import PHASES, Inputs, cache_of, with_id
from tests.adversary.tries import Tries
from tests.factory import random_tokens, tiny_model

pytestmark = [pytest.mark.area("inputs of attached models"), pytest.mark.filterwarnings("ignore")]

SETTINGS: list[dict[str, Any]] = [
    *(
        {"cache_implementation": each}
        for each in ("static", "offloaded", "offloaded_static", "dynamic", "quantized", "nonsense")
    ),
    *({"num_beams": n} for n in (0, -1, 2, 3)),
    *({"num_return_sequences": n} for n in (0, 2, -1)),
    *({"max_new_tokens": n} for n in (0, 1, -1)),
    {"max_length": 1},
    {"min_new_tokens": 50},
    *({"use_cache": each} for each in (False, None)),
    *({"prompt_lookup_num_tokens": n} for n in (0, 2, 50)),
    {"assistant_model": "self"},
    {"assistant_model": "other vocabulary"},
    {"output_attentions": True, "return_dict_in_generate": True},
    {"output_hidden_states": True, "return_dict_in_generate": True},
    *({"past_key_values": each} for each in ("as long", "longer", "empty", "other batch", "of three layers", "list")),
    *(
        {"attention_mask": each}
        for each in ("short", "long", "right padding", "a hole", "zeros", "3D", "one row", "float", "none")
    ),
    *({"input_ids": each} for each in ("empty", "no rows", "vector", "float", "negative", "large", "none")),
    *({"inputs_embeds": each} for each in ("too", "only", "of other width")),
    {"position_ids": "short"},
    {"do_sample": True, "temperature": -1.0},
    {"do_sample": True, "top_p": 2.0},
    {"prefill_chunk_size": 7},
    {"guidance_scale": 2.0},
    {"low_memory": True},
]


def arguments(setting: Mapping[str, Any]) -> Inputs:
    """Returns the arguments of ``generate`` that a setting describes."""
    ids = random_tokens(2, LENGTH, seed=3)
    named: dict[tuple[str, Any], Callable[[], Any]] = {
        ("assistant_model", "self"): model,
        ("assistant_model", "other vocabulary"): lambda: tiny_model(vocab_size=64),
        ("past_key_values", "as long"): partial(filled, LENGTH),
        ("past_key_values", "longer"): partial(filled, 2 * LENGTH),
        ("past_key_values", "empty"): DynamicCache,
        ("past_key_values", "other batch"): partial(filled, LENGTH - 1, 1),
        ("past_key_values", "of three layers"): partial(cache_of, "dynamic", layers=3),
        ("past_key_values", "list"): list,
        ("attention_mask", "short"): lambda: torch.ones(2, LENGTH - 1),
        ("attention_mask", "long"): lambda: torch.ones(2, LENGTH + 1),
        ("attention_mask", "right padding"): lambda: torch.ones(2, LENGTH).tril(LENGTH - 3),
        ("attention_mask", "a hole"): lambda: torch.ones(2, LENGTH).index_fill(1, torch.tensor(5), 0),
        ("attention_mask", "zeros"): lambda: torch.zeros(2, LENGTH),
        ("attention_mask", "3D"): lambda: torch.ones(2, 1, LENGTH),
        ("attention_mask", "one row"): lambda: torch.ones(1, LENGTH),
        ("attention_mask", "float"): lambda: torch.full((2, LENGTH), 0.5),
        ("attention_mask", "none"): lambda: None,
        ("input_ids", "empty"): lambda: ids[:, :0],
        ("input_ids", "no rows"): lambda: ids[:0],
        ("input_ids", "vector"): lambda: ids[0],
        ("input_ids", "float"): ids.float,
        ("input_ids", "negative"): lambda: with_id(-1, 0, 3)(ids),
        ("input_ids", "large"): lambda: with_id(VOCABULARY, 0, 3)(ids),
        ("input_ids", "none"): lambda: None,
        ("inputs_embeds", "too"): lambda: model().get_input_embeddings()(ids),
        ("inputs_embeds", "only"): lambda: model().get_input_embeddings()(ids),
        ("inputs_embeds", "of other width"): lambda: torch.zeros(2, LENGTH, 3),
        ("position_ids", "short"): lambda: torch.arange(3)[None],
    }
    values = {name: named[name, value]() if (name, value) in named else value for name, value in setting.items()}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, **values}
    if setting.get("inputs_embeds") in ("only", "of other width"):
        del given["input_ids"]
    return given


@torch.no_grad()
def filled(length: int, batch: int = 2) -> DynamicCache:
    past = DynamicCache(config=model().config)
    model()(random_tokens(batch, length, seed=3), past_key_values=past)
    return past


def generated(base: Any, setting: Mapping[str, Any]) -> Tensor:
    torch.manual_seed(0)
    found: Any = base.generate(**arguments(setting))
    return found if isinstance(found, Tensor) else found.sequences


def outcome(setting: Mapping[str, Any]) -> tuple[Tensor | None, Exception | None, bool]:
    """Returns the tokens of the model alone, or its error and whether that came from the decoder."""
    decoder, inside = model().get_decoder(), [False]
    hooks = [
        decoder.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True)),
        decoder.register_forward_hook(lambda *_: inside.__setitem__(0, False)),
    ]
    try:
        return generated(model(), setting), None, False
    except Exception as error:
        return None, error, inside[0]
    finally:
        for hook in hooks:
            hook.remove()


def test_generate(tries: Tries, steps: Callable[[str], None]) -> None:
    """Settings alone and in pairs: the tokens of the model alone, or a refusal, which may be that of transformers itself."""
    pairs = [{**a, **b} for a, b in combinations(SETTINGS, 2) if not a.keys() & b.keys()]
    for setting in tries.chosen([*SETTINGS, *random.Random(0).sample(pairs, 250)]):
        steps(random.Random(str(setting)).choice(PHASES))
        expected, error, in_decoder = outcome(setting)
        if error is not None and not in_decoder and not isinstance(error, ValueError):
            continue  # an error of transformers, which the attached model does not see

        def call(base: Any, setting: Mapping[str, Any] = setting, error: Exception | None = error) -> Tensor:
            try:
                return generated(base, setting)
            except ValueError as refused:
                if error is not None and str(refused) == str(error):
                    raise UserError("as without attach") from refused
                raise

        right = lambda found, e=expected: e is not None and torch.equal(found, e)  # noqa: E731
        tries.python(setting, partial(attached, EVERYTHING, call), right)
