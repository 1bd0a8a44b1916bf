# make quickstart   raw text to a measured model in five minutes   (ARGS="--data PATH --budget 10m")
# make test         the tests that need nothing but this checkout
# make check        lint, format, types, import floors
# make test-all     slow proofs and peers as oracles too
#
# The first call makes .venv and installs what it needs. PYTHON=path/to/python uses that environment
# as it is and installs nothing. SYSTEM_PYTHON chooses the interpreter that .venv is made with.
PYTHON ?= .venv/bin/python
SYSTEM_PYTHON ?= python3
ARGS ?=

ifeq ($(PYTHON),.venv/bin/python)
installed = .venv/.installed-$(1)
endif

.PHONY: quickstart test check test-all clean

quickstart: $(call installed,base)
	$(PYTHON) -m lavra quickstart $(ARGS)

test: $(call installed,test)
	$(PYTHON) -m pytest -m "not slow" $(ARGS)

check: $(call installed,test)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "import sys; from importlinter.cli import lint_imports_command; sys.argv = ['lint-imports']; lint_imports_command()"

test-all: $(call installed,oracle)
	$(PYTHON) -m pytest $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(SYSTEM_PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'lavra needs Python 3.11 or newer; set SYSTEM_PYTHON=')"
	$(SYSTEM_PYTHON) -m venv .venv

.venv/.installed-base: .venv/bin/python pyproject.toml
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.installed-test: .venv/bin/python pyproject.toml
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch .venv/.installed-base $@

.venv/.installed-oracle: .venv/bin/python pyproject.toml
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e ".[test,oracle]"
	touch .venv/.installed-base .venv/.installed-test $@
