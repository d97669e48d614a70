"""The network: specs, checkpoints, layers and mixers over a frozen op table."""
