"""Routes: the verifier against every string of letters, and the graphs."""

import random
from itertools import product

import pytest

from oblrpo.tasks import PathTask, Problem
from oblrpo.tasks.path import hop, parse_question, routes, to_graph

PROBLEM = Problem("ab,cb,cd,ad,de:a>c=", "ab,cb,cd,ad,de:a>c")


@pytest.mark.parametrize("completion", ["abc", "adc", " abc\n"])
def test_right_routes(completion):
    assert PathTask().reward(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "a",
        "c",
        "ac",
        "ab",
        "bc",
        "cba",
        "abcd",
        "adec",
        "ababc",
        "abcdc",
        "adedc",
        "a b c",
        "a,b,c",
        "ABC",
        "abc.",
        "abxc",
        "axc",
    ],
)
def test_wrong_routes(completion):
    assert PathTask().reward(PROBLEM, completion) == 0.0


def is_route(question, text):
    edges, _, ends = question.partition(":")
    listed = edges.split(",") + [edge[::-1] for edge in edges.split(",")]
    hops = [text[place : place + 2] for place in range(len(text) - 1)]
    once = all(text.count(letter) == 1 for letter in text)
    return once and bool(text) and f"{text[0]}>{text[-1]}" == ends and all(step in listed for step in hops)


@pytest.mark.parametrize("nodes", [4, 5])
def test_the_verifier_agrees_with_the_definition_on_every_string(nodes):
    task = PathTask(min_nodes=nodes, max_nodes=nodes)
    for problem in task.train_batch(0, 4):
        right = 0
        for length in range(nodes + 2):
            for letters in product("abcdef"[:nodes], repeat=length):
                text = "".join(letters)
                assert task.reward(problem, text) == float(is_route(problem.answer, text))
                right += is_route(problem.answer, text)
        graph, start, goal = parse_question(problem.answer)
        assert right == len(list(routes(graph, start, goal)))


def test_problems_are_small_connected_graphs_with_routes_of_different_lengths():
    for problem in PathTask().train_batch(0, 200):
        graph, start, goal = parse_question(problem.answer)
        edges = problem.answer.partition(":")[0].split(",")
        assert problem.prompt == problem.answer + "="
        assert sorted(graph) == list("abcdef"[: len(graph)])
        assert 4 <= len(graph) <= 6
        assert len({frozenset(edge) for edge in edges}) == len(edges)
        assert len(graph) <= len(edges) <= len(graph) + 2
        assert all(any(True for _ in routes(graph, start, node)) for node in graph)
        assert len({len(route) for route in routes(graph, start, goal)}) > 1
        assert PathTask().reward(problem, start + goal) == 0.0


def test_hundreds_of_perturbed_routes_are_rejected(demonstrated):
    task, rng = PathTask(), random.Random(0)
    for problem, shown in demonstrated(task, 200):
        place = rng.randrange(1, len(shown))
        wrong = [
            shown[:-1],
            shown[1:],
            shown[::-1],
            shown[:place] + shown[place - 1] + shown[place:],
            shown[:place] + "z" + shown[place:],
        ]
        assert [task.reward(problem, text) for text in wrong] == [0.0] * 5


def test_routes_are_all_simple_routes():
    graph = to_graph(["ab", "bc", "cd", "ad", "ac"])
    assert list(routes(graph, "a", "c")) == ["abc", "ac", "adc"]
    assert list(routes(graph, "ab", "c")) == ["abc"]
    assert list(routes(graph, "c", "c")) == ["c"]


def test_a_noisy_hop_has_no_edge_and_a_quiet_one_leads_to_the_goal():
    graph = to_graph(["ab", "bc", "cd", "de", "ef"])
    assert {hop(graph, "b", "f", random.Random(seed), 1.0) for seed in range(60)} == {"d", "e", "f"}
    assert {hop(graph, "b", "f", random.Random(seed), 0.0) for seed in range(60)} == {"c"}
    assert hop(graph, "fb", "d", random.Random(0), 0.0) == "c"  # goes on from where a wrong hop led
    assert hop(graph, "cdb", "f", random.Random(0), 0.0) == "f"  # cut off: names the goal


def test_noisy_demonstrations_end_at_the_goal_and_visit_nothing_twice(demonstrated):
    for noise in (0.3, 1.0):
        for problem, shown in demonstrated(PathTask(), 200, noise):
            assert f"{shown[0]}>{shown[-1]}" == problem.answer.partition(":")[2]
            assert len(set(shown)) == len(shown)
