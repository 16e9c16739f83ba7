# The workbook's commands. On first use each creates the environment in .venv. Paths may contain spaces.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready
PEERS := .venv-peers/bin/python
PEERS_READY := .venv-peers/ready

.PHONY: help run test mutants torture fuzz lab sync figures site class lint bench bench-peers lock clean

help:
	@echo "make run    run the workbook in batch on the planted data set and write the report"
	@echo "make test   run every test, the notebooks included"
	@echo "make mutants make one line of the package wrong at a time and see that the tests notice (MUTANTS_ARGS=\"onepass\")"
	@echo "make fuzz   damage files at random: each is refused with its name, or read rightly (FUZZ_ARGS=\"600 csv index\")"
	@echo "make torture kill commands at 200 random moments and before each write, call them again, compare (TORTURE_ARGS=\"5 train\")"
	@echo "make lab    open JupyterLab at the project's root, with the first notebook"
	@echo "make sync   pair notebooks/*.py with their .ipynb, execute those that changed, add static pictures"
	@echo "make figures draw the README's pictures from the executed notebooks (needs Chrome)"
	@echo "make site   write the executed notebooks as linked pages for any static host (outputs/site)"
	@echo "make class  prepare a class: both runs of the notebooks, and the exercises without answers (outputs/class)"
	@echo "make lint   check style and formatting"
	@echo "make bench  measure the goals (minutes; writes outputs/bench/*.json)"
	@echo "make bench-peers measure RePlay, RecBole, Torch-RecHub and faiss beside ours (own environment, .venv-peers; ten minutes)"
	@echo "make lock   resolve the dependencies of pyproject.toml again and write requirements.lock (torch keeps its pin)"
	@echo "make clean  remove the environment and caches (outputs/ stays)"

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "bachlib needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; say which one to use: make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(PY) -m pip install --quiet --no-deps -r requirements.lock
	$(PY) -m pip install --quiet --no-deps --editable .
	@touch $(READY)

run: $(READY)
	$(PY) -m bachlib.cli run params/quickstart.yaml

test: $(READY)
	$(PY) -m pytest -n 3 $(PYTEST_ARGS)

mutants: $(READY)
	$(PY) tests/mutants.py $(MUTANTS_ARGS)

fuzz: $(READY)
	$(PY) tests/fuzz.py $(FUZZ_ARGS)

torture: $(READY)
	$(PY) tests/torture.py $(TORTURE_ARGS)

lab: $(READY)
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_tour.ipynb

sync: $(READY)
	$(PY) -m bachlib.cli sync

figures: $(READY)
	$(PY) -m bachlib.cli figures

site: $(READY)
	$(PY) -m bachlib.cli site

class: $(READY)
	$(PY) -m bachlib.cli class

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: $(READY)
	$(PY) -m bachlib.cli bench

$(PEERS_READY): requirements.lock requirements-peers.txt pyproject.toml
	$(PYTHON) -m venv .venv-peers
	$(PEERS) -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(PEERS) -m pip install --quiet --no-deps -r requirements-peers.txt
	$(PEERS) -m pip install --quiet --no-deps --editable .
	@touch $(PEERS_READY)

bench-peers: $(PEERS_READY)
	$(PEERS) -m bachlib.bench.peers $(ROUNDS)

# Without rfc3987-syntax (and lark): jsonschema uses it for one kind of address that no notebook has, and importing it
# takes more than a second in every kernel. The lock is complete, so it is installed with --no-deps.
lock:
	rm -rf .lockenv && $(PYTHON) -m venv .lockenv
	.lockenv/bin/python -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	.lockenv/bin/python -m pip install --quiet ".[lab,sweep,faiss-cpu,export,test]"
	{ echo "# Every package, exactly. Written by 'make lock' from pyproject.toml; environment.yml repeats the direct ones. A new torch: change its line by hand first."; \
	  .lockenv/bin/python -m pip freeze --exclude bachlib --exclude rfc3987-syntax --exclude lark | sed 's/ @ .*//; s/+cpu$$//'; } > requirements.lock
	rm -rf .lockenv build

clean:
	rm -rf .venv .venv-peers .lockenv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
