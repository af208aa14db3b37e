"""Block scores of prompts without training. A file is one value of ``select.scores``; its class is
registered as ``scorer``.
"""
