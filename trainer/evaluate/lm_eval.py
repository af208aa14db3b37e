"""The model ``msattn`` of lm_eval's own command line: ``hf`` with sparse attention. Needs the extra
``harness``.

lm_eval finds no models in other packages, so this module registers one and runs lm_eval's command::

    python -m msattn.trainer.evaluate.lm_eval --model msattn --tasks TASKS \\
        --model_args pretrained=./my-model,gate=outputs/my-model/base,sparsity=0.8

The model takes the arguments of ``hf`` and the options of :func:`msattn.attach`; without options,
those in its ``config.json`` apply. The results file records how much was read.
"""

import sys
from functools import cache
from typing import Any

from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError, report_error, warnings_as_lines
from msattn.trainer.evaluate.tasks.harness_tasks import INSTALL
from msattn.trainer.serving.attach import enable
from msattn.trainer.serving.build import ARTIFACT_KEYS, artifact_options
from msattn.trainer.serving.implementation import configured_options


@cache
def register() -> None:
    """Registers the model; UserError without lm_eval."""
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ModuleNotFoundError as error:
        raise UserError(f"lm_eval is not installed; {INSTALL} ({error})") from error

    @register_model("msattn")
    class SparseModel(HFLM):
        def __init__(self, pretrained: str, batch_size: int | str = 1, **arguments: Any) -> None:
            # lm_eval pads on the right and gives no mask, so that the last queries of shorter
            # prompts would be padding
            require(str(batch_size) == "1", "--batch_size", batch_size, "expected 1")
            given = {name: arguments.pop(name) for name in ARTIFACT_KEYS if name in arguments}
            options = artifact_options(given, "--model_args")
            super().__init__(pretrained, batch_size=1, **arguments)
            model: Any = self.model
            self._sparse = enable(
                model, **vars(options if given else configured_options(model.config))
            )

        def get_model_info(self) -> dict[str, Any]:
            return super().get_model_info() | {"msattn": dict(self._sparse.stats())}


def main() -> None:
    """Runs lm_eval's command line; mistakes in the options of ``attach`` print one line and end
    with exit code 2.
    """
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        with warnings_as_lines():
            cli_evaluate()
    except UserError as error:
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
