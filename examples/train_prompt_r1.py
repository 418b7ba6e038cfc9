"""Train a Prompt-R1 agent: the same command for the sandbox on a laptop and for Qwen3-4B on eight
GPUs.

    accelerate launch --quiet examples/train_prompt_r1.py --config examples/configs/sandbox.yaml
    accelerate launch --quiet --config_file examples/accelerate/zero3.yaml examples/train_prompt_r1.py \\
        --config examples/configs/qwen3_4b.yaml --environment_model gpt-4o-mini --budget_usd 200

Every option of `PromptR1Config`, TRL's `ModelConfig` and the script's own `PromptR1Arguments` can
stand in the YAML file or on the command line, where it wins; `--help` shows ours, `--help-all` all.
The program itself is `agentic_prompting/cli/train_program.py`: copy that file to begin a program of
your own. Where the package is installed, `agentic-prompting train prompt-r1 --config ...` runs the
same.

Ctrl-C finishes the step, saves a checkpoint and says how to go on.
"""

import sys

from agentic_prompting.cli.script import run_script
from agentic_prompting.cli.train_program import main

if __name__ == "__main__":
    run_script(lambda: main("prompt-r1", sys.argv[1:]))
