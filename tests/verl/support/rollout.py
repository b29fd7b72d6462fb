"""A rollout of verl that samples with transformers' `generate`: requests that arrive together make a batch."""

import asyncio
import os
import random
from collections import Counter

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

GATHER_SECONDS = 0.05
SERVER = "transformers_server"


class TransformersServer:
    """Samples each request by random numbers of its own: of seed, step, prompt, and how often it was asked."""

    def __init__(self, path, config):
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.room, self.longest = config.response_length, config.prompt_length + config.response_length
        self.seed = config.seed
        self.global_steps, self.asked = 0, Counter()
        self.waiting = []
        self.task = None

    async def generate(self, request_id, prompt_ids, sampling_params, **unused):
        done = asyncio.get_running_loop().create_future()
        key = tuple(prompt_ids)
        self.asked[key] += 1
        draw = random.Random(f"{self.seed}/{self.global_steps}/{key}/{self.asked[key]}")
        self.waiting.append((list(prompt_ids), sampling_params["temperature"], draw, done))
        if self.task is None:
            self.task = asyncio.create_task(self._soon())
        return await done

    async def _soon(self):
        while self.waiting:
            seen = -1
            while seen != len(self.waiting):  # until no more arrive
                seen = len(self.waiting)
                await asyncio.sleep(GATHER_SECONDS)
            batch, self.waiting = self.waiting, []
            for (*_, done), output in zip(batch, self._sample(batch), strict=True):
                done.set_result(output)
        self.task = None

    @torch.no_grad()
    def _sample(self, batch):
        config = self.model.config
        pad, eos = config.pad_token_id or 0, config.eos_token_id  # Qwen3 names no pad token
        rows, logps = [list(ids) for ids, *_ in batch], [[] for _ in batch]
        ends = [len(ids) + max(1, min(self.room, self.longest - len(ids))) for ids in rows]  # as verl's server of vLLM
        while growing := [
            index
            for index, (row, (prompt, *_)) in enumerate(zip(rows, batch, strict=True))
            if len(row) == len(prompt) or (row[-1] != eos and len(row) < ends[index])
        ]:
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].double()
            for index in growing:
                _, temperature, draw, _ = batch[index]
                logp_V = (logits[index] / (temperature or 1)).log_softmax(-1)
                if temperature:
                    token = int((logp_V.exp().cumsum(0) < draw.random()).sum().clamp(max=len(logp_V) - 1))
                else:
                    token = int(logp_V.argmax())
                rows[index].append(token)
                logps[index].append(float(logp_V[token]))
        return [
            TokenOutput(
                token_ids=row[len(prompt) :],
                log_probs=values,
                stop_reason="completed",
                extra_fields={"global_steps": self.global_steps},
            )
            for row, values, (prompt, *_) in zip(rows, logps, batch, strict=True)
        ]

    async def load(self, state, global_steps):
        self.model.load_state_dict(state, strict=False)
        self.model.tie_weights()
        self.global_steps, self.asked = global_steps or 0, Counter()

    async def nothing(self):
        return None

    wake_up = sleep = clear_kv_cache = abort_all_requests = resume_generation = nothing


class TransformersReplica(RolloutReplica):
    """All replicas share one server, so that what is sampled does not depend on where a request is sent."""

    async def launch_servers(self):
        server = (
            ray.remote(TransformersServer)
            .options(name=SERVER, get_if_exists=True, max_concurrency=1000, num_cpus=0)
            .remote(self.model_config.path, self.config)
        )
        await server.nothing.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"transformers:{self.replica_rank}"


class TransformersRollout(BaseRollout):
    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **unused):
        state = {name: tensor.detach().cpu().clone() for name, tensor in weights}  # on every rank: it gathers
        if os.environ["RANK"] == "0":
            await ray.get_actor(SERVER).load.remote(state, global_steps)
