"""Tasksets of verifiers as rows, environment and reward."""

import asyncio
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import verifiers.v1 as vf
from aiohttp import web
from pydantic import Field
from transformers.utils import get_json_schema
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

import oblrpo
from oblrpo.adapters.verifiers import from_taskset
from oblrpo.environments import Environments
from oblrpo.errors import InputError
from oblrpo.policy import make_policy
from oblrpo.policy.tool_calls import ToolFormat
from oblrpo.rollout import EpisodeSampler, TransformersSampler
from oblrpo.settings import PolicyConfig, TurnsConfig
from oblrpo.tasks import Problem
from oblrpo.tasks.task import Messages
from oblrpo.trainer.setup import with_tools
from tests.acting import save_policy
from tests.verifiers.shop import ShopData, ShopTask, ShopTaskConfig, ShopTaskset, ShopToolset

ROOT = Path(__file__).parents[2]


def shop():
    return from_taskset(ShopTaskset(vf.TasksetConfig()))


def taskset(kind=ShopTask, data=ShopData, package="", **changed):
    """A taskset of one task, whose data are changed."""
    row = data(**{"prompt": "Buy apple", "item": "apple"} | changed)

    class One(vf.Taskset[kind, vf.TasksetConfig]):
        def load(self):
            return [kind(row, ShopTaskConfig())]

    return One(vf.TasksetConfig(id=package))


def turn(text, *calls):
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


SCRIPT = [
    turn("", ("shop_price", {"item": "plum", "pieces": 2}), ("shop_take", {"item": "plum"})),
    turn("so", ("shop_take", {"item": "tea"})),
    turn("", ("shop_price", {"pieces": 1})),
    turn("done"),
]


async def played(given, row, script):
    """An episode as `rollout.episodes` plays it: results as text, errors in their words."""
    environment, messages = given.environment(), []
    await environment.reset(**row)
    for said in script:
        messages.append(said)
        for call in said.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                text = await asyncio.create_task(getattr(environment, name)(**arguments))
            except RuntimeError as error:
                text = str(error)
            messages.append({"role": "tool", "name": name, "content": text})
    return environment, messages


async def endpoint(script):
    """A server that says a script; returns it and its address."""

    async def answer(request):
        body = await request.json()
        said = script[sum(message["role"] == "assistant" for message in body["messages"])]
        delta = {"role": "assistant", "content": said["content"]}
        delta["tool_calls"] = [
            {"index": place, "id": f"id{place}", "type": "function"}
            | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for place, call in enumerate(said.get("tool_calls", ()))
        ]
        last = {"delta": {}, "finish_reason": "tool_calls" if delta["tool_calls"] else "stop"}
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for choice in ({"delta": delta, "finish_reason": None}, last):
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            await reply.write(f"data: {json.dumps(chunk | {'choices': [{'index': 0, **choice}]})}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    await (runner := web.AppRunner(app)).setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"


def test_verifiers_plays_and_scores_the_same_episode_alike(tmp_path, monkeypatch):
    """Its own rollout with its harness `null`, its tool servers and its scoring, on what a server says."""

    async def prepare_uv_script(self, script, env=None, *, activate=True):  # without uv, which asks an index
        (program := tmp_path / "program.py").write_text(script)
        return [sys.executable, str(program)]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepare_uv_script)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def both():
        runner, address = await endpoint(SCRIPT)
        client = {"type": "eval", "base_url": address, "api_key_var": "NONE"}
        config = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"}, model="m", client=client)
        async with vf.make_agent(config) as agent:
            theirs = await agent.run(list(ShopTaskset(vf.TasksetConfig()))[2])
        await runner.cleanup()
        given = shop()
        environment, messages = await played(given, given.rows[2], SCRIPT)
        return theirs, environment, await given.reward([messages], [2], [environment])

    theirs, environment, rewards = asyncio.run(both())
    assert theirs.ok, theirs.errors
    ours = environment._played.trace
    assert rewards == [theirs.reward] == [2.5]

    def told(trace):
        """All but the ids of calls."""
        calls = [[(call.name, json.loads(call.arguments)) for call in getattr(node.message, "tool_calls", None) or []]
                 for node in trace.nodes]  # fmt: skip
        said = [(node.message.role, node.message.content or "", node.sampled) for node in trace.nodes]
        return said, calls, trace.num_turns, trace.stop_condition, trace.rewards, trace.metrics, trace.info, trace.state

    assert told(ours) == told(theirs)
    results = [message.tool_call_id for message in ours.tool_messages]
    assert results == [call.id for message in ours.assistant_messages for call in message.tool_calls or []]
    for tool in theirs.tools:
        mine = get_json_schema(getattr(environment, tool.name))["function"]
        assert tool.description.startswith(mine["description"])
        assert mine["parameters"].get("required") == tool.parameters.get("required")
        types_of = [
            {name: schema["type"] for name, schema in each["properties"].items()}
            for each in (mine["parameters"], tool.parameters)
        ]
        assert types_of[0] == types_of[1]


