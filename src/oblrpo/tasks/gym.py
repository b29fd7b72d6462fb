"""The tasks of the library reasoning-gym: procedurally generated problems, scored by rules of their own.

Stojanovski et al., Reasoning Gym: Reasoning Environments for RL with Verifiable Rewards, arXiv 2505.24760.
"""

import importlib.util
import json
import random
import re
from collections.abc import Iterator, Sequence
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

from oblrpo.errors import InputError, pip_install
from oblrpo.tasks.data import PLACEHOLDER, check_template
from oblrpo.tasks.gym_worker import BLOCK, ENVIRONMENT
from oblrpo.tasks.task import HELDOUT_FRACTION, GeneratedTask, Problem, split_position
from oblrpo.workers import Worker, WorkerDied

PREFIX = "reasoning_gym/"
TEMPLATE = "{prompt}\n\nProvide your final answer between <answer> and </answer> tags.\n"
# Seconds for one score, and for one problem; of the default configurations the slowest take half a second and five.
SCORE_SECONDS, DRAW_SECONDS = 10.0, 60.0
# So many failures of a generator in a row mean that it always fails.
GIVE_UP_AFTER = 200


class ReasoningGymTask(GeneratedTask):
    """A data set of reasoning-gym, which runs in a process of its own.

    The answer of a problem is its place in the data set and its example answer, as JSON.
    """

    def __init__(self, name: str, seed: int = 0, /, prompt_template: str = TEMPLATE, **configuration: Any) -> None:
        """Set the name without its prefix, the template of the prompts, and the data set's own configuration."""
        super().__init__(seed)
        self.name, self.about = PREFIX + name, f"Answer the questions of reasoning-gym's `{name}`."
        if not isinstance(prompt_template, str):
            raise InputError(f"Task '{self.name}': prompt_template must be text, got {prompt_template!r}.")
        check_template(prompt_template)
        self.template = prompt_template
        try:
            self._made_of = (name, json.dumps(configuration, sort_keys=True))
        except TypeError as error:
            raise InputError(f"Task '{self.name}' takes numbers, text, lists and mappings only: {error}.") from None
        if importlib.util.find_spec("reasoning_gym") is None:
            raise InputError(f"'{self.name}' needs reasoning-gym; install it with: {pip_install('reasoning-gym')}")
        self._worker = Worker("oblrpo.tasks.gym_worker:main", environment=ENVIRONMENT)
        if refused := self._problem("check"):
            raise InputError(refused["refused"])
        self.draw(random.Random(0))

    def draw(self, rng: random.Random) -> Problem:
        """Return one random problem."""
        return next(self.stream(rng))

    def stream(self, rng: random.Random) -> Iterator[Problem]:
        """Yield problems of one data set after the other, each in random order."""
        failed = 0
        while True:
            seed = rng.getrandbits(31)
            for index in rng.sample(range(BLOCK), BLOCK):
                question, answer = self._problem("draw", seed, index)
                if question is not None:
                    failed = 0
                    reference = json.dumps({"seed": seed, "index": index, "answer": answer}, ensure_ascii=False)
                    yield Problem(self.template.replace(PLACEHOLDER, question), reference)
                    continue
                failed += 1
                if failed == GIVE_UP_AFTER:
                    raise InputError(f"Task '{self.name}' makes no problem with these parameters: {answer}.")

    def is_heldout(self, problem: Problem) -> bool:
        """Return whether the question, as text but for white space, belongs to the held-out tenth."""
        before, _, after = self.template.partition(PLACEHOLDER)
        question = problem.text.removeprefix(before).removesuffix(after)
        return split_position(" ".join(question.split())) < HELDOUT_FRACTION

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the score in [0, 1] of the completion's final answer; 0 if scoring fails or takes too long."""
        return self.rewards([problem], [completion])[0]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """Return `reward` of each completion, of the problem at its place; equal answers are scored once."""
        pairs = [(problem.answer, final_answer(text)) for problem, text in zip(problems, completions, strict=True)]
        scores = {pair: self._score(*pair) for pair in dict.fromkeys(pairs)}
        return [scores[pair] for pair in pairs]

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return the example answer, in the template's tags; each word has a slip with probability `noise`."""
        answer = json.loads(problem.answer)["answer"]
        if answer is None:
            raise InputError(f"the task '{self.name}' has no example answers to start from; set warm_start_steps to 0.")
        shown = re.sub(r"\S+", lambda word: slip(word[0], rng) if rng.random() < noise else word[0], answer.strip())
        return f"<answer>{shown}</answer>" if "<answer>" in self.template else shown

    def _score(self, reference: str, answer: str) -> float:
        place = json.loads(reference)["seed"], json.loads(reference)["index"]
        for _ in range(2):  # a process may die of what came before this answer
            try:
                self._ask("load", *place)  # a new process must make the problem again, which may take long
                return float(self._ask("score", *place, answer))
            except TimeoutError:
                return 0.0
            except WorkerDied:
                continue
        return 0.0

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._worker.ask([what, *self._made_of, *arguments], SCORE_SECONDS if what == "score" else DRAW_SECONDS)

    def _problem(self, what: str, *arguments: Any) -> Any:
        try:
            return self._ask(what, *arguments)
        except (TimeoutError, WorkerDied) as error:
            raise InputError(f"Task '{self.name}' makes no problem with these parameters: {error}.") from None


def final_answer(completion: str) -> str:
    """Return what stands between the last tags <answer> and </answer>, or everything if there are no tags."""
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return (answer if closing and opening else completion).strip()


def slip(word: str, rng: random.Random) -> str:
    """Return the word with one of its characters replaced by another digit or letter of its case, or left out."""
    place = rng.randrange(len(word))
    kind = next((kind for kind in (digits, ascii_lowercase, ascii_uppercase) if word[place] in kind), "")
    return word[:place] + (rng.choice(kind.replace(word[place], "")) if kind else "") + word[place + 1 :]
