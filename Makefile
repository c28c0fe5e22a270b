PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_DOCS := .venv/docs/.installed
INSTALLED_PEERS := .venv/peers/.installed

# On Linux without an NVIDIA GPU, PyTorch's CPU build (0.2 GB instead of several) is taken from PyTorch's own index of CPU
# builds, if this index answers within five seconds. Otherwise the default index decides.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX = $$([ "$$(uname)" = Linux ] && [ ! -e /proc/driver/nvidia ] && $(PYTHON) -c \
	'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null && echo --extra-index-url $(CPU_INDEX))

.PHONY: demo install test test-vllm test-ray test-cluster test-extras test-gpu check dist test-install format docs bench bench-check bench-peers faults paper tiny-base clean

demo: $(INSTALLED)  ## install, train an agent on this machine's CPU, print the table
	$(BIN)/agent-r1 train
	@echo "To call agent-r1 yourself, activate its environment: source .venv/bin/activate"

install: $(INSTALLED_DEV)

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Agent-R1 needs Python 3.11 or newer: make PYTHON=python3.11 ..")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch and the package into .venv: some minutes, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(INSTALLED_DEV): $(INSTALLED) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	# Apart from the other packages: transformers imports torchao at each start if it can, which takes 1.5 s.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .venv/torchao torchao==0.18.0
	touch $@

# In an environment of its own: the site is built from the files, without importing the package.
$(INSTALLED_DOCS): requirements-docs.lock
	test -x .venv/docs/bin/python || $(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	touch $@

docs: $(INSTALLED_DOCS)  ## the documentation as a site in site/; a broken link or an unknown name fails
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --quiet --strict
	@echo "open site/index.html; with search: python3 -m http.server --directory site --bind 127.0.0.1"

# Without GPUs: runs on a GPU have other bits than the tests expect.
test: $(INSTALLED_DEV)  ## every test, on the CPU; some skip without bubblewrap, Chromium or strace (apt-get install bubblewrap libseccomp2 chromium strace)
	CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -rs --numprocesses 4 --dist loadfile --no-loadscope-reorder

VLLM_PYTHON ?= .venv/vllm/bin/python
test-vllm: $(INSTALLED_DEV)  ## training through real vLLM servers; VLLM_PYTHON is the Python of an environment with vLLM
	VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -rs tests/training/test_real_vllm.py

# In a folder of its own: Ray takes 240 MB, and no other test needs it.
.venv/ray/.installed: $(INSTALLED_DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .venv/ray ray==2.60.0 msgpack==1.1.2
	touch $@

test-ray: .venv/ray/.installed  ## training in Ray actors: killed actors, sockets, processes that are left
	PYTHONPATH=.venv/ray $(BIN)/python -m pytest -rs tests/training/test_ray_runs.py

test-cluster: .venv/ray/.installed  ## training on two machines made of network namespaces, without a shared disk (root)
	PYTHONPATH=.venv/ray $(BIN)/python -m pytest -rs tests/cluster

# In a folder of its own: with what they need, these three packages take 1 GB.
.venv/extras/.installed: $(INSTALLED_DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target .venv/extras wandb==0.31.0 trackio==0.43.0 mlflow==3.17.2
	touch $@

# Apart from these: openenv needs mcp below 2.
.venv/agents/.installed: $(INSTALLED_DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target .venv/agents openenv==0.10.0 openai-agents==0.24.0 langchain==1.5.2 langchain-openai==1.7.4 smolagents==1.26.0 'pydantic-ai-slim[openai]==2.68.0'
	touch $@

test-extras: .venv/extras/.installed .venv/agents/.installed  ## Weights & Biases, Trackio, MLflow, OpenEnv, and agents of other frameworks
	PYTHONPATH=.venv/extras $(BIN)/python -m pytest -rs tests/trackers
	PYTHONPATH=.venv/agents $(BIN)/python -m pytest -rs tests/gateway/test_agent_frameworks.py tests/envs/adapters/test_openenv.py tests/workers/test_openenv_server.py

test-gpu: $(INSTALLED_DEV)  ## engine, trainer and runs on an NVIDIA GPU
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no GPU")'
	$(BIN)/python -m pytest -rs tests/inference/test_devices.py tests/trainer/test_oom_retry.py tests/training/test_gpu_runs.py

check: $(INSTALLED_DEV)  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(INSTALLED_DEV)  ## sdist and wheel in dist/, the wheel built from the sdist
	rm -rf dist agent_r1.egg-info  # setuptools also packs what an old list of files in there names
	$(BIN)/python -m build --no-isolation > .venv/dist.log 2>&1 || { cat .venv/dist.log; exit 1; }

# As a user installs it: in an empty environment (-I: nothing of PYTHONPATH), which is removed if the tests pass.
test-install: dist  ## the wheel in an environment of its own: the demo, a new project, the viewer (minutes, 1.2 GB until it ends)
	rm -rf .venv/wheel
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/python -I -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) "$$(grep '^torch==' requirements.lock)"
	.venv/wheel/bin/python -I -m pip install --quiet --disable-pip-version-check --constraint requirements.lock dist/*.whl
	INSTALLED_PYTHON=.venv/wheel/bin/python CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -rs tests/test_install.py
	rm -rf .venv/wheel

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## speed of sampling and training, in one run
	$(BIN)/python benchmarks/speed.py

# In an environment of its own: TRL need not fit the other packages.
$(INSTALLED_PEERS): requirements-peers.lock
	test -x .venv/peers/bin/python || $(PYTHON) -m venv .venv/peers
	.venv/peers/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-peers.lock
	touch $@

bench-check: $(INSTALLED)  ## fail if ratios of speed are 20 % below the last ones of this processor (a minute)
	$(BIN)/python benchmarks/check.py

bench-peers: $(INSTALLED) $(INSTALLED_PEERS)  ## speed of training beside TRL, on the same work, in one run
	$(BIN)/python benchmarks/peers.py

faults: $(INSTALLED)  ## kills and failures on purpose, and checks of what must still hold
	$(BIN)/python tests/faults --jobs 2

paper: $(INSTALLED_DEV)  ## the paper's tables in miniature, over three seeds on each of three bases (over an hour)
	$(BIN)/python -m research.paper --seeds 3 --bases 3 --jobs 2

tiny-base: $(INSTALLED)  ## make the committed base model again
	$(BIN)/python -m research.tiny_base

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build site *.egg-info
