"""Set up a job of several processes on a CPU, start it with a time limit, and end it.

Three mistakes here would run one process, or plain DDP, with exit code 0. So every run reports its
type (`stated`), and the tests compare it.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from support.forked import ALL, forked

HERE = Path(__file__).parent
UNTIL_THE_END = ExitStack()  # of the process

# The distributed type that accelerate must report, by back end.
TYPES = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def prepare(backend, folder):
    """Set up the back end as `accelerate launch` would; call it in a new process, before accelerate
    is used.
    """
    if backend.startswith("zero"):
        import deepspeed

        # Otherwise compiled at the first launch, which takes 47 s; without it gloo computes the
        # same sums.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = Path(folder) / f"deepspeed-{os.getpid()}.json"
        config.write_text(json.dumps(_deepspeed(stage=int(backend[-1]))))
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
        }
    if backend == "fsdp2":
        from agentic_prompting.planning.fake_gpu import FSDP2_VARIABLES, fsdp_on_a_cpu

        os.environ |= FSDP2_VARIABLES
        UNTIL_THE_END.enter_context(fsdp_on_a_cpu())


def _deepspeed(stage):
    # Buffers for small models; the default of gigabytes would fill the machine with 4 trainers in 2
    # processes.
    optimization = {"stage": stage, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    if stage == 3:
        # By default a tiny model is not sharded, and gathers that do not happen cannot fail.
        optimization |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    # SGD, whose step is the gradient, is not on DeepSpeed's list.
    allowed = {"zero_allow_untested_optimizer": True}
    batch = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {"zero_optimization": optimization, **allowed, **dict.fromkeys(batch, "auto")}


def stated(trainer):
    """The run's actual type and size, and whether the parameters are sharded."""
    from torch.distributed.tensor import DTensor

    accelerator = trainer.accelerator
    parameters = list(trainer.model_wrapped.parameters())
    return {
        "type": accelerator.distributed_type.name,
        "world": accelerator.num_processes,
        "sharded": all(isinstance(p, DTensor) for p in parameters)
        or sum(p.numel() for p in parameters) == 0,
        "run": trainer.monitor.run_id,
    }


def launch(script, processes, settings, timeout=280, check=True, imported=ALL):
    """Run a script of this folder in `processes` processes, with `settings` as JSON. They are
    forked from a process that has imported what is slow to import. Returns their exit codes and
    what they printed.
    """
    log = Path(settings["folder"]) / "printed.log"
    group = processes > 1 or settings["backend"].startswith(
        "zero"
    )  # DeepSpeed makes one of one process, too
    codes = forked(HERE / script, [json.dumps(settings)], processes, log, timeout, group, imported)
    assert not any(codes) or not check, f"exit codes {codes}:\n{log.read_text()[-5000:]}"
    return codes, log.read_text()


def launch_under_torchrun(script, processes, settings, timeout=280):
    """As [`launch`], by torchrun, which ends the other processes when one has failed."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    done = subprocess.run(
        [*command, str(HERE / script), json.dumps(settings)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return [done.returncode], done.stderr


def leave(folder, seen):
    """Write this process's observations to a file, and end the process."""
    from accelerate import PartialState

    state = PartialState()
    (Path(folder) / f"seen-{state.process_index}.json").write_text(json.dumps(seen))
    state.destroy_process_group()
    # Without the interpreter's teardown, in which 1 of 8 launches aborted after all work was done:
    # a native thread of torch 2.13 requested the GIL after it was gone. The tests read only the
    # file.
    os._exit(0)


def read(folder, processes):
    return [json.loads((Path(folder) / f"seen-{i}.json").read_text()) for i in range(processes)]
