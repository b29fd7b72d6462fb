"""Find a route in a small undirected graph of letters: `ab,bc,cd,ad:a>c=` -> `abc` or `adc`."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from string import ascii_lowercase

from oblrpo.tasks.task import GeneratedTask, Problem, check_whole

MOST_EXTRA_EDGES = 3
Graph = dict[str, set[str]]


class PathTask(GeneratedTask):
    """Walk from start to goal in a graph of `min_nodes` to `max_nodes` letters.

    Start and goal never share an edge, and routes of different lengths join them; all of these count.
    The answer of a problem is its prompt without the `=`.
    """

    name = "path"
    about = (
        "Find a way from one letter to another along the edges of a small graph, visiting none twice: "
        "`ab,bc,cd,ad:a>c=` asks for `abc` or `adc`."
    )

    def __init__(self, seed: int = 0, min_nodes: int = 4, max_nodes: int = 6) -> None:
        """Set the seed and the size of the graphs: 4 <= min_nodes <= max_nodes <= 9."""
        super().__init__(seed)
        self.min_nodes = check_whole("Task 'path': min_nodes", min_nodes, 4, 9)
        self.max_nodes = check_whole("Task 'path': max_nodes", max_nodes, min_nodes, 9)

    def draw(self, rng: random.Random) -> Problem:
        """Return a random connected graph with two of its letters, at least two hops apart, as start and goal."""
        while True:
            edges = random_edges(ascii_lowercase[: rng.randint(self.min_nodes, self.max_nodes)], rng)
            graph = to_graph(edges)
            start, goal = rng.sample(sorted(graph), 2)
            if goal not in graph[start] and len({len(route) for route in routes(graph, start, goal)}) > 1:
                question = f"{','.join(edges)}:{start}>{goal}"
                return Problem(question + "=", question)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the letters lead from start to goal along edges and none comes twice."""
        graph, start, goal = parse_question(problem.answer)
        walk = completion.strip()
        if not walk or len(set(walk)) < len(walk):
            return 0.0
        joined = all(there in graph.get(here, ()) for here, there in pairwise(walk))
        return float(joined and walk[0] == start and walk[-1] == goal)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return a random route; a wrong hop jumps to a letter without an edge."""
        graph, start, goal = parse_question(problem.answer)
        walk = start
        while walk[-1] != goal:
            walk += hop(graph, walk, goal, rng, noise)
        return walk


def random_edges(nodes: str, rng: random.Random) -> list[str]:
    """Return the edges, in random order and direction, of a random tree with one to three edges more."""
    order = rng.sample(nodes, len(nodes))
    tree = {"".join(sorted(node + rng.choice(order[:place]))) for place, node in enumerate(order) if place}
    others = [pair for pair in map("".join, combinations(nodes, 2)) if pair not in tree]
    extra = rng.sample(others, rng.randint(1, min(MOST_EXTRA_EDGES, len(others))))
    edges = ["".join(rng.sample(pair, 2)) for pair in sorted([*tree, *extra])]
    rng.shuffle(edges)
    return edges


def to_graph(edges: list[str]) -> Graph:
    """Return the neighbours of every node of an undirected graph given as edges such as `ab`."""
    graph: Graph = {}
    for edge in edges:
        graph.setdefault(edge[0], set()).add(edge[1])
        graph.setdefault(edge[1], set()).add(edge[0])
    return graph


def parse_question(question: str) -> tuple[Graph, str, str]:
    """Return the graph, the start and the goal of `ab,bc,cd,ad:a>c`."""
    edges, _, ends = question.partition(":")
    start, _, goal = ends.partition(">")
    return to_graph(edges.split(",")), start, goal


def routes(graph: Graph, walk: str, goal: str) -> Iterator[str]:
    """Yield every way, in alphabetic order, of continuing `walk` to the goal without visiting a node twice."""
    if walk[-1] == goal:
        yield walk
        return
    for node in sorted(graph[walk[-1]].difference(walk)):
        yield from routes(graph, walk + node, goal)


def hop(graph: Graph, walk: str, goal: str, rng: random.Random, noise: float) -> str:
    """Return the next letter: on a random route to the goal or, with probability `noise`, a wrong one."""
    wrong = sorted(graph.keys() - graph[walk[-1]] - set(walk))
    if wrong and rng.random() < noise:
        return rng.choice(wrong)
    ways = list(routes(graph, walk, goal))
    # After a wrong hop the goal may be cut off: then jump to it.
    return rng.choice(ways)[len(walk)] if ways else goal
