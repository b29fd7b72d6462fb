"""Where the final answer stands in what people and chat models write, and what only looks like it."""

import time

import pytest

from lab.benchmarks.grading import by_lm_eval, kind
from oblrpo.rewards.built_in import Boxed
from oblrpo.tasks.grading import MathVerifier, extract_answer, last_box

pytest.importorskip("math_verify")

# Ways to end with a number; each must be found.
WORDINGS = [
    "So the result is **{}**.", "So she has **{}** pears each week.", "**{} pears**", "**Answer:** {}",
    "**Answer: {}**", "### Final Answer\n\n**{}**", "**Conclusion**\n\nShe keeps {} pears.",
    "✅ Final Answer: **{}**", "__{}__", "***{}***",
    "Adding up, 5 + 6 gives **{}** pears. Let me know if I can help with anything else!", "**{}** is the answer.",
    "The answer is **{}** because 2 * 3 = 6", "She picks **{}** by working 2 hours on 3 days.", "| sum | **{}** |",
    "**Step 1:** 4 * 5 = 20\n**Step 2:** take 2 away.\n\nHence **{}** are left.", "**So she picks {} pears.**",
    "<answer>{}</answer>", "<think>\\boxed{{4}} or 5?</think><answer> {} pears </answer>",
    "<ANSWER>\n{}\n</ANSWER>", "<think>\\boxed{{4}}</think>It is {}.", "<answer>$\\boxed{{{}}}$</answer>",
    "<answer>The answer is {}.</answer>", "She sold 3 + 4 pears.\n#### {} pears", "#### **{}**",
    "#### {}\n\nI hope this helps!", "#### $\\boxed{{{}}}$", "Final answer: `{}`", "```\n{}\n```", "<b>{}</b>",
    "Answer:<br><strong>{}</strong>", "The answer is {}<|im_end|>", "Answer: {}",
    "The final answer is {}. I hope it is correct.", "The answer to the problem is {}.", "ANSWER = {}",
    "The answer should be {} (as 2 + 3 = 5).", "The answer is {}. I am sure that this answer is correct.",
    "答案是 {}。", "答案\uff1a{}", "因此\uff0c她还剩{}页。", "2 * 3 + 1 = {}.", "Therefore, x = {}.",
    "So it is {}!", "\\textbf{{{}}}", "It is \\boxed{{{}}}, as the \\boxed{{}} format asks.",
    "It is \\boxed{{{}}}. I marked it with \\boxed.", "I box it: \\boxed{{{}}} (\\boxed{{answer}} was asked for)",
    "\\boxed{{3}}? No, wait. \\boxed{{{}}}", "\x08oxed{{{}}}",
    "\\boxed{{3}}. Wait, this is a mistake: the answer is {}.", "\\boxed{{{}}}, not \\boxed{{3}}", "\\boxed {}",
    "\\boxed{{3}}. No, the answer is {}.", "\\boxed{{3}}. Sorry, I meant **{}**.",
    "<answer>3</answer>. No, wait, it is {}.",
    "The answer is 3? No, it is {}.", "The answer is 3, but actually it is {}.", "#### 3\nNo, it is {}.",
    "\\boxed{{{}}}. Let me know if anything is wrong!", "\\boxed{{{}}}. Wait, we check that x > 3. Yes.",
    "\\boxed{{{}}}. However, if x = 2 then it is 3.", "It is **{}**, not **3**.", "**{}** pears for **3** days",
    "She has {} pears in 3 boxes.", "She has {} pears (3 a day).", "She has {} pears because **3** is odd",
    "#### {}\n\nQuestion: Bob has 3.\nAnswer: #### 3", "{}<|im_end|>\nuser\nAre you sure? 3",
    "<answer>3 <answer>{}</answer></answer>", "<Answer>{}</answer> and 3", "<answer>{}</answer> (in <answer></answer>)",
    "~~3~~ {}", "We get <del>3</del> {}.", "It is not 3 but {}.",
    "The number of pears that were not eaten is 3 + 4 = {}",
    "Since there are 3 boxes, there are {} pears.", "She does not eat 3, so {} are left.",
    "Only then, in 3 days, it is {}.",
    "Final Answer: The largest $n$ is {}.", "Final answer: $x$ is {}", "Answer: the value of $k$ is ${}$.",
    "The answer is that $n$ must be {}.", "Final Answer: $n$ = {}.", "#### The largest $n$ is {}",
    "Answer: the number of primes below $30$ is ${}$.", "Answer: the maximum of $ab$ is {}, attained at $a=3$.",
    "The final answer is $ab$, which is {}.", "Answer: For $n=5$, the value is ${}$.",
    "Answer: When $x$ is 3, the value of $y$ is {}.", "<answer>The largest $n$ is {}.</answer>",
    "The answer is ${}$ when $n$ is 3.", "Answer: The length is ${}$, the width is $3$.",
    "Answer: it is {}, where $n$ is 3.", "The area is {}cm².", "So it takes {}hours.", "It weighs **{}kg**.",
]  # fmt: skip
# The number 7 is in them, and is not the answer.
NOT_SEVEN = [
    "Final Answer: The largest $n$ is not 7.", "Answer: $x$ is less than 7.", "Answer: $n$ is at least 7.",
    "Answer: the largest $n$ is 7 or 8.", "Answer: the largest $n$ with $n^2<7$ is 2.", "Answer: $n$ is 7 dozen.",
    "Answer: the point $P$ is 7 units from the origin.", "The answer is $2n$ when $n$ is 7.",
    "The total is 7nm.", "It is 7kT.", "It is 7min(x, y).", "It is 7in4.",
    "It is sqrt(7).", "It is √7.", "It is 2√7.", "Hence f(7).", "It is g(7) - 1.", "It is ln 7.",
    "It is 2 + sqrt(7)/3", "It is \\sqrt 7.", "It is \\sqrt{7} + 1", "The point is (2, 7).",
    "The point is (7, 2).", "So (x, y) = (2, 7).", "The solutions are 2 and 7.", "x = 2 or x = 7",
    "$x=2$ or $x=7$", "The set is {2, 7}.", "The interval is [2, 7).", "So x > 7.", "So x ≥ 7", "It is 7/2.",
    "It is 2 : 7.", "It is 2/7.", "It is 7!/2.", "It is 7x.", "It is x + 7.", "It is 2^7.", "It is 7 squared",
    "It is 7²", "It is 7⁶", "It is 7<sup>2</sup>", "**7** million", "**7** and a half", "It is **not** 7.",
    "It is not 7.", "The answer is not 7.", "The answer isn't 7", "It is minus 7.", "2 mod 7",
    "It is 7 degrees below zero", "Each has **7**. So 2 of them have **14**.", "**Step 7:** add them, 9",
    "between 3 and 7", "3 to 7 days", "3 hours and 7 minutes",
    "7 feet 2 inches", "<answer>7</answer><answer>8</answer>", "<think>\\boxed{7}</think>8", "#### 7\n#### 8",
    "#### 7 + 1", "#### 7 dozen", "\\boxed{7}, no: the other root. \\boxed{8}", "\\boxed{7} or \\boxed{8}",
    "\\boxed{8}, not \\boxed{7}", "\\boxed{7", "\\boxed{8} and \\boxed{7}", "$p = \\boxed{8}$, $q = \\boxed{7}$",
    "The answer is 7 or 8", "10 - 7 apples", "\\boxed{7}. Wait, this is wrong, the answer is 8.",
    # taken back, denied, doubted
    "The answer is 7? No, it is 8.", "The answer is 7. Wait, 4 + 4 = 8. So it is 8.",
    "One may think the answer is 7, but it is 8.",
    "I do not think it is 7.", "I doubt that it is 7", "The answer cannot possibly be 7.",
    "The answer is neither 6 nor 7.",
    "The answer is different from 7.", "The answer is at most 7.", "She has 8 instead of 7.",
    "It is $8$ rather than $7$.",
    "It is not $7$.", "The answer is not $7$, but $8$.", "I do not think it is \\boxed{7}.",
    "\\boxed{8} instead of \\boxed{7}",
    "\\boxed{7} is wrong.", "7 is not the answer.", "$7$ is not the answer", "So 7 is too small.", "7 does not work.",
    "We reject x = 7.", "x = 7 is not valid", "**7** is incorrect.", "~~7~~", "The wrong answer is 7.", "Is it 7?",
    "The answer is 6 (or 7).", "The answer is 7, or possibly 8.", "It is 6 or maybe $7$.",
    "The answer is 7 if it is odd and 8 if not.",
    # a part, a step, something beside the point
    "\\boxed{7} + 1", "2\\boxed{7}", "-\\boxed{7}", "\\frac{\\boxed{7}}{2}", "\\boxed{6} + \\boxed{7}",
    "First: \\boxed{7}. Then the answer is 8.", "Step 7", "**Step 7:** add", "7. Done",
    "See Theorem 7.", "(a) 6\n(b) 7",
    "Confidence: 7", "9 eggs for **7** days", "**9** eggs (**7** a day)",
    "She has 9 eggs after 7 days.", "It is half of 7.",
    "The answer is 7 to the power of 2.", "The answer is 7% of 50.", "It is 9 with remainder 7.", "It is $2$ times $7$",
    "How many are left if she buys 7?", "I don't know what to do with the 7.", "We cannot determine it from 7 numbers.",
    "<think>7</think> I could not find it.", "<answer>unknown, or 7</answer>",
]  # fmt: skip