def test_what_is_said_of_arguments_reaches_the_policy():
    schema = get_json_schema(shop().environment().shop_price)["function"]["parameters"]["properties"]
    said = {name: each["description"] for name, each in schema.items()}
    assert said == {"item": "the thing to buy.", "pieces": "how many."}


def test_episodes_have_states_of_their_own_and_a_failed_call_leaves_none_behind():
    given = shop()

    async def three():
        scripts = [SCRIPT[1:2], [turn("", ("shop_take", {"item": "apple"}))] * 2, []]
        done = await asyncio.gather(*(played(given, given.rows[0], script) for script in scripts))
        scores = await given.reward([messages or [turn("done")] for _, messages in done], [0] * 3, [e for e, _ in done])
        return [environment._played.trace.state.basket for environment, _ in done], scores

    baskets, scores = asyncio.run(three())
    assert baskets == [{"bag": 1}, {"bag": 1, "apple": 2}, {"bag": 1}]
    assert scores == [0.0, 0.0, 0.5]


def test_arguments_that_are_no_object_are_scored_as_they_were_written():
    """What parsers make of JSON that was encoded twice."""
    given = shop()
    environment, _ = asyncio.run(played(given, given.rows[0], []))
    said = [turn("", ("shop_take", '{"item": "plum"}')), {"role": "tool", "name": "shop_take", "content": "error"}]
    assert asyncio.run(given.reward([[*said, turn("done")]], [0], [environment])) == [0.5]
    (call,) = environment._played.trace.assistant_messages[0].tool_calls
    assert json.loads(call.arguments) == '{"item": "plum"}'


@pytest.mark.parametrize("environments", [None, [None]])  # those of another process are not handed over
def test_a_reward_without_its_environment_is_refused(environments):
    with pytest.raises(InputError, match="reads its environment; give both from Python"):
        asyncio.run(shop().reward(["done"], [0], environments))


def test_an_image_is_an_error_that_the_policy_reads():
    given = shop()
    _, messages = asyncio.run(played(given, given.rows[0], [turn("", ("shop_photo", {}))]))
    assert "image" in messages[-1]["content"]


