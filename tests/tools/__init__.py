"""Tests of the programs under tools/."""
