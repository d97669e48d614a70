"""The engine: requests in, tokens out; scheduling, batching, sampling, hand-over on one model."""
