"""Evolve the system prompt of a model whose weights nobody can train, with E-SPL's evolution alone.

    python examples/evolve_closed_model.py --policy_model gpt-4o-mini --reference_model gpt-4o \\
        --task gsm8k --task_rows 200 --reward math --initial_prompt "Solve it. Put the answer in \\\\boxed{}."

    python examples/evolve_closed_model.py --sandbox        # no model, key or network, a few minutes

Any OpenAI-compatible endpoint will do. Shows a line for each step and the best prompt at the end; the state is in
`--output_dir` after every step, and a run that was stopped goes on when started again. The program itself is
`agentic_prompting/cli/evolve.py`; `agentic-prompting evolve` is the same as a command.
"""

from agentic_prompting.cli.evolve import main
from agentic_prompting.cli.train import run_script

if __name__ == "__main__":
    run_script(main)
