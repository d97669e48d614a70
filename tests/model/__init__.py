"""Tests of the network: agreement with transformers, invariances, checkpoint loading."""