class Answered(vf.Task[ShopData]):
    """No tools: an answer ends the episode, whatever a stop says."""

    @vf.stop
    async def one_turn(self, trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def short(self, trace) -> float:
        return 1 / len(trace.last_reply)


def test_without_tools_text_is_scored_and_an_error_stands_for_its_own_completion_alone():
    given = from_taskset(taskset(Answered, system_prompt="Answer."))
    assert given.environment is None
    assert given.rows[0]["prompt"] == [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Buy apple"},
    ]
    half, error, quarter = asyncio.run(given.reward(["ab", "", [turn("abcd")]], [0] * 3))
    assert (half, quarter) == (0.5, 0.25)
    assert "ZeroDivisionError" in str(error)


@pytest.mark.parametrize(("read", "what"), [("num_output_tokens", "usage"), ("is_truncated", "finish_reason")])
def test_a_hook_that_counts_tokens_fails_by_name(read, what):
    class Counted(Answered):
        @vf.reward
        async def tokens(self, trace) -> float:
            assert trace.messages[-1].content == "ab"
            return getattr(trace, read)

    (error,) = asyncio.run(from_taskset(taskset(Counted)).reward(["ab"], [0]))
    assert f"no attribute '{what}'" in str(error)


class Hooked(ShopTask):
    @vf.stop
    async def enough(self, trace) -> bool:
        return trace.num_turns >= 4


class Rewritten(ShopTask):
    @vf.intercept
    async def cut(self, request: vf.Request) -> vf.Request | None:
        return None


class Programmed(ShopTask):
    @vf.reward
    async def runs(self, trace, runtime) -> float:
        return 1.0


class Furnished(ShopTask):
    async def setup(self, trace, runtime):
        await runtime.write("file", b"")


class Further(Furnished):
    """It inherits what it is refused for."""


class Unscored(vf.Task[ShopData]):
    pass


class Elsewhere(ShopTask):
    @classmethod
    def toolsets(cls, config):
        return [ShopToolset(vf.ToolsetConfig(url="http://127.0.0.1:1/mcp"))]


class Registered(ShopTask):
    @classmethod
    def toolsets(cls, config):
        class Other(ShopToolset):
            def register(self, mcp):
                super().register(mcp)

        return [Other(config.tools)]


class Finding(vf.Task[ShopData]):
    @vf.reward
    async def found(self, trace) -> float:
        return 1.0


class BrokenToolset(vf.Toolset[vf.SharedToolsetConfig]):
    async def setup(self):
        raise OSError("no index")

    @vf.tool
    def find(self, words: str) -> str:
        """Search."""
        return words


def broken():
    class Shared(type(taskset(Finding))):
        @classmethod
        def toolsets(cls, config):
            return [BrokenToolset(vf.SharedToolsetConfig())]

    return Shared(vf.TasksetConfig())


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: taskset(Hooked), r"ends episodes by @vf.stop; set max_turns and leave out: without=\['enough'\]"),
        (lambda: taskset(Rewritten), "rewrites messages"),
        (lambda: taskset(Programmed), "in a runtime of verifiers"),
        (lambda: taskset(Further), "in a runtime of verifiers"),
        (lambda: taskset(Unscored), r"no @vf.reward and no judge"),
        (lambda: taskset(Elsewhere), "run elsewhere"),
        (lambda: taskset(Registered), "not marked by @vf.tool"),
        (lambda: taskset(prompt=None), "a user opens the conversation"),
        (lambda: taskset(image="python:3.11"), "needs a container"),
        (lambda: taskset(prompt=[vf.UserMessage(content=[vf.TextContentPart(text="a")])]), "several parts"),
        (lambda: taskset(package="playing"), r"Env of its own \(Playing\)"),
        (lambda: "not-there", "cannot be loaded"),
        (broken, "cannot be set up: no index"),
    ],
)
def test_what_cannot_be_done_alike_is_refused_by_name(made, why, monkeypatch):
    class Playing(vf.SingleAgentEnv):
        async def run(self, task, agents):
            await agents.agent.run(task)

    package = types.ModuleType("playing")
    package.Playing, package.__all__ = Playing, ["Playing"]
    package.__spec__ = types.SimpleNamespace(name="playing")
    monkeypatch.setitem(sys.modules, "playing", package)
    with pytest.raises(InputError, match=why):
        from_taskset(made())


def test_a_stop_may_be_left_out_and_an_endless_taskset_be_cut():
    assert len(from_taskset(taskset(Hooked), without=["enough"]).rows) == 1
    with pytest.raises(InputError, match=r"no @vf.stop called many"):
        from_taskset(taskset(Hooked), without=["enough", "many"])

    class Endless(ShopTaskset):
        INFINITE = True

    with pytest.raises(InputError, match="endless; give most="):
        from_taskset(Endless(vf.TasksetConfig()))
    assert len(from_taskset(Endless(vf.TasksetConfig()), most=7).rows) == 7


class Seen(vf.State):
    said: list[str] = Field(default_factory=list)


