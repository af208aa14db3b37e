"""The training loop and what surrounds it: checkpoints, callbacks, tracking, processes under ``torchrun``.

Import :func:`~msattn.trainer.training.loop.fit` to train an ``nn.Module``. Nothing here knows what is trained.
"""
