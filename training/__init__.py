"""The recipe of the bundled nano model: corpus, generators, model, optimiser, loop, export.

Owns everything needed to train `oxplow/models/nano` again on one GPU. The package `oxplow` never
imports it; it may import `oxplow.feedback.exam` only to stay away from the examination's words.
Invariant: no corpus text lies in the repository.
"""
