# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint proto mnist clean

run: .venv/ready
	$(BIN)/shufl run configs/quickstart.toml

test: .venv/ready lint
	$(BIN)/pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy accounting shuffler
	$(BIN)/lint-imports

mnist: .venv/ready  ## full MNIST experiment: hours on 2 cores
	$(BIN)/shufl run configs/mnist.toml

proto: .venv/ready
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. shuffler/shuffler.proto

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
