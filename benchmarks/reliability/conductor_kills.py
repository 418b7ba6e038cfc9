"""A conductor in training is killed with SIGKILL at random moments and resumed: is anything paid
twice, or lost?

    OMP_NUM_THREADS=1 python -m benchmarks.reliability.conductor_kills --json  # ten kills on-policy, ten with async_lead
    OMP_NUM_THREADS=1 python -m benchmarks.reliability.conductor_kills --json --quick  # one of each

The conductor is the warm-started one of a tuning seed (`python -m benchmarks.learning.conductor
--tuning` makes it, and this does where it is missing: some minutes). Its three workers are behind a
server in the calling process, which counts the replies that were paid for. On-policy, a run that
was killed and resumed must end with the losses and weights of an undisturbed one, to the last bit.
With `async_lead`, the episodes in flight go on: no reply that is on disk is asked for again, and
none is paid in vain but for those of rollouts that the log counts as played anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "src")]

from benchmarks.learning.conductor import (  # noqa: E402
    TRAIN_ROWS,
    TUNING_SEEDS,
    WARM_STEPS,
    warm_up,
)
from benchmarks.learning.conductor_baselines import TEMPLATE  # noqa: E402
from benchmarks.learning.conductor_variants import VARIANTS  # noqa: E402
from benchmarks.learning.conductor_world import (  # noqa: E402
    DESCRIPTION,
    Facts,
    ScriptedWorker,
    make_split,
)

ON_POLICY = "on-policy"
AHEAD = "async_lead"
VARIANT = VARIANTS["references"]


def workers_replies() -> Callable[[dict[str, Any]], str]:
    """The server's replies: those of the worker that a request names as its model."""
    facts = Facts()
    workers = {name: ScriptedWorker(facts, name, wordings=VARIANT.wordings) for name in DESCRIPTION}

    def reply(request: dict[str, Any]) -> str:
        worker = workers[request["model"]]
        return worker.answer(request["messages"][-1]["content"])

    return reply


def live(policy: str, folder: str, url: str, steps: int, mode: str) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    from datasets import Dataset

    from agentic_prompting import OpenAIChat, PromptR1Trainer, ReplayCache
    from agentic_prompting.rollout import AgentSpec
    from support.killed_runs import write_result
    from support.training import trainer_for

    facts = Facts()
    rows, _ = make_split(TUNING_SEEDS[0], 64, 1, facts)
    cache = ReplayCache(Path(folder) / "replies.sqlite")
    chats = {name: OpenAIChat(name, url, cache=cache) for name in DESCRIPTION}
    limits = AgentSpec.load(policy).limits
    trainer = trainer_for(
        policy,
        folder,
        Dataset.from_list(rows),
        kind=PromptR1Trainer,
        environment=VARIANT.environment(facts, **chats),
        options={"prompt_template": TEMPLATE},
        max_steps=steps,
        max_turns=limits.max_turns,
        max_turn_tokens=limits.max_turn_tokens,
        max_completion_length=limits.max_tokens,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        full_determinism=mode == ON_POLICY,
        check_environment=False,
        num_generations=4,
        per_device_train_batch_size=8,
        async_lead=int(mode == AHEAD),
    )
    trainer.train(resume_from_checkpoint=True)
    for chat in chats.values():
        chat.close()
    write_result(trainer, Path(folder))


def measure(kills: int, steps: int, policy_folder: Path) -> dict[str, Any]:
    """Kill and resume runs in both modes."""
    from support.killed_runs import killed_and_resumed

    facts = Facts()
    seed = TUNING_SEEDS[0]
    rows, _ = make_split(seed, TRAIN_ROWS, 1, facts)
    policy = warm_up(policy_folder, rows, facts, VARIANT, seed, WARM_STEPS)
    results = {}
    for mode in (ON_POLICY, AHEAD):
        with tempfile.TemporaryDirectory() as folder:
            results[mode] = killed_and_resumed(
                policy,
                Path(folder),
                kills,
                steps=steps,
                program=mode,
                script=Path(__file__),
                say=workers_replies(),
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one kill of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--policy", type=Path, default=Path(f"runs/conductor/tuning/references-{TUNING_SEEDS[0]}")
    )
    options = parser.parse_args()
    kills, steps = (1, 3) if options.quick else (10, 4)
    with redirect_stdout(sys.stderr):
        results = measure(kills, steps, options.policy)
    if options.json:
        print(json.dumps(results))
        return
    for mode, counts in results.items():
        print(f"{mode}: " + ", ".join(f"{name} {value}" for name, value in counts.items()))


if __name__ == "__main__":
    # `killed_and_resumed` starts this file with the arguments of `live` alone.
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        live(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
