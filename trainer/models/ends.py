"""The tokens that end a text: one set for each loaded model, whatever file names them.

Fine-tuned and converted checkpoints often name one in ``config.json`` and another one in the
tokenizer, and their chat template ends answers with a third.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msattn.trainer.models.families import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def end_tokens(model: "PreTrainedModel") -> list[int]:
    """Returns the tokens after which a model stops: those of its generation configuration,
    ascending.
    """
    return sorted(_listed(getattr(model.generation_config, "eos_token_id", None)))


def unite_end_tokens(
    config: "PreTrainedConfig",
    generation: Any,
    tokenizer: "PreTrainedTokenizerBase",
    of_template: Iterable[int],
) -> None:
    """Lets generation stop at the end tokens of a model's configurations, its tokenizer and its
    chat template.

    Those of the template are ``of_template``. A tokenizer without one gets the first of all.
    ``generation`` is the model's generation configuration, or None.
    """
    config = text_config(config)
    # Models with code of their own may lack it.
    of_configs = (
        getattr(configuration, "eos_token_id", None) for configuration in (generation, config)
    )
    named = (*of_configs, tokenizer.eos_token_id, *of_template)
    # -1 in old files: none
    tokens = [token for ids in named for token in _listed(ids) if 0 <= token < config.vocab_size]
    ends = sorted({*tokens})
    if generation is not None:
        generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    if tokenizer.eos_token is None:
        tokenizer.eos_token = next(filter(None, map(tokenizer.convert_ids_to_tokens, tokens)), None)


def _listed(tokens: Any) -> list[int]:
    return [] if tokens is None else [*tokens] if isinstance(tokens, list) else [tokens]
