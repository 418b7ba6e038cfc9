"""What examples/ launches with: accelerate takes the files for what they say, and the shell takes
the job scripts.
"""

import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

EXAMPLES = Path(__file__).parents[2] / "examples"
TYPES = {
    "cpu2": "MULTI_GPU",
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "single": "NO",
    "zero3": "DEEPSPEED",
}


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("accelerate/*.yaml")), ids=lambda path: path.stem
)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == TYPES[path.stem]
    assert config.num_processes == {"single": 1, "cpu2": 2}.get(path.stem, 8)
    if path.stem == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3
        assert config.deepspeed_config["zero3_save_16bit_model"]
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2, (
            "rollouts of several turns are refused under the first"
        )
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda path: path.stem
)
def test_job_scripts(path):
    """They parse, and name files that are there and options that the example has."""
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    for name in (
        "examples/train_prompt_r1.py",
        "examples/accelerate/zero3.yaml",
        "examples/configs/qwen3_4b.yaml",
    ):
        assert name in text and (EXAMPLES.parent / name).exists()


@pytest.mark.parametrize(("processes", "batch", "passes"), [(8, 640, 4), (6, 720, 5), (16, 640, 2)])
def test_batches_of_the_job_scripts_fit(tmp_path, monkeypatch, processes, batch, passes):
    """The paper's groups of five, two rollouts a GPU and pass, on the processes that the scripts
    start.
    """
    from agentic_prompting import PromptR1Config

    monkeypatch.setattr(PromptR1Config, "world_size", processes)
    args = PromptR1Config(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=passes,
        generation_batch_size=batch,
        use_cpu=True,
        bf16=False,
    )
    assert args.steps_per_generation == batch // (2 * processes)
    assert args.steps_per_generation % passes == 0
    assert 60 <= 2 * processes * passes <= 64, "rollouts an update (Table 6)"


def test_a_context_of_ones_own_is_kept_beside_the_models(tmp_path):
    """Table 6's 8,192 tokens of prompt and response together; what the model can read counts where
    it is less.
    """
    from agentic_prompting import MultiTurnGRPOConfig, PromptR1Config

    quiet = {"use_cpu": True, "bf16": False}
    paper = PromptR1Config(str(tmp_path), **quiet)
    assert [paper.limits(readable).max_context for readable in (None, 40_960, 2048)] == [
        8192,
        8192,
        2048,
    ]
    assert MultiTurnGRPOConfig(str(tmp_path), **quiet).limits().max_context is None
    with pytest.raises(ValueError, match="max_context must be at least 1"):
        PromptR1Config(str(tmp_path), max_context=0, **quiet)
