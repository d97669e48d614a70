"""Where memory lives, as numbers: components, blocks, slots, prefixes, the byte plan; no torch."""
