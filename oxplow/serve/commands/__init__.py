"""One module per command of `oxplow`; each has `register(app)` and is listed in `serve/cli.py`.

A command reads settings through `session(context)`, prints through `report`, and imports heavy
modules inside its function, so that `oxplow --help` starts at once.
"""
