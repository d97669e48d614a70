"""Top of the test tree: the oracles' fixtures and the `--oracle` option."""

pytest_plugins = ["tests.oracles.fixtures"]
