"""Tiny random checkpoints with reference activations, made by transformers.

Owns the builders (`glm5_next`, `kimi_linear`), the reader of what they write (`reading`) and the
pytest fixtures (`fixtures`). Must not know Oxplow: an oracle that shares code with what it judges
proves nothing.
Invariant: a directory is written only if no cut in it (top-k, router, greedy step) is a near-tie.
"""
