"""Tests of Oxplow; folders mirror the package, shared builders are in build.py and tiny.py."""