def test_every_wording_is_found():
    texts = [(wording, number) for wording in WORDINGS for number in ("7", "70,000", "-7")]
    with MathVerifier() as verifier:
        right = verifier.grade([number for _, number in texts], [wording.format(number) for wording, number in texts])
        wrong = verifier.grade(["8"] * len(texts), [wording.format(number) for wording, number in texts])
    assert not [text for text, verdict in zip(texts, right, strict=True) if not verdict.correct]
    assert not [text for text, verdict in zip(texts, wrong, strict=True) if verdict.correct]


def test_what_only_holds_the_number_is_not_the_answer():
    with MathVerifier(seconds=20) as verifier:
        verdicts = verifier.grade(["7"] * len(NOT_SEVEN), NOT_SEVEN)
    assert not [text for text, verdict in zip(NOT_SEVEN, verdicts, strict=True) if verdict.correct]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is sqrt(3).", "sqrt(3)"), ("It is 2*sqrt(3)/5.", "2*sqrt(3)/5"), ("The point is (3, 4).", "(3, 4)"),
        ("So (x, y) = (3, 4).", "(x, y) = (3, 4)"), ("We need [2, 5).", "[2, 5)"),
        ("So x = 3 or x = 4.", "x = 3 or x = 4"), ("It weighs 10 km.", "10 km"), ("It is **10** cm long.", "10 cm"),
        ("The angle is $90$ degrees.", "90 degrees"), ("It is 18 euros a day.", "18 euros"), ("That is €5", "€5"),
        ("It is 6 eggs.", "6"), ("9km", "9 km"), ("The correct option is **(C)**.", "(C)"),
        ("Option D is correct.", "D"), ("So C is the answer", "C"), ("I pick B.", "B"), ("It is not (B).", None),
        ("I would not pick B", None),
        ("I do not think that B is the answer", None),
        ("The answer is B because 3 > 2", "B"), ("Hence (B).", "(B)"), ("故选\uff1aB", "B"),
        ("Since 4 is even, so is n: n is **even**.", "even"), ("It is 4. I **hope** this helps!", "4"),
        ("#### 1. Multiply\n9 * 2 = 18\n#### 2. Conclude\nIt is 18 eggs.", "18"), ("#### x + 2 n", "x + 2 n"),
        ("So 220 \u2013 22 = 198 liters", "198 liters"), ("It is 1 1/2 + 2 1/2 = 4", "4"),
        ("V = 2x = 2 * 7 = 14", "14"), ("Hence 2x - 7y = 0.", "2x - 7y = 0"),
        ("Of 12 it sold 8, 12 - 8 = 4 are left", "4"), ("She pays 10x3=30$.", "30"),
        ("It sold **3 million**.", "3 million"), ("Therefore, yes.", "yes"),
        ("\\begin{align*}\nx &= 3 \\cdot 3 \\\\\n&= 9\n\\end{align*}", "9"),
        ("- 5\n- 3\n- 8", "8"), ("<<9*2=18>>18 eggs", "18"), ("if a<b and b>2 it is 5", "5"),
        ("It is x**2 + 3", "x**2 + 3"),
    ],
)  # fmt: skip
def test_the_whole_expression_is_read(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "one", "several"),
    [
        # side by side they are one answer, whatever the gold is
        (r"\boxed{1} and \boxed{2} and \boxed{3}", "1, 2, 3", "1, 2, 3"),
        (r"It is \(\boxed{1}\) or \(\boxed{-2}\).", "1, -2", "1, -2"),
        (r"$$\boxed{(1, 2)} \quad \text{and} \quad \boxed{(3, 4)}$$", "(1, 2), (3, 4)", "(1, 2), (3, 4)"),
        (r"$x = \boxed{1}$, $y = \boxed{2}$", "x = 1, y = 2", "x = 1, y = 2"),
        (r"\boxed{5}, \boxed{5}", "5", "5, 5"),
        # apart they are if a list is wanted
        ("x = \\boxed{1}\n\ny = \\boxed{2}", "2", "x = 1, y = 2"),
        ("- \\boxed{1}\n- \\boxed{2}\n- \\boxed{3}", "3", "1, 2, 3"),
        (r"One root is \boxed{1}, the other is \boxed{2}.", "2", "1, 2"),
        # what was taken back, or led to the answer, is no part of it
        (r"\boxed{3}. Wait, that is wrong: \boxed{5}", "5", "5"),
        (r"\boxed{3}. I forgot a case. It should be \boxed{5}", "5", "5"),
        (r"We get \boxed{3}, so the final answer is \boxed{5}", "5", "5"),
        (r"\boxed{1}, \boxed{2}. So the roots are \boxed{1} and \boxed{2}.", "1, 2", "1, 2"),
        (r"Cases \boxed{1} and \boxed{2} hold. They make \boxed{1, 2}.", "1, 2", "1, 2"),
        ("\\boxed{1}" + " and so on" * 40 + " \\boxed{2}", "2", "2"),
        (r"a = \boxed{3}, b = \boxed{4}, so a + b = \boxed{7}", "7", "a = 3, b = 4, 7"),
        (r"\boxed{\boxed{5}}", "5", "5"),
        (r"\boxed{1} and \boxed{2", None, None),
    ],
)
def test_several_boxes(text, one, several):
    assert extract_answer(text) == one
    assert extract_answer(text, several=True) == several


