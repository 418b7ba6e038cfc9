"""ProRefine on one of the paper's sets, in its three verifier settings: a row group of its Table 1.

    python examples/refine.py                                  # the sandbox: scripted models and puzzles
    python examples/refine.py --task bbh_word_sorting --task_model llama-3.2-1b \\
        --task_base_url http://localhost:8000/v1 --critic_model gpt-4o-mini --output_dir
        runs/sorting

Each setting writes its results to a file of its own in `--output_dir`, and a run that was stopped
goes on when started again. The program itself is `agentic_prompting/cli/refine_table.py`, a page of
the Python API. For prompts and questions of your own there is the command: `agentic-prompting
refine --help`.
"""

import sys

from agentic_prompting.cli.refine_table import refine_table
from agentic_prompting.cli.script import run_script

if __name__ == "__main__":
    run_script(lambda: refine_table(sys.argv[1:]))
