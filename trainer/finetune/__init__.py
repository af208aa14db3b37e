"""Long-context fine-tuning of a whole model through the blocks that its gates choose.

Import :func:`~msattn.trainer.finetune.run.finetune`, the job behind ``msattn finetune``.
"""
