"""Owlet: a small trained model of the qwen4exp architecture, made here from the first byte.

    corpus ─► tokenizer ─► dialogues ─► batches ─► train ─► export ─► owlet-*.gguf
                                           geometry ─► reference (delta, selection) ─┘

Nothing here is imported by the server.  ``train`` and what it needs run without the gguf package
and without the rest of this repository's dependencies: PyTorch, NumPy and tokenizers are enough.
"""
