"""Long-context fine-tuning of a whole model through the blocks that its gates select.

Import :func:`~msattn.trainer.finetune.run.finetune`, the job of ``msattn finetune``.
"""
