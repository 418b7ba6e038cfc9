"""A training step of the sandbox with traces, as a job of two processes.

The arguments are POLICY, FOLDER and the address of a collector.
"""

import os
import sys
from pathlib import Path

from datasets import Dataset

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import OpenAIChat
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.sandbox import Oracle, as_rows, make_split
from agentic_prompting.sandbox.server import MODEL, OracleServer
from support.distributed_backends import prepare
from support.training import Acts, trainer_for


def main(policy, folder, address):
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
    prepare("ddp", folder)
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    with OracleServer(Oracle()) as server, OpenAIChat(MODEL, base_url=server.base_url) as chat:
        trainer = trainer_for(
            policy,
            Path(folder, "run"),
            rows,
            environment=LLMEnvironment(chat),
            traces=True,
            max_steps=1,
            per_device_train_batch_size=2,
        )
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        trainer.train()
    from opentelemetry import trace

    trace.get_tracer_provider().force_flush()
    os._exit(0)  # see `leave` in distributed_backends.py


if __name__ == "__main__":
    main(*sys.argv[1:])
