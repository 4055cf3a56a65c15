"""Memory arithmetic: bytes a token, blocks in a budget, lengths that fit."""
