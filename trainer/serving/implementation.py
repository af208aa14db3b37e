"""The attention implementation ``msattn`` of transformers' ``from_pretrained``, and the options in
a model's files.

transformers passes the model to neither attention nor mask functions, and attaching needs loaded
weights. So a PyTorch hook for new submodules finds models that are built with this name, and their
first use enables them.
"""

import threading
import warnings
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig

from msattn.trainer.artifacts.model_config import KEY, OWN, settings_of
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.models.tap import register_implementation
from msattn.trainer.serving.attach import enable
from msattn.trainer.serving.build import AttachOptions, artifact_options

NAME = "msattn"
DEFAULT = "vertical_slash"  # selection of models whose files name nothing
# uses that begin before the first forward pass
METHODS = ("generate", "generate_batch", "init_continuous_batching")

# attribute of a model that is not enabled yet: its hook, which is copied with the model
WAITING = "_msattn_first_use"
_enabling = threading.RLock()  # if two threads first use a model at the same time, one enables it


@cache
def register() -> None:
    """Makes ``attn_implementation="msattn"`` known to transformers, for ``from_pretrained`` and
    ``from_config``.

    The first use of such a model enables it, as :func:`msattn.enable` does, with the options in its
    ``config.json``, which ``msattn configure`` and ``msattn push`` write. Without options, prompts
    read blocks of a training-free selection, with a warning. :func:`msattn.enabled` returns the
    sparse attention of the model.
    """
    register_implementation(NAME, _refuse, _refuse)
    register_module_module_registration_hook(_find_model)


def configured_options(config: PreTrainedConfig) -> AttachOptions:
    """Returns the options in a model's ``config.json``, or default options with a warning.

    Raises UserError for an unknown name, a wrong type or a bad value of an option.
    """
    given = settings_of(getattr(config, KEY, None))
    if given is None:
        warnings.warn(
            f"config.json has no msattn settings: prompts use the training-free selection "
            f"{DEFAULT}; see msattn configure",
            ModelWarning,
            stacklevel=2,
        )
        given = {"select": DEFAULT}
    own = {name: config.name_or_path for name in ("gate", "qmodel") if given.get(name) == OWN}
    return artifact_options(given | own, f"config.json: {KEY}")


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UserError(
        "model: attn_implementation='msattn' is for from_pretrained and a model with its head; "
        "msattn.enable(model, ...) "
        "serves one that is loaded"
    )


def _find_model(module: nn.Module, name: str, submodule: Any) -> None:
    """PyTorch hook: makes the first use of ``module`` enable it, if this is a model with a head
    whose decoder asks for it.
    """
    from transformers import PreTrainedModel

    if (
        isinstance(module, PreTrainedModel)
        and isinstance(submodule, PreTrainedModel)
        and _is_asked(submodule)
    ):
        if WAITING not in vars(module):
            vars(module)[WAITING] = module.register_forward_pre_hook(_enable)
        _intercept(module)


def _is_asked(model: Any) -> bool:
    return model.config._attn_implementation == NAME


def _intercept(model: nn.Module) -> None:
    vars(model).update(
        {method: partial(_first_use, model, method) for method in METHODS if hasattr(model, method)}
    )


def _first_use(model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    _enable(model)
    return getattr(model, method)(*args, **kwargs)


@torch.compiler.disable
def _enable(model: Any, args: tuple = ()) -> None:
    """Enables a model, unless a model that contains it is already enabled. After an error the next
    use tries again.
    """
    from transformers import PreTrainedModel

    with _enabling:
        for method in METHODS:
            if getattr(vars(model).get(method), "func", None) is _first_use:
                del vars(model)[method]
        if asked := [
            each
            for each in model.modules()
            if isinstance(each, PreTrainedModel) and _is_asked(each)
        ]:
            _enable_alone(model, asked)
        if WAITING in vars(model):
            vars(model).pop(WAITING).remove()


def _enable_alone(model: Any, asked: list[Any]) -> None:
    """Enables a model; layers that msattn does not serve get the implementations that transformers
    would choose.
    """
    try:
        options = configured_options(model.config)
        for each in asked:
            each.config._attn_implementation = each.get_correct_attn_implementation(None)
        enable(model, **vars(options))
    except BaseException:
        for each in asked:
            each.config._attn_implementation = NAME
        _intercept(model)
        raise
