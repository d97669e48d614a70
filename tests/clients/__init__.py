"""Checks with real clients: `make clients`. They need packages that the suite does not."""
