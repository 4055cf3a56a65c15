"""vtoken beside vLLM, llama.cpp and transformers: the same model and prompts, in turn, on the same machine.

    python -m benchmarks.peers

README.md in this folder says what is compared and how it is kept fair.
"""