def test_the_gold_says_whether_several_are_wanted():
    golds = ["3, 5", ["3", "5"], r"\{3, 5\}", r"4 \pm 1", "5", "(3, 5)"]
    apart, revised = "One is \\boxed{3}.\n\nThe other is \\boxed{5}.", "It is \\boxed{3}. No, wait: \\boxed{5}."
    with MathVerifier() as verifier:
        assert [v.correct for v in verifier.grade(golds, [apart] * 6)] == [True] * 5 + [False]
        assert [v.correct for v in verifier.grade(golds, [revised] * 6)] == [False] * 4 + [True, False]
        assert not verifier.grade(["x=1, y=2"], [r"$x = \boxed{2}$ and $y = \boxed{1}$"])[0].correct


def test_an_empty_box_is_a_mention():
    assert last_box(r"\boxed{5} in \boxed{}") == last_box(r"\boxed{5}, with \boxed.") == "5"
    assert last_box(r"use \boxed{}") is last_box(r"\boxed{5} \boxed{6") is None
    assert Boxed()([r"\boxed{}", r"\boxed{5}", "5", r"\boxed{5} in \boxed{}"]) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "piece",
    [
        "(", "(1", "{1,", "f(", "((1)", "1,", "1 and ", "1-", "1 / ", "a ", "a** ", "**a", "_a_ ", "`", "<b>",
        "<span ", "answer is ", "answer to ", "answer\n", "#### 1\n", "<answer>", r"\boxed{1} and ", r"\boxed{",
        r"\boxed{}", r"x = \boxed{1}", "$a$, ", r"\(", "= ", "5! ", "not 5. ", "x = 1, ", "option A is correct ",
        "wait it is 8 ", "no, ", "not ", "in 3 ", "(3 ", "~~a", "<s>", "<answer>7<answer>", "\nQ: ",
        "$1$" + " " * 9_000,
    ],
)  # fmt: skip
def test_hostile_text_costs_little(piece):
    started = time.monotonic()
    for text in (piece * (20_000 // len(piece)), "The answer is " + piece * (19_000 // len(piece)) + "^"):
        extract_answer(text, several=True)
    assert time.monotonic() - started < 20  # a step that is quadratic takes minutes


def test_the_rule_of_lm_eval():
    r"""Verdicts that lm-eval 0.4.13 gives; `x/2` and two units keep its rule from stripping anything."""
    right = [
        ("\\frac{1}{2}", "\\boxed{0.5}"), ("\\frac{1}{2}", "\\boxed{1/2}"), ("5", "\\boxed{x = 5}"),
        ("5", "\\boxed 5$ m"),
        ("\\sqrt{3}", "$\\boxed{\\sqrt3}$"), ("5", "\\boxed{5\\text{ cm}}"), ("18", "It is $18."), ("1,800", "so 1800"),
    ]  # fmt: skip
    wrong = [
        ("x/2", "\\boxed{x /2}"), ("5", "\\boxed{5\\text{ a}\\text{ b}}"), ("18", "It is 18.00"),
        ("2", "\\boxed{1}, \\boxed{2"),
        ("1, 2", "\\boxed{1}, \\boxed{2}"), ("5", "none"),
    ]  # fmt: skip
    assert [by_lm_eval(*pair) for pair in right + wrong] == [True] * len(right) + [False] * len(wrong)
    assert [kind(topic) for topic in ("set builder", "set", "named value", "odd")] == [
        "intervals, unions",
        "lists, sets",
        "equations, functions",
        "odd",
    ]
