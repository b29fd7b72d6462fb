"""Short texts under conditions that a function can check: so many words, no commas, bullet points, an ending."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from oblrpo.tasks import GeneratedTask, Problem
from oblrpo.tasks.task import HELDOUT_FRACTION, split_position

SUBJECTS = tuple(
    re.findall(
        r"\w+",
        """
        apples airports ants art autumn babies bakeries balloons baseball beaches bears bees bells bicycles birds
        boats books bread breakfast bridges buses butterflies cakes cameras candles carpets castles cats caves
        chairs cheese chess chocolate cinemas clocks clouds coffee coins computers cooking coral cows dancing
        deserts diamonds dinosaurs doctors dogs dolphins doors dreams drums eagles elephants engines farms feathers
        films fireflies fish flags flowers fog football forests foxes friendship frogs fruit games gardens ghosts
        giraffes glass gloves gold grass guitars hats hills history holidays honey horses hospitals hotels houses
        ice insects islands jewels juice kangaroos keys kitchens kites knots ladders lakes lamps languages laughter
        leaves lemons letters libraries lighthouses lions magic maps markets masks mathematics medicine milk mirrors
        money monkeys mountains museums mushrooms music neighbours night noise numbers oceans onions oranges owls
        paint paper parks penguins pianos pictures pirates planets poems potatoes puzzles rabbits radios rain
        rainbows recipes rice rivers roads robots rockets roses salt sand school science shadows sharks sheep ships
        shoes silence silver sleep snakes snow soap soup spiders spring stars stories storms sugar summer swimming
        tea teachers telephones tigers tomatoes towers toys trains travel trees turtles umbrellas uncles valleys
        vegetables villages violins volcanoes walking watches water weather weddings whales wheat windows winter
        wolves wood writing zebras
        """,
    )
)
ENDINGS = ("that is all", "the end", "now you know", "ask me again", "thank you for reading", "have a nice day")
REQUESTS = {
    "sentence": "Write one sentence about {subject}.",
    "paragraph": "Write a short paragraph about {subject}.",
    "list": "Write a short list about {subject}.",
}
TEXTS = {
    "words": "Use between {0[0]} and {0[1]} words.",
    "mention": 'Use the word "{0}".',
    "bullets": 'Make exactly {0} bullet points, each on a line that begins with "- ".',
    "ending": 'End with the words "{0}".',
    "no_commas": "Do not use commas.",
    "lower_case": "Use lower case letters only.",
}
# What a demonstration says; six to ten words each, without commas.
FACTS = (
    "Many people enjoy {subject} every day",
    "You can learn a lot about {subject}",
    "There is an old tale about {subject} here",
    "My friends often talk of {subject} at dinner",
    "A good book on {subject} is worth reading",
    "Children ask clever questions about {subject}",
    "Nobody knows everything about {subject} yet",
    "We saw something new about {subject} last week",
)
LEAST_WORDS = 5
WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")


class InstructionsTask(GeneratedTask):
    """Follow two to four instructions at once; the reward is the share that is followed, in [0, 1].

    Every problem asks for a number of words, so that neither silence nor endless text can win; how many differs from
    prompt to prompt. A completion scores 0 if, its ending left out, it has fewer than five different words, or
    fewer than half of its words are different. Subjects are held out.

    The answer of a problem is its conditions in JSON: `words` (fewest and most), `mention` (a word), `bullets` (how
    many), `ending` (the last words), `no_commas` and `lower_case` (true).
    """

    name = "instructions"

    def draw(self, rng: random.Random) -> Problem:
        """Return a random subject and conditions, as a message of a user."""
        subject, form = rng.choice(SUBJECTS), rng.choice(sorted(REQUESTS))
        fewest = rng.randint(6, 10) if form == "sentence" else rng.randint(18, 26)
        conditions: dict[str, Any] = {"words": [fewest, fewest + (12 if form == "sentence" else 16)]}
        if form == "list":
            bullets = rng.randint(2, 4)
            conditions |= {"words": [5 * bullets, 12 * bullets + 5], "bullets": bullets}
        others = {"mention": subject, "ending": rng.choice(ENDINGS), "no_commas": True, "lower_case": True}
        for name in rng.sample(sorted(others), rng.randint(1, 4 - len(conditions))):
            conditions[name] = others[name]
        texts = [TEXTS[name].format(conditions[name]) for name in TEXTS if name in conditions]
        text = " ".join([REQUESTS[form].format(subject=subject), *texts])
        return Problem([{"role": "user", "content": text}], json.dumps(conditions), {"subject": subject})

    def is_heldout(self, problem: Problem) -> bool:
        """Return whether the subject is one of the held-out tenth."""
        return split_position(f"subject {problem.columns['subject']}") < HELDOUT_FRACTION

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the share of the conditions that hold; 0 for next to no text, or for the same words over and over."""
        conditions = json.loads(problem.answer)
        text = completion.strip()
        ending = conditions.get("ending", "")  # left out wherever and however often it stands
        rest = re.sub(re.escape(ending), " ", text, flags=re.IGNORECASE) if ending else text
        words = WORD.findall(rest.lower())
        if len(set(words)) < max(LEAST_WORDS, len(words) / 2):
            return 0.0
        return sum(CHECKS[name](text, wanted) for name, wanted in conditions.items()) / len(conditions)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return a text that keeps to every condition; each is left out with probability `noise`."""
        conditions = json.loads(problem.answer)
        kept = {name: wanted for name, wanted in conditions.items() if rng.random() >= noise}
        facts = [fact.format(subject=problem.columns["subject"]) for fact in rng.sample(FACTS, len(FACTS))]
        if "mention" in conditions and "mention" not in kept:
            facts = [fact.replace(str(problem.columns["subject"]), "it") for fact in facts]
        ending = kept.get("ending", "")
        if "bullets" in conditions:  # one fact where their number does not count
            text = "\n".join(f"- {fact}." for fact in facts[: kept.get("bullets", 1)])
        else:
            text = _prose(facts, conditions, kept, ending)
        if "no_commas" in conditions and "no_commas" not in kept:
            text = text.replace(" ", ", ", 1)
        last = f"{ending[0].upper()}{ending[1:]}." if ending else ""
        written = f"{text}{chr(10) if 'bullets' in conditions else ' '}{last}".strip()
        return written.lower() if "lower_case" in kept else written


def _prose(facts: list[str], conditions: dict[str, Any], kept: dict[str, Any], ending: str) -> str:
    """Return as many facts as the number of words needs, joined where the request is for one sentence."""
    least, most = conditions["words"]
    chosen: list[str] = []
    while len(WORD.findall(" ".join([*chosen, ending]))) < least:
        chosen.append(facts[len(chosen)])
    if "words" not in kept:
        chosen = facts[: 2 + most // 6]
    if least <= 10:
        return " and ".join([chosen[0], *(fact[0].lower() + fact[1:] for fact in chosen[1:])]) + "."
    return " ".join(f"{fact}." for fact in chosen)


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "words": lambda text, wanted: wanted[0] <= len(WORD.findall(text)) <= wanted[1],
    "mention": lambda text, wanted: wanted in WORD.findall(text.lower()),
    "bullets": lambda text, wanted: (
        sum(line.strip().startswith("- ") and bool(WORD.search(line)) for line in text.splitlines()) == wanted
    ),
    # What may stand around the last words does not count.
    "ending": lambda text, wanted: text.lower().strip(" \n\t.!*\"'\u201d\u2019").endswith(wanted),
    "no_commas": lambda text, wanted: "," not in text,
    "lower_case": lambda text, wanted: text == text.lower(),
}
