"""Answers in LaTeX and plain text: what is right, what is not, and what only wants to do harm."""

import os
import random
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblrpo.errors import InputError
from oblrpo.tasks.grading import MathVerifier, extract_answer
from oblrpo.tasks.grading import verifier as verifier_module
from oblrpo.tasks.grading.normal import listed, tidy
from oblrpo.tasks.grading.units import number, same_number, without_unit

pytest.importorskip("math_verify")
sympy = pytest.importorskip("sympy")

RIGHT = [
    ("1/2", "0.5"), ("0.5", r"\frac{1}{2}"), ("1/2", r"\dfrac12"), (r"\frac12", "0.50"), ("0.5", r"50\%"),
    (r"50\%", "0.5"), (r"8 \%", "8"), ("10", r"10\%"), ("1,000", "1000"), ("1000", "1,000"), (r"20,\!160", "20160"),
    ("27.0", "27"), ("27", "27.0"), (r"2\frac{3}{5}", "13/5"), (r"41 \frac{1}{2}", "41.5"), ("-2./7", r"-\frac27"),
    ("6.5e21", r"6.5 \times 10^{21}"), ("0.333333", r"\frac13"), ("1.41421356", r"\sqrt{2}"),
    (r"\$41,\!207", "41207"),
    ("x+1", "1+x"), (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"2^{903}", r"2\cdot 2^{902}"), ("4+7i", "7i+4"),
    (r"\frac{6B}{1+i}e^{is}", r"3B(1-i)e^{is}"), (r"\sin^2 x + \cos^2 x", "1"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{n!n!}"),
    (r"\{1,2\}", r"\{2,1\}"), ("1, 2", "2 and 1"), (r"2\pm\sqrt{7}", r"2-\sqrt{7}, 2+\sqrt{7}"),
    (r"\{3\pm\sqrt{2},-4\}", r"\{-4, 3-\sqrt2, 3+\sqrt2\}"), ("(1,2)", r"\left(1, \frac{4}{2}\right)"),
    ("(5,8]", r"\left(5, 8\right]"), (r"(-\infty,4)\cup(9,\infty)", r"(9,\infty) \cup (-\infty, 4)"),
    (r"\begin{pmatrix} -1/5 \\ 3/5 \end{pmatrix}", r"\begin{bmatrix} -\frac15 \\ \frac35\end{bmatrix}"),
    ("x=5", "5"), ("5", "x=5"), (r"x \in [-3,8]", "[-3,8]"), ("y=4x+1", "y=1+4x"), (r"k \geqslant 3", r"k \ge 3"),
    ("3x-2y+z+8=0", "6x-4y+2z+16=0"), (r"m\frac{dv}{dt}+bv=f", r"bv+m\frac{dv}{dt}=f"),
    (r"\text{Ottoline}", "ottoline"), (r"\text{(C)}", "C"),
    ("31_7", "31_{7}"), ("31_7", "31"),
    (r"90^\circ", "90"), (r"7.5 \text{ cents}", "7.5"), (r"12 \mbox{ inches}^2", r"12 \text{ in}^2"),
    ("18", r"18 \text{ eggs}"),
    ("(1,2)", "(x,y)=(1,2)"), ("5", r"5\ \mathrm{cm}^2"), ("5", "5 square meters"),
    (r"21\mbox{ cm}^2", r"21 \text{ sq cm}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\left[\begin{matrix} 1 \\ 2 \end{matrix}\right]"),
    ("114", r"\textbf{(114)}"), ("067", r"\mathbf{67}"),
    ("f(x)=2x", r"f{\left(x \right)} = 2 x"),
    ("np.arcsin(3/7)", r"\operatorname{asin}(3/7)"), (r"\ln 2", r"\log(2)"),
    (r"\sqrt{3}", "sqrt(3)"), (r"2\sqrt{3}", "2*sqrt(3)"), (r"\sqrt{3}", "sqrt3"), ("1/2", "(1/2)"), ("5/2", "2 1/2"),
    (r"\{1,2\}", r"\lbrace 2,1\rbrace"), ("1,2", "2{,}1"), ("x+1", r"\[1+x\]"), ("5", r"5 \text {cm}"),
    ("90", r"90\degree"), ("90", "90\u00b0"), (r"x^2", "x\u00b2"), (r"1\pm\sqrt2", "1\u00b1\\sqrt2"), ("6", "2\u00b73"),
    ("3e8", "3\u00d710^8"), (r"(0,\infty)", "(0,\u221e)"), (r"(0,1)\cup(2,3)", "(0,1)\u222a(2,3)"),
    (r"x\geq2", "x\u22652"), (r"x\leq2", "x\u22642"), (r"90^\circ", "\u03c0/2"), ("1024", "2^{10}"), ("1/9", "3^{-2}"),
    ("5/2", r"2\frac12"), ("x/2", r"\frac{x}2"), ("0.5", "x=1/2"),
    ("10^3", "1,000"), ("1,000", r"\frac{2000}2"), ("1,000", "500+500"),
    (r"\frac{\pi}{2}", r"90^\circ"), (r"90^\circ", r"\frac{\pi}{2}"), (r"(3,\frac{\pi}{2})", r"(3, 90^\circ)"),
]  # fmt: skip
WRONG = [
    ("27", "28"), ("27", "-27"), ("1/3", "0.333333"), ("3", "3.0000001"), ("1e-9", "2e-9"), ("0.5", r"0.5\%"),
    (r"\sqrt{2}", "1.41421356"), ("1,000", "1.000"), ("100", "1 00"), ("x+1", "x-1"), ("x", "y"),
    (r"\log_2 n", r"\log_3 n"), (r"\log_2 n", r"\log n"), ("M", "m"), ("2", "2xy"), ("2", "2 xy"), ("2xy", "2"),
    ("3", r"3\mathrm{i}"), ("2RC", "2"), ("5", r"5 \text{ (mod 7)}"), ("5", r"5 \text{ dozen}"),
    ("5", "x > 5"), ("x>5", "5"),
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(5,8]", "(5,8)"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,2\}", "(1,2)"),
    ("1,2", "1"), ("1", "1,2"), (r"(0,4)\cup(4,25)", "(0,25)"), ("31_7", "31_8"), ("31", "31_7"),
    ("31_7", "22"), ("E_1", "E"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"), (r"2^{903}", r"2^{902}"),
    ("x=5", "x=6"), ("x=5", "6"), (r"k \geqslant 3", "k > 3"), ("5x-7y+4=0", "5x-7y-4=0"), ("5x-7y+4=0", "0=0"),
    (r"\text{(C)}", "D"), (r"\text{even}", "odd"), (r"21\mbox{ cm}^2", r"21\text{ km}^2"),
    ("3", r"3 \text{ million}"),
    (r"m\frac{dv}{dt}+bv=f", r"w\frac{dv}{dt}+bv=f"), (r"m\frac{dv}{dt}+bv=f", "bv=f"),
    ("3", "3 or more"), (r"\lfloor\sqrt{n-3}\rfloor", r"\lfloor\sqrt{n+1}\rfloor"), ("PQ=STU", "PQ=VW"),
    (r"10^{-20}\sqrt{2}", r"2 \cdot 10^{-20}\sqrt{2}"), (r"m(\gamma^2-1)", r"m(\gamma-1)"), (r"E_1", r"E_2"),
    (r"\frac{\pi}{2}", r"60^\circ"), ("90", r"\frac{\pi}{2}"), (r"\frac{\pi}{2}", r"\frac{\pi}{2}^\circ"),
]  # fmt: skip

# Raw and in a box; the gold answer is 42.
HOSTILE = {
    "tower": "9**9**9**9",
    "tower_latex": "9^{9^{9^{9^{9}}}}",
    "factorials": "((((9!)!)!)!)!",
    "binomial": r"\binom{10^{18}}{5 \cdot 10^{17}}",
    "sum": r"\sum_{k=1}^{10^{12}} \frac{\sin k}{k^2+1}",
    "product": r"\prod_{n=1}^{10^{9}} (n^n+1)",
    "integral": r"\int_0^{100} \frac{\sin(x^{x^x})}{\log(x)+e^{x^2}} dx",
    "radicals": r"\sqrt{1+" * 25 + "x" + "}" * 25,
    "polynomial": "(x+y+z+w)^{5000} - (w+z+y+x)^{5000}",
    "exponent": "1e999999999",
    "digits": "9" * 1_000_000,
    "frac_nested": r"\frac{1}{" * 5000 + "1" + "}" * 5000,
    "brackets": "(" * 100_000,
    "megabytes": "41 is not it " * 300_000,
    "spaces": "$1$" + " " * 19_000 + "$2$",
    "dollars": "$" * 1_000_000,
    "delimiters": r"\(" * 500_000,
    "boxes": r"\boxed{" * 200_000,
    "control": "\x1b[2J\x07\x00\x01 \x7f",
    "null": "4\x002",
    "surrogate": "\ud800\udfff",
    "unbalanced": "}}}{{{ 42 }{ 7",
    "code": "__import__('os').system('true')",
    "eval": r"\text{eval}(open('/etc/passwd').read())",
    "lambda": "(lambda f: f(f))(lambda f: f(f))",
    "format": "{0.__class__.__mro__}",
    "unicode_digits": "\u0664\u0662",
    "infinity": r"\infty - \infty",
    "zero": r"\frac{42}{0}",
    "nan": "nan",
    "commas": "," * 1_000_000,
    "command": r"\input{/etc/passwd}\write18{ls}",
}


def boxed(text):
    return f"So the answer must be $\\boxed{{{text}}}$."


def test_right_answers_in_other_spellings(verifier):
    verdicts = verifier.grade([gold for gold, _ in RIGHT], [boxed(answer) for _, answer in RIGHT])
    assert not [pair for pair, verdict in zip(RIGHT, verdicts, strict=True) if not verdict.correct]
    assert {verdict.reason for verdict in verdicts} == {"ok"}


def test_wrong_answers(verifier):
    verdicts = verifier.grade([gold for gold, _ in WRONG], [boxed(answer) for _, answer in WRONG])
    assert not [pair for pair, verdict in zip(WRONG, verdicts, strict=True) if verdict.correct]


def test_every_gold_is_its_own_answer(verifier):
    golds = [gold for gold, _ in RIGHT + WRONG]
    assert all(verdict.correct for verdict in verifier.grade(golds, [boxed(gold) for gold in golds]))


def test_several_golds_are_a_set(verifier):
    golds = ["1", r"\frac{1}{2}", "-3"]
    answers = [
        "0.5, 1, -3",
        r"\{-3, 1, \frac12\}",
        "1 and 1/2 and -3",
        "1, 0.5",
        "1, 0.5, 3",
        "1, 1, 0.5, -3",
        "1, 1, 1",
    ]
    verdicts = verifier.grade([golds] * len(answers), [boxed(answer) for answer in answers])
    assert [verdict.correct for verdict in verdicts] == [True] * 3 + [False] * 4
    # Without a space it may be a number or a list; as a list it is right.
    assert verifier.grade([["100", "200"], "100200"], [boxed("100,200")] * 2)[0].correct
    assert [
        v.correct for v in verifier.grade([["(1,2)", "(3,4)"]] * 2, [boxed("(3,4),(1,2)"), boxed("(4,3),(1,2)")])
    ] == [
        True,
        False,
    ]


def test_hostile_completions_are_wrong_and_bounded():
    texts = [form(text) for text in HOSTILE.values() for form in (str, boxed)]
    with MathVerifier(processes=2, seconds=1) as verifier:
        started = time.monotonic()
        verdicts = verifier.grade(["42"] * len(texts), texts)
        took = time.monotonic() - started
        named = dict(zip([(name, form) for name in HOSTILE for form in ("raw", "boxed")], verdicts, strict=True))
        assert not [place for place, verdict in named.items() if verdict.correct]
        assert took < 200
        assert any(verdict.reason == "timeout" for verdict in verdicts)
        # The workers that were killed have successors.
        assert [verdict.correct for verdict in verifier.grade(["x+1"] * 2, [boxed("1+x"), boxed("1-x")])] == [
            True,
            False,
        ]


@pytest.mark.parametrize("form", ["{}", "({},)", "x+{}", r"\frac{{{}}}{{2}}", r"\text{{{}}}", "$ {} $"])
def test_no_answer_and_no_gold_is_run(verifier, form, tmp_path):
    ran = tmp_path / "ran"
    call = f"__import__('pathlib').Path('{ran}').touch()"
    sympy.sympify(call, evaluate=False)  # the call is a real one: this way it does run
    ran.unlink()
    verifier.grade(["x+1", form.format(call)], [boxed(form.format(call)), boxed("x+1")])
    assert not ran.exists()


def test_a_gold_answer_that_hangs_is_a_timeout():
    with MathVerifier(seconds=1) as verifier:
        assert verifier.grade(["9^{9^{9^{9}}}"], [boxed("x")])[0].reason == "timeout"


def test_an_interrupt_is_the_parents_to_answer(verifier):
    verifier.grade(["x+1"], [r"\boxed{1+x}"])
    os.kill(verifier._workers[0]._process.pid, signal.SIGINT)
    assert [verdict.reason for verdict in verifier.grade(["x+2"], [r"\boxed{2+x}"])] == ["ok"]


def test_a_worker_that_dies(verifier):
    assert verifier.grade(["x+1"], [boxed("1+x")])[0].correct
    verifier._workers[0]._process.kill()
    assert verifier.grade(["x+2"], [boxed("2+x")])[0].reason in {"ok", "crashed"}
    assert verifier.grade(["x+3"], [boxed("3+x")])[0].correct


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs alarms")
def test_a_worker_whose_parent_is_killed_ends_too():
    code = (
        "from oblrpo.tasks.grading import MathVerifier\n"
        "with MathVerifier(seconds=1) as v:\n"
        "    v.grade(['x+1'], ['$1+x$'])\n"
        "    print(v._workers[0]._process.pid, flush=True)\n"
        "    v.seconds = 2\n"
        "    v.grade(['x'], ['$9^{9^{9^{9}}}$'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.5)  # it is at work on the tower by now
        parent.kill()
    for _ in range(200):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{worker}/stat").exists() and ") Z" in Path(f"/proc/{worker}/stat").read_text():
            return  # dead; nobody has collected it yet
        time.sleep(0.1)
    pytest.fail("the worker lives on")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\fbox{3}", "3"),
        (r"\boxed 5 is it", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{3} or \boxed{4", None),
        ("#### 1,234", "1,234"), ("The answer is $x+1$.", "x+1"),
        ("The answer is $1$, $2$ and $3$. We used $x=9$.", "1, 2, 3"),
        ("The answer is: **18**", "18"), ("the answer is 18 eggs.", "18"), ("**Answer:** -5", "-5"),
        ("answer is 3x+2.", "3x+2"),
        ("The answer is 5 \\sqrt{2}", "5 \\sqrt{2}"), ("the answer is 3.5.", "3.5"),
        ("answer is 5, because $x=3$.", "5"), ("answer is 1,2 and 3.", "1,2 and 3"),
        ("answer is $3 n$.", "3 n"), ("answer is 17.6^2", "17.6^2"), ("answer is 5 million.", "5 million"),
        ("That is 5 million", None), ("the total is 1 1/2", None), ("it weighs 3 and a half", None),
        ("The answer is 1 1/2.", "1 1/2"), ("The answer is 2 thirds.", "2 thirds"), ("The answer is 5:3.", "5:3"),
        ("The answer is 3 and a half.", "3 and a half"), ("The answer is 10 000.", "10 000"),
        ("The answer is 5 feet 3 inches.", "5 feet 3 inches"), ("The answer is 3 to 5.", "3 to 5"),
        ("The answer is 5 or more.", "5 or more"), ("The answer is 5; 6.", "5; 6"), ("Answer: 5 of 6", "5"),
        ("The answer is 5 squared.", "5 squared"), ("The answer is 5\u00bd.", "5\u00bd"),
        ("The answer is 5 more apples.", "5"), ("The answer is 5 to be exact.", "5"),
        ("The answer is 5 hours.", "5 hours"), ("The answer is $\\$27.40$.", "\\$27.40"),
        ("It costs $5 and then $6 more.", "$6"), ("so $x=5$ and thus 10.", "10"), ("in 10 steps we get $x=5$", "x=5"),
        (r"Therefore \[ \frac{1}{2} \]", r" \frac{1}{2} "), ("nothing here", None), ("", None),
        ("\\boxed{}", None), ("2^10", "2^10"),
        ("The answer is:\n$$\n\\frac12\n$$", "\n\\frac12\n"), ("Answer: 50%", "50%"),
    ],
)  # fmt: skip
def test_where_the_answer_stands(text, answer):
    assert extract_answer(text) == (answer.strip() if answer else None)


@given(st.text(st.characters(), max_size=300) | st.text(r"\{}()[]$^_,.0123456789abx+-*/% frac", max_size=300))
@settings(max_examples=200, deadline=None)
def test_extraction_takes_any_text(text):
    for whole in (text, f"\\boxed{{{text}", f"The answer is {text}", f"${text}$"):
        answer = extract_answer(whole)
        assert answer is None or (answer and len(answer) <= 1000)
        if answer:
            number(tidy(answer))
            without_unit(tidy(answer))
            listed(tidy(answer), thousands=True)


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_fractions_are_exact(one, other):
    for spelled in (f"{one.numerator}/{one.denominator}", rf"\frac{{{one.numerator}}}{{{one.denominator}}}"):
        parsed = number(tidy(spelled))
        assert parsed.value == one
        assert same_number(parsed, number(f"{other.numerator}/{other.denominator}")) == (one == other)


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=4))
def test_decimals_are_exact(value):
    text = format(value, "f")
    assert number(text).value == Fraction(text)
    assert not same_number(number(text), number(format(value + 1, "f")))
    assert same_number(number(format(value, ",f")), number(text))


def test_bad_arguments(monkeypatch):
    with pytest.raises(InputError, match="processes"):
        MathVerifier(processes=0)
    with pytest.raises(InputError, match="seconds"):
        MathVerifier(seconds=0)
    with MathVerifier() as verifier:
        with pytest.raises(InputError, match="2 gold answers do not fit 1"):
            verifier.grade(["1", "2"], ["1"])
        with pytest.raises(InputError, match="completion 0 is empty"):
            verifier.grade([[]], ["1"])
    for missing in ("math_verify", "latex2sympy2_extended", "antlr4"):
        monkeypatch.setattr(
            verifier_module.importlib.util, "find_spec", lambda name, gone=missing: name != gone or None
        )
        with pytest.raises(InputError, match=r"pip install 'oblrpo\[math\]'"):
            MathVerifier()


def test_a_machine_with_numbers_only_starts_no_worker():
    with MathVerifier() as verifier:
        rng = random.Random(0)
        golds = [str(rng.randint(0, 999)) for _ in range(1000)]
        assert all(verdict.correct for verdict in verifier.grade(golds, [boxed(gold) for gold in golds]))
        assert verifier._workers[0]._process is None
