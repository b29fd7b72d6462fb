r"""Wrong verdicts on answers as people and models write them: ours, math-verify's and lm-eval's, kind by kind.

    python -m lab.benchmarks.grading tests/tasks/answers.jsonl --markdown

A case is a JSON line of `topic`, `gold` (a text, or a list of them), `right`, and either `completion` (a whole text) or
`answer` (what a box held). math-verify reads the gold answer from a box and the completion as it comes. lm-eval's rule
is that of its task hendrycks_math where the completion has a box (both texts are stripped, then compared as texts), and
that of gsm8k's `flexible-extract` where it has none (the last number). Two figures a grader: wrong answers that it
accepts, and right ones that it rejects.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from oblrpo.tasks.grading import MathVerifier
from oblrpo.workers import Worker, WorkerDied, serve

SECONDS, MEMORY = 10.0, 3 << 30
# Words that topics begin with, by kind; the longest that fits decides.
KINDS = {
    "numbers": "thousands;decimal;leading zeros;plus sign;sign;large;long;word numbers;million;spaces;paren;trailing;"
    "text number;quotes;French;approx;evaluate",
    "fractions": "fraction;mixed;negative;repeating;exactness;prob;chain",
    "percent, currency": "percent;currency;unit dollars",
    "units": "unit;degree;single letter;olympiad;all in",
    "words that change a number": "number words;units differ",
    "times, dates": "time;date",
    "lists, sets": "list;named list;assignments;subscript;pm;set;several golds;sequence;empty set",
    "several boxes": "several boxes",
    "where the box stands": "box;nested box;beginboxed;unclosed",
    "answers in prose": "The answer;Answer;answer;gsm8k;number mentioned;euro;very long",
    "bold, ####, tags, HTML": "bold;hashes;backticks;answer tags",
    "parts of an expression": "function of a number;part of",
    "intervals, unions": "interval;union;all reals;infinity;set builder;name of",
    "inequalities": "inequality;absolute",
    "tuples, matrices": "tuple;matrix",
    "equations, functions": "equation;function;hline;n=3k;named value;ratio;sum formula;piecewise",
    "formulas": "product;implicit;plain;power;div;roots;rational;calculus;floor;prime;constant;formula",
    "functions of angles, logarithms": "trig;arctan;log;e constant",
    "complex numbers": "complex;sqrt of i",
    "huge, tiny, near one": "giant;tiny;near;factorial;small power;binomial",
    "bases, residues, families": "base;modulo;family",
    "words": "text;DNE;short words",
    "multiple choice": "MC",
    "Unicode, Chinese": "unicode;fullwidth;Chinese",
    "typography": "color;double backslash",
}


def kind(topic: str) -> str:
    begun = [(len(word), name) for name, words in KINDS.items() for word in words.split(";") if topic.startswith(word)]
    return max(begun)[1] if begun else topic


def by_math_verify(message: Any) -> bool:
    """Return math-verify's verdict on [gold, completion]."""
    from math_verify import parse, verify

    gold, completion = message
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(completion)))


def worker() -> None:
    """Grade by math-verify until the input ends."""
    import math_verify  # noqa: F401  (slow; before the clock of the first grading starts)

    serve(by_math_verify, MEMORY)


def last_box(text: str) -> str | None:
    r"""Return what lm-eval takes for the last box: up to its closing brace, or what follows `\boxed ` up to a `$`."""
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = max(text.rfind("\\boxed"), -1)
    start = start if start >= 0 else text.rfind("\\fbox")
    level = 0
    for place in range(start, len(text)) if start >= 0 else ():
        level += (text[place] == "{") - (text[place] == "}")
        if level == 0 and text[place] == "}":
            return text[start:place].removeprefix("\\boxed{")
    return None


def stripped(text: str) -> str:
    """Return a text as lm-eval's hendrycks_math (Hendrycks et al. 2021) strips it before it compares; it may raise."""
    for old, new in (
        *(
            ("\n", ""),
            ("\\!", ""),
            ("\\\\", "\\"),
            ("tfrac", "frac"),
            ("dfrac", "frac"),
            ("\\left", ""),
            ("\\right", ""),
        ),
        *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
    ):
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit; with two of them lm-eval gives up
        text, _ = text.split("\\text{ ")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text, flags=re.DOTALL).replace(" ", "")
    text = re.sub(
        r"\\frac([^{])(?:([^{])|(?=\{))", lambda m: f"\\frac{{{m[1]}}}" + (f"{{{m[2]}}}" if m[2] else ""), text
    )
    text = "\\frac{1}{2}" if text == "0.5" else text
    parts = text.split("/")
    if len(parts) == 2:
        top, bottom = map(int, parts)  # `x/2` raises here, there too
        text = f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text
    return text


def by_lm_eval(gold: str, completion: str) -> bool:
    """Return lm-eval's verdict: hendrycks_math's where there is a box, that of gsm8k's flexible-extract elsewhere."""
    if "\\boxed" in completion or "\\fbox" in completion:
        answer = last_box(completion)
        if answer is None:
            return False
        try:
            return stripped(answer) == stripped(gold)
        except ValueError:
            return answer == gold
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", completion)
    answer, gold = (
        re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", re.sub(r"[,$]", "", text))).lower()
        for text in (numbers[-1] if numbers else "[invalid]", gold)
    )
    return answer == gold


def verdicts(cases: list[dict[str, Any]]) -> list[tuple[bool, bool, bool]]:
    """Return the verdicts of ours, math-verify and lm-eval's rule; what takes over `SECONDS` is not accepted."""
    texts = [case.get("completion") or f"\\boxed{{{case['answer']}}}" for case in cases]
    with MathVerifier(processes=2) as verifier:
        ours = [verdict.correct for verdict in verifier.grade([case["gold"] for case in cases], texts)]
    golds = [case["gold"] if isinstance(case["gold"], str) else ", ".join(case["gold"]) for case in cases]
    theirs, process = [], Worker("lab.benchmarks.grading:worker")
    for pair in zip(golds, texts, strict=True):
        try:
            theirs.append(bool(process.ask(pair, SECONDS)))
        except (TimeoutError, WorkerDied):
            theirs.append(False)
    return list(zip(ours, theirs, map(by_lm_eval, golds, texts), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/lab_book/graders.md")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.cases.read_text(encoding="utf-8").splitlines() if line.strip()]
    table: dict[str, list[int]] = defaultdict(lambda: [0] * 7)
    for case, given in zip(cases, verdicts(cases), strict=True):
        for row in (table[kind(case["topic"])], table["all"]):
            row[0] += 1
            for grader, accepted in enumerate(given):
                if accepted != case["right"]:
                    row[1 + 2 * grader + case["right"]] += 1
    order = [name for name in (*KINDS, *sorted(table)) if name in table and name != "all"]
    form = "| {} | {} | {} | {} | {} |" if arguments.markdown else "{:<32} {:>5} {:>10} {:>12} {:>10}"
    print(form.format("kind", "cases", "ours", "math-verify", "lm-eval"))
    if arguments.markdown:
        print("|---|---|---|---|---|")
    for name in (*dict.fromkeys(order), "all"):
        n, *wrong = table[name]
        print(form.format(name, n, *(f"{wrong[i]} + {wrong[i + 1]}" for i in (0, 2, 4))))


if __name__ == "__main__":
    main()
