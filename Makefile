# Every target does its own set-up in .venv; a second run finds it done. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: clients help setup serve test quick check format structure size
BIN := .venv/bin
# One thread a process keeps runs repeatable and shared machines usable; set it to override.
THREADS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup:  ## make .venv from the project's files (instant when nothing changed)
	@bash tools/setup.sh

serve: setup  ## start the server; options: make serve ARGS="--port 9000"
	@exec $(BIN)/oxplow serve $(ARGS)

test: setup  ## run the whole test suite
	@echo "test: the whole suite; the slowest tests are listed at the end"
	@$(THREADS) $(BIN)/python -m pytest --durations=10 --durations-min=2 $(ARGS)

quick: setup  ## run the tests that take less than a minute together
	@echo "quick: the suite without the tests marked slow"
	@$(THREADS) $(BIN)/python -m pytest -m "not slow" --durations=10 --durations-min=5 $(ARGS)

check: setup  ## lint, format, types, quick tests, size of the house
	@echo "check [1/5] ruff check" && $(BIN)/ruff check .
	@echo "check [2/5] ruff format" && $(BIN)/ruff format --check .
	@echo "check [3/5] mypy" && $(BIN)/mypy
	@echo "check [4/5] quick tests" && $(THREADS) $(BIN)/python -m pytest -q -m "not slow"
	@echo "check [5/5] size of the house" && $(BIN)/python tools/size_table.py

clients: setup  ## run real clients against the server; what is not installed is skipped
	@$(THREADS) $(BIN)/python -m pytest -q tests/clients/check_*.py $(ARGS)

format: setup  ## let ruff format and mend what it safely can
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

structure:  ## write the map of modules in docs/structure.md from the docstrings
	@python3 tools/structure_map.py

size:  ## print the size table of the house
	@python3 tools/size_table.py
