"""Where memory lives: what each layer keeps per request, in blocks and slots. No torch."""
