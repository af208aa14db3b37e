"""The training loop, checkpoints, callbacks, metrics tracking, and ranks under ``torchrun``.

Import :func:`~msattn.trainer.training.loop.fit` to train an ``nn.Module``. Nothing here depends on
what is trained.
"""
