"""Evolve the system prompt of a model whose weights cannot be trained, with E-SPL's evolution
alone.

    python examples/evolve_closed_model.py --policy-model gpt-4o-mini --reference-model gpt-4o \\
        --task gsm8k --task-rows 200 --reward math --initial-prompt "Solve it. Put the answer in
        \\\\boxed{}."

    python examples/evolve_closed_model.py --sandbox        # no model, key or network, a few minutes

Any OpenAI-compatible endpoint will do. Shows a line for each step and the best prompt at the end;
the state is in `--output-dir` after every step, and a run that was stopped goes on when started
again. It is the command `agentic-prompting evolve`, in `agentic_prompting/cli/evolve.py`; from
Python: `agentic_prompting.evolve`.
"""

import sys

from agentic_prompting.cli import main

if __name__ == "__main__":
    main(["evolve", *sys.argv[1:]])
