"""Answers of one meaning in many forms, and their near misses: choices, words, relations, sets, names, signs."""
# ruff: noqa: RUF001  (look-alikes are what some tests are about)

import random
import time

import pytest

from oblrpo.tasks.grading.compare import NeedsAlgebra, equal
from oblrpo.tasks.grading.normal import latex_of, tidy

pytest.importorskip("math_verify")
sympy = pytest.importorskip("sympy")

# kind: (gold, answers that equal it, answers that do not)
KINDS = {
    "choice": [
        ("D", [r"\text{D}", r"\textbf{(D)}", "(D)", "D.", "D)", r"\textbf{(D) }17", r"D) \frac{1}{3}",
                r"\text{Option D}"],
         ["E", "(E)", "E) 17", "D or E", "D) and E)"]),
        (r"\text{(B)}\ 17", ["B", "17", "(B) 17"], ["C", "(B) 18", "(C) 17"]),
        ("A,B,D", ["ABD", r"\text{A, B, D}", "(A),(B),(D)", r"D, B \text{ and } A", r"\text{A, B, and D}",
                   r"\{D, A, B\}", "(A), (B), and (D)", "Options A, B, and D"],
         ["A,B", "ABC", "A", "A, B, and E", "A, B, D, and E", "BAD"]),
        ("AD", ["A, D"], ["DA", "D A"]),
        ("B", ["B: the second line", "Option B: a line", r"\text{B: It grows.}", "(B): yes", "B: An arc"],
         ["D: the second line", "D: B is wrong", "B:D", "B : DE = 2 : 3", "B, D: both", "BD: a line"]),
        ("B: the second line", ["B", "the second line", "B) the second line"], ["D", "B: the third line"]),
    ],
    "words": [
        ("yes", [r"\text{Yes}", "Yes.", "Yes, since it converges"], ["no", "No, but nearly", "Yes, no"]),
        (r"\text{south}", ["South", r"\mathrm{south}", "south."], ["north", "thous"]),
        (r"\text{The series diverges}", [r"\text{the series diverges.}"], [r"\text{the series converges}"]),
        (r"\text{Ida and Max}", ["Max and Ida"], ["Max"]),
        ("r - s", ["-s+r", "r-s"], ["s-r", "r+s"]),
    ],
    "dates and times": [
        (r"\text{May 14}", ["May 14", "14 May", r"\text{May 14th}"], ["May 15", "June 14"]),
        (r"\text{4:20 p.m.}", ["4:20 PM", r"4{:}20\text{ p.m.}", "16:20"], ["4:20 a.m.", "5:20 p.m."]),
        ("9:15", ["9{:}15", "9:15 a.m."], ["9:51", "9.15", "3:5", r"\frac{3}{5}"]),
        ("08:15", ["8:15", "08:15 AM", "8:15:00"], ["8:51", "8:15:30", "8:15 PM"]),
        (r"4\text{:}20\text{ p.m.}", ["4:20 pm", "16:20", r"16\text{:}20", "4:20:00 PM"], ["4:20 a.m.", "16:20:20"]),
        ("17:42:00", ["17:42", "5:42 p.m.", r"17{:}42{:}00"], ["17:42:42", "5:42 a.m.", "42:17"]),
        ("2:3:5", ["4:6:10"], ["2:3", "5:3:2"]),
        ("11:00", ["11{:}00"], ["1:00", "11"]),
    ],
    "equations": [
        ("y=3x-2", ["3x-y-2=0", "2y=6x-4", "y+2=3x", r"x=\frac{y+2}{3}", "f(x)=3x-2"],
         ["y=3x+2", "x=3y-2", "3x+y-2=0", "3x-2=0", "-2"]),
        ("7=t", ["t=7"], ["t=-7", "s=7"]),
        ("xy=12", [r"y=\frac{12}{x}"], ["x+y=12", "y=12x"]),
        (r"\frac{x}{5}+\frac{y}{2}=1", ["2x+5y=10"], ["5x+2y=10", "1"]),
        ("(u-v)^2=u^2-2uv+v^2", ["(u-v)^2=v^2+u^2-2uv"], ["(u-v)^2=u^2+v^2-uv", "w=w"]),
        ("x^2=6y", [], ["6y", "x=6y"]),
        ("g'(x)=4x", [], ["g(x)=4x"]),
        ("f(t)=t^3+1", ["f(x)=x^3+1"], ["f(x)=t^3+1", "g(t)=t^3+1", "f(x)=x^3-1"]),
    ],
    "a value after equals": [
        ("21", [r"3 \times 7 = 21", "=21", "a+b=21", r"N = 3 \cdot 7 = 21", r"x=\boxed{21}", r"|AB|=21", "f(3)=21"],
         [r"3 \times 7 = 22", r"3 \times 8 = 21", "2x+1=21", "x^2=21", r"\sqrt{x}=21", "x=20=21",
          r"N=3 \cdot 8=21"]),
        ("x+y=9", [], ["9"]),
    ],
    "intervals": [
        ("[3,8)", [r"3\le x<8", "[3,8[", r"\{x : 3\leq x<8\}", r"8>x\geqslant3", "x>=3, x<8",
                    r"x\ge3 \text{ and } x<8"],
         ["(3,8)", "]3,8[", r"3\le x\le8", r"x\ge3 \text{ or } x<8", "[3,8)\\cup(8,9)"]),
        (r"(2,+\infty)", [r"(2,\infty)", "x>2", r"\{y \mid y>2\}", r"]2;+\infty[", r"x\in(2,\infty)"],
         [r"[2,\infty)", "x<2", r"x\ge2"]),
        ("x>2", [r"(2,\infty)", "2<x"], ["y>2", "x<2"]),
        ("-5 < b < 6", ["6>b>-5", "(-5,6)"], [r"-5\le b\le6", "-5<c<6"]),
        ("g(1) < g(5) < g(3)", ["g(3) > g(5) > g(1)"], ["g(1) < g(3) < g(5)"]),
        ("a>4, b<7", ["b<7, a>4"], ["a>7, b<4"]),
        ("a<2c", ["2c>a", "3a<6c"], ["a>2c", "2a<c"]),
    ],
    "absolute values": [
        ("|t+7|", ["|7+t|", "|-t-7|", r"\sqrt{(t+7)^2}", r"\sqrt{t^2+14t+49}", r"\max(t+7,-t-7)"],
         ["t+7", "-t-7", "|t|+7", "|t-7|"]),
        ("t+7", [r"\frac{(t+7)^3}{(t+7)^2}"],
         ["|t+7|", r"\sqrt{(t+7)^2}", r"\sqrt{t^2+14t+49}", r"\sqrt[4]{(t+7)^4}"]),
        ("|t+3|-3", ["-3+|t+3|"], ["|t+4|-4", "t"]),
        # They differ between 20 and 22 alone.
        ("|t-20|+|t-22|", ["|22-t|+|20-t|"], ["2|t-21|", "2t-42"]),
        (r"\sqrt{t^2-40t+400}+\sqrt{t^2-44t+484}", ["|t-20|+|t-22|"], [r"\sqrt{4t^2-168t+1764}"]),
        (r"\sqrt{(t^2-442)^2}", ["|442-t^2|"], ["t^2-442", "442-t^2"]),
        ("|a-b|", ["|b-a|", r"\sqrt{(a-b)^2}", r"\max(a,b)-\min(a,b)"], ["a-b", "b-a", "|a|-|b|", "|a+b|"]),
        ("(|a|-a)(|b-90|+b-90)", ["(|90-b|-90+b)(|a|-a)"], ["0"]),
        ("|ab|", ["|a||b|"], ["ab", "a|b|", "|a|b"]),
        (r"t\sqrt{t}", [r"|t|\sqrt{t}"], [r"-t\sqrt{t}"]),
        ("t^2+3", ["|t^2+3|", r"\sqrt{(t^2+3)^2}"], ["|t^2-3|+6"]),
        (r"\ln|t|", [r"\frac{1}{2}\ln t^2", r"\ln|-t|"], [r"\ln t", r"|\ln t|"]),
        (r"\lfloor t\rfloor", [], [r"\lfloor|t|\rfloor"]),
        (r"|\sin t|", [r"\sqrt{1-\cos^2 t}"], [r"\sin t", r"\sin|t|"]),
    ],
    "sets of reals": [
        (r"(-\infty,-3)\cup(3,\infty)",
         ["|x|>3", r"x<-3 \text{ or } x>3", "x>3, x<-3", r"]-\infty,-3[\cup]3,+\infty[", r"\mathbb{R}\setminus[-3,3]",
          r"(-\infty,-3),(3,\infty)", "x^2>9"],
         ["|x|<3", r"|x|\ge3", "x>3", r"(-\infty,3)\cup(3,\infty)", "x<-3 and x>3"]),
        (r"(-\infty,6)\cup(6,\infty)", [r"x\neq6", r"\mathbb{R}\setminus\{6\}", r"\text{all real numbers except } 6"],
         [r"x\neq-6", r"\mathbb R", "x=6"]),
        (r"(1,4)\cup(4,9)", [r"(1,9)\setminus\{4\}", r"(1,9)-\{4\}", r"1<x<9, x\ne4"],
         ["(1,9)", r"[1,9]\setminus\{4\}"]),
        (r"(-\infty,\infty)", [r"\mathbb R", r"\text{all real numbers}", r"x\in\mathbb{R}", r"-\infty<x<\infty"],
         [r"(0,\infty)", r"\mathbb{R}^+", r"\mathbb{Z}"]),
        (r"\emptyset", [r"\varnothing", r"\{\}", r"\text{no solution}"], [r"\{0\}", r"\{\emptyset\}", "0", "(5,1)"]),
        (r"[0,2)", [r"[0,1)\cup[1,2)"], [r"[0,1)\cup(1,2)"]),
        (r"x\le-\sqrt{8}", [r"(-\infty,-2\sqrt2]"], [r"(-\infty,2\sqrt2]"]),
    ],
    "names": [
        ("m = 8, p = 3", ["(m,p)=(8,3)", "(p,m)=(3,8)", "p=3, m=8", r"m=8\text{ and }p=3", "(8,3)", "8, 3",
                          r"\begin{cases} m=8\\ p=3\end{cases}"],
         ["(m,p)=(3,8)", "m=3, p=8", "(3,8)", "3, 8", "m=8"]),
        ("(0,7)", [], ["0:7", "0,7"]),
        ("(2,7)", ["x=2,y=7", r"\langle 2,7\rangle", "(2;7)"], ["x=7,y=2", "2,7", "[2,7]"]),
        ("a_1=4, a_2=6", ["4, 6", "a_2=6, a_1=4"], ["6, 4", "a_1=6, a_2=4"]),
        ("4, 6", ["x_1=6, x_2=4", "x=4,6", r"x\in\{4,6\}"], ["x_1=4", "x_1=4,x_2=5"]),
        ("x_{1}+2", ["2+x_1"], ["2+x_2"]),
        ("5:9", ["5 : 9", "S_1:S_2=5:9", "10:18", r"\frac{5}{9}", r"5\text{ to }9"], ["9:5", "S_1:S_2=9:5"]),
        (r"x=4 \text{ or } x=6", ["4, 6", "x=6, x=4"], [r"x=4 \text{ and } y=6", "y=4, y=6"]),
        ("2:3:7", ["a:b:c=2:3:7", "4:6:14"], ["2:7:3", "2:3"]),
        (r"\frac{\pi}{5}+k\pi", [r"\frac{\pi}{5}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{5}+n\pi \quad (n \in \mathbb{Z})",
                                 r"k\pi+\frac{\pi}{5} \text{ for any integer } k"],
         [r"\frac{\pi}{5}+2k\pi, k\in\mathbb{Z}", r"\frac{\pi}{5}"]),
        (r"x \equiv 4 \pmod 9", [r"13 \pmod{9}", r"-5 \bmod 9", "x≡4 (mod 9)"], [r"x\equiv4\pmod 8", r"5\pmod9", "4"]),
        (r"\frac{x^3}{3}+C", [r"\frac{x^3}{3}+c"], [r"\frac{x^3}{3}"]),
    ],
    "matrices": [
        (r"\begin{pmatrix}3\\4\end{pmatrix}",
         [r"\left[\begin{array}{c}3\\4\end{array}\right]", r"v=\begin{bmatrix}3\\[1ex]4\end{bmatrix}"],
         [r"\begin{pmatrix}3&4\end{pmatrix}", r"\begin{pmatrix}4\\3\end{pmatrix}"]),
        (r"\begin{pmatrix}1/7\\3/7\end{pmatrix}", [r"\frac17\begin{pmatrix}1\\3\end{pmatrix}"],
         [r"\frac17\begin{pmatrix}3\\1\end{pmatrix}"]),
        (r"\begin{cases}2 & x>1\\5 & x\le 1\end{cases}",
         [r"\begin{cases}5, & \text{if } x\leq1\\2, & \text{if } x>1\end{cases}"],
         [r"\begin{cases}5 & x>1\\2 & x\le 1\end{cases}", r"\begin{cases}2 & x\ge1\\5 & x< 1\end{cases}"]),
        (r"\binom{m}{3}", [r"{m \choose 3}", r"\dbinom m3"], [r"{3 \choose m}"]),
        (r"\binom ur", [r"\binom{u-1}r+\binom{u-1}{r-1}", r"\frac{u!}{r!(u-r)!}", r"\frac ur\binom{u-1}{r-1}"],
         [r"\binom ru", r"\binom{u-1}{r}+\binom{u-1}{r+1}", r"\frac{u!}{(u-r)!}"]),
    ],
    "spelling": [
        ("8250", [r"8\,250", r"8{,}250", "8 250"], [r"8\,25", r"8\,251"]),
        ("3/4", ["¾", r"\color{red}{\frac34}", r"\textcolor{blue}{3/4}", r"\boxed{\frac{3}{4}}"], ["½"]),
        (r"\sqrt{7}", ["√7", "√(7)", "７**(1/2)"], ["√8"]),
        ("x^{-2}", ["x⁻²", "x**(-2)"], ["x²", "x₂"]),
        ("(4,5)", ["（4，5）"], ["（5，4）"]),
        (r"p \lor q", ["p∨q"], [r"p \land q", "p, q"]),
        ("4, 5", ["4或5", r"4\text{ 或 }5", "4、5"], ["4或6"]),
        (r"x\le4", ["x≤4", "x⩽4"], ["x≥4"]),
        (r"3\theta", ["3θ", "3*theta"], ["3φ"]),
        ("7.25", ["7,25"], ["7,2"]),
        (r"1011_2", [r"1011_{\text{two}}", "(1011)_2"], [r"1011_3"]),
        ("|a-9|", ["abs(a-9)", "|9-a|"], ["a-9"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_meaning_in_many_forms(kind, verifier):
    cases = [(gold, answer, True) for gold, right, _ in KINDS[kind] for answer in [gold, *right]]
    cases += [(gold, answer, False) for gold, _, wrong in KINDS[kind] for answer in wrong]
    verdicts = verifier.grade([gold for gold, _, _ in cases], [rf"\boxed{{{answer}}}" for _, answer, _ in cases])
    assert not [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]]


def test_what_counts_is_whole():
    from oblrpo.tasks.grading.relations import _points

    u, r = sympy.symbols("u r", real=True)
    assert all(point[r].is_Integer for point in _points(sympy.Tuple(sympy.binomial(u, r))))
    assert not all(point[u].is_Integer for point in _points(sympy.Tuple(sympy.binomial(u, r))))


def test_signs_outside_ascii():
    assert latex_of("x² ≤ 2½·π⁻¹²") == r"x^{2} \le  2\frac{1}{2}\cdot \pi ^{-12}"
    assert latex_of("（１，２）∪｛Ω｝") == r"(1,2)\cup {\Omega }"
    assert tidy("√(x+1)") == r"\sqrt{x+1}"
    assert tidy("5，6 或 7。") == "5,6 or 7"


def test_no_text_makes_the_comparison_slow_or_fail():
    def algebra(gold, answer):
        raise NeedsAlgebra

    rng = random.Random(0)
    pieces = [r"\text{", "}", "{", "(", ")", "[", "]", ",", " ", "=", "<", r"\in", r"\mathbb{Z}", "|", ":", "A)", "x"]
    pieces += ["1", ".", "-", "and", "or", r"\cup", r"\{", r"\}", r"\begin{cases}", r"\\", "mod", "for", "½", "页"]
    texts = (
        [piece * 150 for piece in pieces]
        + ["=x" * 450, "a_=" * 330]
        + ["".join(rng.choices(pieces, k=150)) for _ in range(200)]
    )
    for text in texts:
        for gold, answer in (("A", text), ("x<3", text), ("k=1,n=2", text), (text, "x")):
            started = time.monotonic()
            try:
                equal((gold,), answer, algebra)
            except NeedsAlgebra:
                continue
            finally:
                assert time.monotonic() - started < 1, text