class Doing(vf.Toolset[vf.ToolsetConfig, Seen]):
    TOOL_PREFIX = None

    @vf.tool
    def do(self, what: str) -> str:
        """Do something."""
        if "c" in what:
            raise ValueError("no c")
        self.state.said.append(what)
        return what.upper()


class Done(vf.Task[ShopData, Seen]):
    @classmethod
    def toolsets(cls, config):
        return [Doing(vf.ToolsetConfig())]

    @vf.reward
    async def done(self, trace) -> float:
        return float(any(self.data.item in said for said in trace.state.said))


class Deeds(vf.Taskset[Done, vf.TasksetConfig]):
    def load(self):
        return [Done(ShopData(prompt=f"Row {row}", item="ab"[row % 2]), vf.TaskConfig()) for row in range(40)]


def test_the_tokens_are_those_that_were_drawn(tmp_path):
    """Behind results, too, and where a tokenizer would read the text as other tokens."""
    policy = make_policy(
        PolicyConfig(model=str(save_policy(tmp_path, "!doab")), chat=True, device="cpu", dtype="float64")
    )
    given, name = from_taskset(Deeds(vf.TasksetConfig())), "python:it"
    environments = Environments(name, objects={name: given.environment})
    policy = with_tools(policy, environments)
    how = ToolFormat.of(policy.tokenizer, policy.format, environments.tools)
    limits = TurnsConfig(environment=name, max_turns=4)
    sampler = EpisodeSampler(TransformersSampler(policy, True), policy, environments, how, limits)
    torch.manual_seed(0)
    rows = [Problem(Messages(row["prompt"]), "", columns={"task": row["task"]}) for row in given.rows[:16]]
    rollouts = sampler.sample(rows, 8, 60, 1.0)
    sequences, own_SC = rollouts.sequences, rollouts.sequences.own_SC.bool()
    with torch.no_grad():
        logits_STV = policy.model(
            input_ids=sequences.ids_ST, attention_mask=sequences.mask_ST,
            position_ids=(sequences.mask_ST.cumsum(1) - 1).clamp(min=0),
        ).logits[:, sequences.start - 1 : -1]  # fmt: skip
    logps_SC = logits_STV.log_softmax(-1).gather(2, sequences.completion_SC[..., None])[..., 0]
    torch.testing.assert_close(rollouts.sampler_logps_SC[own_SC], logps_SC[own_SC], rtol=1e-9, atol=1e-9)
    ids = rollouts.ids()
    assert 0 < sum(policy.tokenizer(policy.tokenizer.decode(row)).input_ids != row for row in ids) < len(ids)
    assert max(episode.turns for episode in rollouts.episodes) == 4


def test_a_policy_trains_on_it(tmp_path):
    """The reward of every episode that read all its results is that of the conversation beside it."""
    given = from_taskset(Deeds(vf.TasksetConfig()))
    run = oblrpo.train(
        model=str(save_policy(tmp_path / "model")), chat=True, data=given.rows, environment=given.environment,
        reward=given.reward, steps=2, prompts_per_step=8, num_generations=8, max_completion_length=60, max_turns=3,
        output=tmp_path / "run", progress=False,
    )  # fmt: skip
    lines = (tmp_path / "run" / "completions" / "step_1.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    rows = [row for row in every if row["stop"] != "length"]
    results = [[message["content"] for message in row["messages"] if message["role"] == "tool"] for row in rows]
    items = ["AB"[int(row["prompt"].split()[-1]) % 2] for row in rows]
    wanted = [
        float(any(item in each.split("rror")[0] for each in said)) for item, said in zip(items, results, strict=True)
    ]
    assert [row["reward"] for row in rows] == wanted
    assert 0 < sum(wanted) < len(wanted)
    assert "{'error': 'Error executing tool do: no c'}" in {result for said in results for result in said}
    first = next(metrics for metrics in run.metrics if metrics["step"] == 1)
    assert first["rewards/Deeds/mean"] == pytest.approx(sum(row["reward"] for row in every) / len(every))
    assert first["tools/failure_frequency"] > 0
