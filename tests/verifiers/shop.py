"""A taskset of verifiers as its users write them: tools, one of which keeps a state, hooks, and a reward of both."""

import verifiers.v1 as vf
from pydantic import Field

PRICES = {"apple": 3, "bread": 4, "plum": 2}


class ShopState(vf.State):
    basket: dict[str, int] = Field(default_factory=dict)


class ShopToolset(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = "shop"

    async def setup_task(self, task):
        self.wanted = task.item

    @vf.tool
    def price(self, item: str, pieces: int = 1) -> list[dict]:
        """What so many pieces cost.

        Args:
            item: the thing to buy.
            pieces: how many.
        """
        return [{"item": item, "price": PRICES[item] * pieces}, {"wanted": self.wanted}]

    @vf.tool(name="take")
    async def take_it(self, item: str) -> str:
        """Put a piece into the basket."""
        self.state.basket[item] = self.state.basket.get(item, 0) + 1
        if item not in PRICES:
            raise ValueError(f"there is no {item}")
        return f"{self.state.basket}"

    @vf.tool
    async def photo(self) -> object:
        """A picture of the shop."""
        from mcp.server.mcpserver import Image

        return Image(data=b"PNG", format="png")


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopData(vf.TaskData):
    item: str


class ShopTask(vf.Task[ShopData, ShopState, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [ShopToolset(config.tools)]

    async def setup(self, trace):
        trace.state.basket["bag"] = 1

    async def finalize(self, trace):
        trace.info["turns"] = trace.num_turns

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.info["turns"]

    @vf.reward(weight=2.0)
    async def bought(self, trace) -> float:
        return float(trace.state.basket == {"bag": 1, self.data.item: 1})

    @vf.reward(weight=0.5)
    async def said(self, trace) -> float:
        return float(trace.last_reply == "done" and all(message.name for message in trace.tool_messages))


class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for day in range(20):
            for item in PRICES:
                data = ShopData(prompt=f"Day {day}: buy {item}", system_prompt="A shop.", item=item)
                yield ShopTask(data, ShopTaskConfig())


if __name__ == "__main__":
    ShopToolset.run()
