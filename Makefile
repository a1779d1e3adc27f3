# Everything that developers and CI run. Each target does its own set-up; see CONTRIBUTING.md.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
PROGRAMS := sh scripts/dev/install_test_programs.sh
export PYTHONDONTWRITEBYTECODE :=
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-matrix newest test-cluster chaos check lint unit selftest check-aarch64 docs pictures site wheel sdist wheels sweep clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: ## set up, then train a tiny SDXL with real SimpleTuner and the extension on
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/gh200 demo

test: ## set up, then run every test against both SimpleTuner releases
	@$(PYTHON) scripts/dev/test.py

test-matrix: ## set up, then the further combinations of real runs, against both SimpleTuner releases
	@$(PYTHON) scripts/dev/test.py matrix

newest: ## what the package index has today, in a fresh environment: it trains, or is refused with the cause
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/python -m pytest -m matrix -k newest tests/contract/test_fresh_environments.py

test-cluster: ## set up, then jobs of a real Slurm with two nodes on this machine, against both SimpleTuner releases
	@$(PYTHON) scripts/dev/test.py cluster

chaos: ## set up, then every hostile trial: kill, signals, damage, odd files, limits, neighbours
	@$(PYTHON) scripts/dev/test.py chaos

check: ## the quick loop, without SimpleTuner: lint, types, layers, the unit and property tests that need no torch
	@$(PROGRAMS) chromium gcc zsh fish ksh shellcheck
	@$(PYTHON) scripts/dev/environments.py check >/dev/null
	@$(MAKE) --no-print-directory BIN=.venv-check/bin lint unit

lint: ## ruff, mypy --strict, layers (part of check and test)
	@$(BIN)/ruff check src tests scripts $(wildcard *.py)
	@$(BIN)/ruff format --check --quiet src tests scripts $(wildcard *.py)
	@mkdir -p .cache && $(BIN)/mypy --cache-dir .cache/mypy
	@$(BIN)/lint-imports >.cache/layers.txt 2>&1 || (cat .cache/layers.txt; exit 1)

unit: ## unit and property tests (part of check and test)
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/property

selftest: ## the memory checks on every emulated machine
	@$(PROGRAMS) gcc
	@$(PYTHON) scripts/dev/environments.py selftest >/dev/null
	@$(BIN)/python -m tests.emulator.selftest

check-aarch64: ## every dependency has an aarch64 wheel or is pure Python; our C code runs under qemu
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/python scripts/dev/check_aarch64.py

docs: ## regenerate the generated pages
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/python scripts/dev/generate_docs.py
	@$(BIN)/python scripts/dev/generate_doctor_page.py

site: ## build the documentation site into build/site, every link checked, in a small environment of its own
	@$(PYTHON) scripts/dev/build_site.py

pictures: ## photograph the Web UI for docs/web-ui.md
	@$(PROGRAMS) chromium npm
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/python -m scripts.dev.take_web_ui_pictures docs/pictures

wheel: ## build the wheel into dist/
	@$(PYTHON) scripts/dev/environments.py wheel

sdist: ## build the source distribution into dist/
	@$(PYTHON) scripts/dev/environments.py sdist

wheels: ## wheels with the C code built, x86-64 and aarch64, into dist/; the latter tried under qemu
	@$(PYTHON) scripts/dev/wheels.py

sweep: ## renew docs/support.md from every SimpleTuner release on the package index
	@$(PYTHON) scripts/dev/environments.py demo >/dev/null
	@$(BIN)/python -m scripts.dev.releases
	@$(BIN)/python scripts/dev/generate_docs.py

clean: ## remove what make made
	rm -rf .venv .venv-* .uv .cache dist build gh200-demo .mypy_cache .ruff_cache .hypothesis
