# `make demo` and `make test` do all set-up themselves, on a machine with Python 3.11 or newer.

PYTEST ?=
STAMP := .venv/.isomodels-stamp

.PHONY: demo test setup lint clean

demo: $(STAMP)
	.venv/bin/isomodels parity --checkpoint tests/data/tiny-qwen3 --dtype float32
	.venv/bin/isomodels parity --checkpoint tests/data/tiny-qwen3 --dtype bfloat16

test: lint
	.venv/bin/python -m pytest -q $(PYTEST)

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

setup: $(STAMP)

$(STAMP): tools/setup.sh pyproject.toml $(wildcard requirements/*.txt) $(wildcard tools/vllm_cpu_stub/*.toml)
	bash tools/setup.sh
	@touch $@

clean:
	rm -rf .venv build dist isomodels.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
