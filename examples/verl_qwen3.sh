#!/usr/bin/env bash
# OBLR-PO on verl with Qwen3: 128 prompts of 8 outputs a step, eta_0 = 1e-2, the settings reported for the paper
# (arXiv 2511.23310). Needs GPUs, vLLM, flash-attn (or ATTENTION=sdpa, which is slower), and verl's data preparation
# (prompt, reward_model, data_source in parquet).
# Nothing of this script has been run on GPUs by its authors; its settings are checked by tests/verl/test_parts.py.
#
#   MODEL=Qwen/Qwen3-4B TRAIN=train.parquet VAL=val.parquet bash examples/verl_qwen3.sh [overrides]
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-4B}
TRAIN=${TRAIN:-$HOME/data/train.parquet}
VAL=${VAL:-$HOME/data/val.parquet}
GPUS=${GPUS:-8} # on each node
NODES=${NODES:-1}
LONGEST=${LONGEST:-4096} # tokens of an answer
# eta_0 stands for 1 / c of a step along the gradient itself, hence SGD. With OPTIMIZER=AdamW a step has the length of
# the rate whatever the gradient: start from the rate you would fix (1e-6), and somewhat above it, as the factor is below 1.
OPTIMIZER=${OPTIMIZER:-SGD}
ATTENTION=${ATTENTION:-flash_attention_2} # verl's default; it is no dependency of verl
RATE=${RATE:-1e-2}

actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  algorithm.adv_estimator="${ESTIMATOR:-oblr_po}" \
  trainer.v1.trainer_mode=oblr_po \
  $actor.strategy=fsdp2 \
  $actor.loss_agg_mode=seq-mean-token-sum \
  $actor.policy_loss.loss_mode=gpg \
  $actor.ppo_mini_batch_size=128 \
  data.train_batch_size=128 \
  $rollout.n=8 \
  $actor.optim.optimizer="$OPTIMIZER" \
  $actor.optim.lr="$RATE" \
  $actor.optim.weight_decay=0 \
  +oblrpo.schedule=debiased \
  +oblrpo.score_norms=exact \
  +oblrpo.inner_products=sketched \
  +oblrpo.ledger_steps=20 \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  data.max_prompt_length=1024 \
  data.max_response_length="$LONGEST" \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL" \
  +actor_rollout_ref.model.override_config.attn_implementation="$ATTENTION" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  $actor.use_dynamic_bsz=True \
  $actor.ppo_max_token_len_per_gpu=$((LONGEST + 1024)) \
  $actor.fsdp_config.param_offload=False \
  $rollout.name=vllm \
  $rollout.tensor_model_parallel_size=1 \
  $rollout.temperature=1.0 \
  $rollout.top_p=1 \
  $rollout.top_k=-1 \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.nnodes="$NODES" \
  trainer.project_name=oblrpo \
  trainer.experiment_name="${NAME:-qwen3}" \
  trainer.logger='["console","tensorboard"]' \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=1 \
  "$@"
