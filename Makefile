# `make demo` and `make test` do all set-up themselves, on a machine with Python 3.11 or newer.

PYTEST ?=
STAMP := .venv/.isomodels-stamp

.PHONY: demo demo-rl test setup lint clean

demo: $(STAMP)
	.venv/bin/isomodels parity --checkpoint tests/data/tiny-qwen3 --dtype float32
	.venv/bin/isomodels parity --checkpoint tests/data/tiny-qwen3 --dtype bfloat16

# 20 steps of GRPO by isomodels, 20 by the stock pair from the same model, and their picture.
demo-rl: $(STAMP)
	.venv/bin/python -m pip install -qq --no-deps -r requirements/examples.txt
	rm -rf build/demo-rl build/demo-rl-stock
	.venv/bin/python examples/grpo/grpo.py build/demo-rl
	.venv/bin/python examples/grpo/stock.py build/demo-rl-stock --checkpoint build/demo-rl/base
	.venv/bin/python examples/grpo/plot.py build/demo-rl.png isomodels=build/demo-rl stock=build/demo-rl-stock

test: lint
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

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
