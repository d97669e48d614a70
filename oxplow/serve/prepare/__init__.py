"""From the bytes of a request to work for the engine; runs in worker processes."""
