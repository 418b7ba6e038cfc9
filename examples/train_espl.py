"""Train under an evolving system prompt (E-SPL): the sandbox on a laptop, maths, agentic search, or
Prompt-R1's agent.

    accelerate launch --quiet examples/train_espl.py --config examples/configs/espl/sandbox.yaml
    accelerate launch --quiet --config_file examples/accelerate/zero3.yaml examples/train_espl.py \\
        --config examples/configs/espl/prompt_r1_espl.yaml --environment_model gpt-4o-mini
        --reference_model gpt-4o
    accelerate launch --quiet --config_file examples/accelerate/single.yaml examples/train_espl.py \\
        --config examples/configs/espl/math_qwen3_4b.yaml --reference_model gpt-4o --budget_usd 20

Every option of `ESPLConfig`, TRL's `ModelConfig` and the script's own `ESPLArguments` can stand in
the YAML file or on the command line, where it wins; `--help` shows ours, `--help-all` all. Without
a reference LLM: `--reflector policy` lets the policy revise its own prompt. The program itself is
`agentic_prompting/cli/train_program.py`: copy it to begin a program of your own. Where the package
is installed, `agentic-prompting train espl --config ...` runs the same.

Ctrl-C finishes the step, saves a checkpoint and says how to go on.
"""

import sys

from agentic_prompting.cli.script import run_script
from agentic_prompting.cli.train_program import main

if __name__ == "__main__":
    run_script(lambda: main("espl", sys.argv[1:]))
