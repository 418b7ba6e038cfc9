"""The programs: what `agentic-prompting train`, `demo` and `evolve` run, and the files in `examples/` too.

Each is a module with its options as dataclasses and a `main`, to be started with `python -m`, with `accelerate launch
-m`, or from a file of two lines. `configs/` holds what the demonstrations in the sandbox need.
"""
