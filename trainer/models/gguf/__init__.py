"""Models in GGUF files, as llama.cpp writes them: their configuration, tokenizer and weights, which are unpacked.

transformers reads such files too, but differently in each version, in half a minute for a large vocabulary, and it leaves out
what it does not know, such as the frequencies of Llama 3.1's RoPE. Nothing here depends on it but its classes.
"""
