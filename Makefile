# Every target sets up what it needs. ARGS are passed on:
#
#     make pong ARGS="--total_steps 3000 --num_actors 2"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
python := $(VENV)/bin/python

.PHONY: help setup pong test lint format bench clean

help:
	@echo "make pong    train Pong with MonoBeast (ARGS=\"--flag value\")"
	@echo "make test    all tests (ARGS=\"-k name\")"
	@echo "make setup   the virtual environment $(VENV), and nothing else"
	@echo "make bench   steps per second of this machine"
	@echo "make lint    what CI checks of the style; make format mends it"
	@echo "make clean   removes $(VENV) and everything built"

setup: $(VENV)/.dev

pong: $(VENV)/.run
	$(python) -m monobeast --env PongNoFrameskip-v4 $(ARGS)

test: $(VENV)/.dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .

format: $(VENV)/.dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: $(VENV)/.run
	$(python) benchmarks/monobeast.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file is newer than what was installed for it. The environment is made anew if
# it was broken off half-way, or if its Python is gone.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is `$(PYTHON) -V 2>&1`, expected Python 3.10 or newer:" \
		"make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory \
		system-package PACKAGE=python3-venv
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.python requirements.txt
	$(python) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(python) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# Installs PACKAGE where that is possible without asking; says what to type where not.
.PHONY: system-package
system-package:
	@if command -v apt-get >/dev/null && [ "`id -u`" = 0 ]; then \
		apt-get update -q && apt-get install -qy $(PACKAGE); \
	elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then \
		sudo apt-get update -q && sudo apt-get install -qy $(PACKAGE); \
	else \
		echo "make: $(PACKAGE) is missing. Type this, then make again:" >&2; \
		echo "    sudo apt-get update && sudo apt-get install -y $(PACKAGE)" >&2; \
		exit 1; \
	fi
