"""lm-eval over vtoken and over its own transformers back end: the same tasks, item by item.

    python -m benchmarks.lm_eval

README.md in this folder says what is compared, and how to run any other task of lm-eval on vtoken.
"""
