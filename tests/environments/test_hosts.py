"""Environments in processes and in threads: whatever a tool does, the policy reads it and others go on."""

import random
import time
from functools import partial

import psutil
import pytest

from oblrpo.environments import Environments
from oblrpo.errors import InputError
from oblrpo.workers import WorkerDied

LONGEST = 100
FILE = '''
import asyncio, os, random, subprocess, sys, time

class Shop:
    """A shop."""
    def __init__(self):
        self.made = os.getpid()
    def reset(self, prompt, stock=3, **row):
        self.stock, self.row = stock, row
        if stock == "none":
            raise ValueError("no stock")
        return f"{stock} left. {random.random()}"
    def buy(self, count: int) -> str:
        """Buy things.

        Args:
            count: how many.
        """
        self.stock -= count
        return f"{self.stock} left"
    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long.
        """
        await asyncio.sleep(seconds)
        self.stock -= 100 * (seconds > 0)
        return "waited"
    def do(self, what: str) -> object:
        """Do something.

        Args:
            what: what to do.
        """
        if what == "raise": raise KeyError("gone")
        if what == "hang": time.sleep(60)
        if what == "spin":
            while True:
                try: time.sleep(9)
                except BaseException: pass
        if what == "exit": sys.exit(3)
        if what == "die": os._exit(3)
        if what == "print": print("x" * 5_000_000); return "printed"
        if what == "megabytes": return "y" * 5_000_000
        if what == "none": return None
        if what == "bytes": return b"\\xff"
        if what == "surrogate": return "a\\ud800b"
        if what == "start": subprocess.Popen(["sleep", "61"]); time.sleep(60)
        if what == "pid": return os.getpid()
        if what == "fork" and os.fork() == 0: raise ValueError("of the child")
        if what == "fork": time.sleep(0.3)
        if what == "image": return [{"type": "image", "image": 0}]
    def get_reward(self):
        if self.stock < 0: raise ValueError("debt")
        return self.stock
    def _private(self):
        return "secret"

def double(n: int) -> int:
    """Twice a number.

    Args:
        n: the number.
    """
    return 2 * n
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "shop.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module", params=["processes", "threads"])
def shops(file, request):
    if request.param == "processes":
        made = Environments(f"{file}:Shop", [f"{file}:double"], LONGEST)
    else:
        exec(compile(FILE, str(file), "exec"), names := {})
        objects = {"python:Shop": names["Shop"], "python:double": names["double"]}
        made = Environments("python:Shop", ["python:double"], LONGEST, objects)
    yield made
    made.close()


def start(host, seed=0, output=0, **row):
    return host.ask({"row": {"prompt": "p", **row}, "seed": seed, "output": output}, 10)


def call(host, name, seconds=10, **arguments):
    return host.ask({"call": name, "arguments": arguments}, seconds)


def test_tools_are_described_by_their_schemas(shops):
    assert [tool["function"]["name"] for tool in shops.tools] == ["double", "buy", "do", "wait"]
    assert shops.tools[1]["function"]["parameters"]["properties"] == {
        "count": {"type": "integer", "description": "how many."}
    }
    assert (shops.name, shops.reward) == ("Shop", "Shop")


def test_an_episode_of_each_host_has_a_state_of_its_own(shops):
    hosts = shops.take(3)
    texts = [start(host, stock=stock)["text"] for host, stock in zip(hosts, (3, 5, 7), strict=True)]
    assert [text[:7] for text in texts] == ["3 left.", "5 left.", "7 left."]
    assert [call(host, "buy", count=2)["text"] for host in hosts] == ["1 left", "3 left", "5 left"]
    assert call(hosts[0], "double", n=4) == {"text": "8"}
    assert hosts[1].ask({"call": "wait", "arguments": {"seconds": 0}}, 10) == {"text": "waited"}
    assert [host.ask({"value": True}, 10) for host in hosts] == [{"value": 1.0}, {"value": 3.0}, {"value": 5.0}]
    start(hosts[0], stock=9)
    assert call(hosts[0], "buy", count=2)["text"] == "7 left"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("do", {"what": "raise"}, "{'error': \"'gone'\"}"),
        ("do", {"what": "exit"}, "{'error': '3'}"),
        ("do", {"what": "none"}, "None"),
        ("do", {"what": "bytes"}, "b'\\xff'"),
        ("do", {"what": "surrogate"}, "a?b"),
        ("do", {"what": "print"}, "printed"),
        ("do", {"what": "megabytes"}, "y" * LONGEST + "... (the first 100 of 5,000,000 characters)"),
        ("do", {"which": "raise"}, "{'error': \"Shop.do() got an unexpected keyword argument 'which'\"}"),
        ("buy", {"count": "two"}, "{'error': \"unsupported operand type(s) for -=: 'int' and 'str'\"}"),
        ("sell", {}, "{'error': 'Tool sell not found.'}"),
        ("_private", {}, "{'error': 'Tool _private not found.'}"),
        ("get_reward", {}, "{'error': 'Tool get_reward not found.'}"),
    ],
)
def test_the_policy_reads_what_a_tool_does(shops, name, arguments, text, capfd):
    [host] = shops.take(1)
    start(host)
    found = call(host, name, **arguments)
    assert (found["text"], "failed" in found) == (text, "error" in text)
    assert call(host, "buy", count=1)["text"] == "2 left"
    shops.put_back([host])


@pytest.fixture(scope="module")
def processes(file):
    made = Environments(f"{file}:Shop", (), LONGEST)
    yield made
    made.close()


@pytest.mark.parametrize("what", ["hang", "start"])
def test_a_call_that_hangs_is_interrupted_and_its_environment_lives_on(processes, what):
    [host] = processes.take(1)
    start(host)
    call(host, "buy", count=1)
    begun = time.monotonic()
    found = call(host, "do", 0.5, what=what)
    assert found["text"] == "{'error': 'took longer than 0.5 s'}"
    assert found["failed"]
    assert time.monotonic() - begun < 5
    assert call(host, "buy", count=1)["text"] == "1 left"
    left = psutil.Process(host.process.pid).children()
    processes.end(host)
    assert not psutil.wait_procs(left, 5)[1]
    assert what == "hang" or left


@pytest.mark.parametrize(("what", "error"), [("die", WorkerDied), ("spin", (TimeoutError, WorkerDied))])
def test_what_cannot_be_interrupted_harms_its_own_episode_alone(processes, what, error):
    host, other = processes.take(2)
    start(host), start(other)
    with pytest.raises(error):
        call(host, "do", 0.5, what=what)
    pid = host.process.pid
    processes.end(host)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert call(other, "buy", count=1)["text"] == "2 left"
    processes.put_back([other])
    assert len(processes.take(2)) == 2


def test_what_begins_and_rewards_an_episode_may_fail(shops):
    [host] = shops.take(1)
    assert start(host, stock="none")["failed"].startswith("ValueError: no stock (")
    start(host, stock=1)
    call(host, "buy", count=2)
    assert host.ask({"value": True}, 10)["failed"].startswith("ValueError: debt (")
    assert call(host, "do", what="image") == {"images": True}
    shops.put_back([host])


def test_groups_begin_alike_and_go_on_apart(processes):
    first, second = processes.take(2)
    texts = [
        start(host, seed, output)["text"]
        for host, seed, output in ((first, 5, 0), (second, 5, 1), (first, 6, 0), (first, 5, 0))
    ]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    processes.put_back([first, second])


def test_all_processes_end_with_the_run(file):
    made = Environments(f"{file}:Shop", (), LONGEST)
    hosts = made.take(3)
    [start(host) for host in hosts]
    pids = [host.process.pid for host in hosts]
    made.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert start(made.take(1)[0])["text"].startswith("3 left")
    made.close()


RESET = "class Shop:\n    def reset(self, **row): pass\n"
BAD = {
    "class Shop:\n    def buy(self): 'Buy.'": "has no method reset",
    RESET: "has no public method that the policy could call",
    f"{RESET}    def buy(self, n): 'Buy.'": "the tool 'buy' cannot be described .*type hint",
    f"{RESET}    def buy(self, n: int): pass": "the tool 'buy' cannot be described .*docstring",
    "class Shop:\n    def __init__(self): raise OSError('no net')": "cannot be made: OSError: no net",
    "import nothing_like_it": "cannot be imported: ModuleNotFoundError",
    "import os; os._exit(1)": "its process ended before it answered",
    "Ship = 1": "has no class 'Shop'",
}


@pytest.mark.parametrize("source", BAD)
def test_what_is_no_environment_is_refused_in_a_sentence(tmp_path, source):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(InputError, match=BAD[source]):
        Environments(f"{tmp_path / 'bad.py'}:Shop")


def test_python_and_paths_do_not_mix(file):
    with pytest.raises(InputError, match="cannot be mixed"):
        Environments(f"{file}:Shop", ["python:f"], 50, {"python:f": random.random})


def test_what_was_late_does_not_go_on_in_the_next_episode(processes):
    """A coroutine that was interrupted is pending."""
    [host] = processes.take(1)
    start(host)
    message = {"call": "wait", "arguments": {"seconds": 0.6}}
    assert "took longer" in host.ask(message, 0.2)["text"]
    start(host, stock=5)
    assert host.ask({"call": "wait", "arguments": {"seconds": 0}}, 10) == {"text": "waited"}
    time.sleep(0.6)
    assert host.ask({"call": "wait", "arguments": {"seconds": 0}}, 10) == {"text": "waited"}
    assert call(host, "buy", count=1)["text"] == "4 left"
    processes.put_back([host])


def test_a_fork_of_a_tool_does_not_answer_for_its_environment(processes):
    [host] = processes.take(1)
    start(host)
    assert call(host, "do", what="fork")["text"] == "None"
    assert call(host, "buy", count=1)["text"] == "2 left"
    processes.put_back([host])


def test_limits_beyond_all_clocks_are_long(processes):
    [host] = processes.take(1)
    start(host)
    assert host.ask({"call": "buy", "arguments": {"count": 1}}, 1e30)["text"] == "2 left"
    processes.put_back([host])


class Unmade:
    """Cannot be made."""

    def __init__(self):
        raise OSError("no net")


def test_what_cannot_be_made_says_why(tmp_path):
    with pytest.raises(InputError, match=r"environment 'Unmade from Python' cannot be made: OSError: no net"):
        Environments("python:Unmade", objects={"python:Unmade": Unmade})
    with pytest.raises(InputError, match="a tool is a partial without a name"):
        Environments("", ["python:f"], objects={"python:f": partial(print, 1)})
    mark = tmp_path / "made"
    source = f"{RESET}    def buy(self): 'Buy.'\n    def __init__(self):\n        import os\n"
    source += f"        if os.path.exists({str(mark)!r}): raise OSError('no net')\n"
    (tmp_path / "late.py").write_text(source)
    made = Environments(f"{tmp_path / 'late.py'}:Shop")
    mark.write_text("")
    with pytest.raises(InputError, match=r"environment '.*late.py:Shop' cannot be made: OSError: no net"):
        made.take(1)
    made.close()


def test_a_folder_for_sockets_may_have_too_long_a_name(file, tmp_path, monkeypatch):
    (long := tmp_path / ("d" * 120)).mkdir()
    made = Environments(f"{file}:Shop")
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(InputError, match="do not start: AF_UNIX path too long; set TMPDIR to a shorter path"):
        made.take(1)
    made.close()
