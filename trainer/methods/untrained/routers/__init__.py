"""Routers of new tokens without training. A file is one value of ``eval.routers``; its class is
registered as ``router``.
"""
