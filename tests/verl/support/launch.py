"""Runs verl's own `main_ppo` on a CPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

MODULES = "tests.verl.support.cpu"
ROOT = Path(__file__).resolve().parents[3]


def overrides(folder: Path, ranks: int, steps: int) -> dict[str, object]:
    """Settings that a run on a CPU needs, whatever the algorithm."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    return {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 16,
        "data.max_prompt_length": 16,
        "data.max_response_length": 4,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        f"{model}.path": folder / "model",
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"{actor}.fsdp_config.dtype": "float32",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"+{actor}.fsdp_config.mixed_precision.reduce_dtype": "fp32",
        f"+{actor}.fsdp_config.mixed_precision.buffer_dtype": "fp32",
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.ppo_mini_batch_size": 16,
        f"{actor}.ppo_micro_batch_size_per_gpu": 32,
        f"{actor}.optim.lr": 2e-3,
        f"{actor}.optim.weight_decay": 0.0,
        f"{rollout}.name": "transformers",
        f"{rollout}.n": 8,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 32,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.load_format": "auto",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": ROOT / "tests/verl/support/task.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 12,
        "+ray_kwargs.ray_init.num_gpus": ranks,
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": False,
    }


def environment(folder: Path, dump: Path | None = None) -> dict[str, str]:
    """The environment of a run on a CPU, which leaves its first batch in the file `dump`."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    modules = f"{MODULES},tests.verl.support.dump" if dump else MODULES
    return os.environ | {
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT}/src",
        "VERL_USE_EXTERNAL_MODULES": modules,
        "OBLRPO_TEST_DUMP": str(dump),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl's engines are registered for cuda and npu only
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_niceness": "0",  # or workers run 15 below whoever starts them
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def command(settings: dict[str, object]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def run(
    folder: Path, ranks: int = 1, steps: int = 3, timeout: float = 1800, dump: Path | None = None, **changes: object
) -> tuple[int, str]:
    """Exit code, and what was printed (also in FOLDER/log); keys of `changes` are dotted names."""
    settings = overrides(folder, ranks, steps) | changes
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command(settings),
            cwd=folder,
            env=environment(folder, dump),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    return done.returncode, (folder / "log").read_text()


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """What verl's file logger wrote, by step."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be being written
    return {line["step"]: line["data"] for line in whole}
