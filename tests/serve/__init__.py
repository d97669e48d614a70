"""Tests of oxplow.serve."""
