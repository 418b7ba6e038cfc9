"""What examples/ launches with: accelerate takes the files for what they say, and the shell takes the job scripts."""

import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

EXAMPLES = Path(__file__).parents[1] / "examples"
TYPES = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "single": "NO", "zero3": "DEEPSPEED"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("accelerate/*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == TYPES[path.stem]
    assert config.num_processes == (1 if path.stem == "single" else 8)
    if path.stem == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3 and config.deepspeed_config["zero3_save_16bit_model"]
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2, "rollouts of several turns are refused under the first"
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda path: path.stem)
def test_job_scripts(path):
    """They parse, and name files that are there and options that the example has."""
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    for name in ("examples/train_prompt_r1.py", "examples/accelerate/zero3.yaml", "examples/configs/qwen3_4b.yaml"):
        assert name in text and (EXAMPLES.parent / name).exists()


@pytest.mark.parametrize(("processes", "batch", "passes"), [(8, 640, 20), (6, 720, 20), (16, 640, 10)])
def test_batches_of_the_job_scripts_fit(tmp_path, monkeypatch, processes, batch, passes):
    """The paper's groups of five, two rollouts a GPU and pass, on the processes that the scripts start."""
    from agentic_prompting import PromptR1Config

    monkeypatch.setattr(PromptR1Config, "world_size", processes)
    args = PromptR1Config(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=passes, generation_batch_size=batch,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    assert args.steps_per_generation == batch // (2 * processes) and args.steps_per_generation % passes == 0
