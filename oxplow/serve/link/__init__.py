"""How the front reaches the engine: a thread of its own process, or a process of its own."""
