"""Numbers, units and formulas in answers: equal only if they are so exactly, however they are written."""

import time
from fractions import Fraction

import pytest

from oblrpo.tasks.grading.normal import tidy
from oblrpo.tasks.grading.units import number, without_unit

pytest.importorskip("math_verify")

# By kind: gold answers with the answers that are right, and those that are wrong.
KINDS = {
    "tiny numbers": [
        (r"\frac{7}{3^{900}}", [r"\frac{21}{3^{901}}", r"7 \cdot 3^{-900}"], [r"\frac{8}{3^{900}}",
         r"\frac{7}{3^{901}}", "0"]),
        (r"\frac{1}{190!}", [r"\frac{191}{191!}"], [r"\frac{1}{191!}", "0"]),
        ("e^{-900}", [r"\frac{1}{e^{900}}", r"\exp(-900)"], ["e^{-901}", "0"]),
        (r"(\frac{7}{3^{900}}, 1)", [], [r"(\frac{8}{3^{900}}, 1)"]),
        (r"\frac{x}{3^{900}}", [r"3^{-900} x"], [r"\frac{x}{3^{899}}", "0"]),
    ],
    "near one": [
        ("1-2^{-60}", [r"\frac{2^{60}-1}{2^{60}}"], ["1-2^{-61}", "1"]),
        (r"1-\frac{1}{3^{900}}", [r"\frac{3^{900}-1}{3^{900}}"], [r"1-\frac{1}{3^{899}}", "1"]),
        ("1-e^{-800}", [r"\frac{e^{800}-1}{e^{800}}"], ["1-e^{-801}", "1"]),
        ("3^{900}+1", ["1+3^{900}"], ["3^{900}"]),
        (r"\sqrt{10^{40}+1}", [], ["10^{20}"]),
        (r"\pi+10^{-25}", [], [r"\pi"]),
        (r"\tanh(90)", [], ["1"]),
        (r"[0, 1-2^{-60}]", [], [r"[0, 1-2^{-61}]"]),
        ("x < 1-2^{-60}", [], ["x < 1-2^{-61}"]),
        (r"\left(\frac{3}{7}\right)^{1500}", [], [r"\left(\frac{3}{7}\right)^{1501}"]),
    ],
    "zero": [
        ("0", [r"\ln 1", r"\arccos 1", r"\log_6 1", r"\lg 1", r"\tan 0", r"\sin\pi", r"\sqrt{0}", r"5\ln(2-1)",
               r"\sqrt{5}\sqrt{7}-\sqrt{35}", r"\cos\frac\pi2", r"t\ln 1"],
         [r"\ln 2", r"\arccos 0", r"\log_6 6", r"\ln 1 + 1", r"\arccos 0.999999", "e^{-250}", r"t\ln 2"]),
        (r"\log_4 1", ["0", r"\sin\pi", r"\arctan 0"], ["1", r"\log_4 2"]),
        ("t", [r"t+\ln 1", r"t+\sin\pi"], [r"2t+\sin\pi", r"t+\ln 2", r"u\cos\frac{\pi}{2}"]),
        (r"(\ln 1, 4)", ["(0,4)"], ["(1,4)"]),
        # A zero that no number of digits shows hides nothing beside it.
        ("4", [r"4+\sin\pi", r"4+\sqrt{5}\sqrt{7}-\sqrt{35}"],
         [r"9+\cos\frac{\pi}{2}", r"9\cos\frac{\pi}{2}", r"(\sqrt{5}\sqrt{7}-\sqrt{35})\cdot 9", r"5+\tan\pi"]),
        (r"\sin\pi", ["0"], ["1", r"\ln 3", "t"]),
    ],
    "giants": [
        (r"2^{3^{2^{10}}}", [r"2^{3^{1024}}"], [r"2^{3^{1023}}"]),
        (r"\binom{900}{450}", [r"\frac{900!}{(450!)^2}"], [r"\binom{900}{451}"]),
        (r"\lfloor 10^{20} e \rfloor", ["271828182845904523536"], ["271828182845904523537"]),
    ],
    "units without a space": [
        (r"7\text{ m}", ["7m", "7.0m", "700cm", r"7\,\mathrm{m}"], ["7cm", "7m^2", "7t", "7s", "8m"]),
        (r"14\text{ kg}", ["14kg", "14000g", "14.0kg"], ["14g", "14km", "14mg"]),
        (r"30\text{ m/s}", ["30m/s", "108km/h"], ["30km/h", "30m", "30s/m"]),
        ("45", ["45km/h", "45cm", "45m/s", "45hours"], ["45m", "45t", "45a/b", "45mn", "45cm+1"]),
        ("2V/h", [], ["2", "V"]),
    ],
    "units": [
        (r"8\text{ cm}", ["8", "8cm", "8 cm", r"8\ \mathrm{cm}", r"\text{8 cm}", r"8\text{ centimetres}",
         r"0.08\text{ m}"],
         [r"8\text{ nm}", r"8\text{ mm}", r"8\text{ cm}^2", r"8\text{ inches}", "80", r"80\text{ cm}"]),
        (r"8\text{ cm}^2", [r"8\text{ sq cm}", r"8\text{ square centimeters}", r"8\text{ cm squared}",
         r"8\ \mathrm{cm^2}"],
         [r"8\text{ cm}^3", r"8\text{ cm}", r"64\text{ cm}"]),
        (r"9\text{ m/s}", [r"9\text{ meters per second}", r"9\ \mathrm{m\,s^{-1}}",
         r"9\,\frac{\text{m}}{\text{s}}", "9 m/s",
                           r"9\ \text{m}\cdot\text{s}^{-1}"],
         [r"9\text{ km/h}", r"9\text{ cm/s}", r"9\text{ m}", r"9\text{ m/s}^2", r"9\text{ mph}"]),
        (r"6\text{ liters}", [r"6\text{ L}", r"6000\text{ mL}"], [r"6\text{ gallons}", r"6\text{ mL}"]),
        (r"6\text{ kg}", [r"6\text{ kilograms}"], [r"6\text{ lb}", r"6\text{ pounds}", r"6\text{ g}"]),
        (r"6\text{ dollars}", [r"\$6", "$6.00", r"6\text{ USD}", "6"], [r"6\text{ euros}", "6\u20ac", r"\$60",
         r"6\text{ cents}"]),
        (r"6\text{ hours}", [r"360\text{ minutes}", "6 hrs"], [r"6\text{ minutes}", r"6\text{ days}"]),
        (r"40^\circ\text{C}", ["40\u00b0C", "40", r"40\text{ degrees Celsius}"], [r"40^\circ\text{F}",
         r"40\text{ K}"]),
        (r"60^\circ", [r"\frac{\pi}{3}\text{ radians}", r"60\text{ degrees}"], [r"60\text{ radians}",
         r"\frac{\pi}{6}"]),
        (r"4\text{ square units}", [r"4\text{ units}^2", "4"], [r"4\text{ cubic units}", r"4\text{ units}^3"]),
        (r"4\text{ years}", [], [r"4\text{ light years}"]),
        (r"4^\circ", [], ["4'"]),
        (r"6\pi\sqrt{2}", [r"6\pi\sqrt{2}\text{ cm}^2", r"6\pi\sqrt{2}\text{ square units}"],
         [r"3\pi\sqrt{2}\text{ cm}^2"]),
        (r"12\text{ pears}", ["12 pears", r"12\text{ ripe pears}"], [r"12\text{ plums}"]),
        (r"4\text{ feet }2\text{ inches}", [], [r"4\text{ feet}", "4 feet 3 inches"]),
        ("12", ["12 pears", "12km", r"12\text{ J}", r"12\,\Omega", r"12\ \mathrm{kg\,m\,s^{-2}}", "12\u9875"],
         ["12 x", "12x", "12 mg h", "12 abc", r"12\mathrm{i}", "12 J K", "13 pears"]),
    ],
    "words that change a number": [
        ("7", [r"7\text{ pears}", r"\text{seven}", r"\text{exactly } 7", r"7\text{ in total}"],
         [rf"7\text{{ {words}}}" for words in (
             "squared", "cubed", "factorial", "factorials", "tens", "hundredths",
             "eighths", "ninths", "twentieths", "below zero", "dozen",
             "hundred", "thousand", "million", "quadrillion", "nonillion", "or more", "and a half", "times as many",
             "to the fourth power", "more than the other", "halves", "(mod 9)",
         )] + [r"\text{more than } 7", r"\text{not } 7", r"\text{minus } 7", "7 squared", "7 million", "7\u4e07",
          "7\u500d", "7\u6298", "7 /", r"7 \cdot"]),
        ("49", [r"7\text{ squared}", "7 squared", "forty-nine"], []),
        ("5040", [r"7\text{ factorial}"], []),
        ("0.07", [r"7\text{ hundredths}"], []),
        (r"\frac{7}{8}", [r"7\text{ eighths}", r"\text{seven eighths}"], []),
        ("-7", [r"7\text{ below zero}", r"\text{minus } 7", r"7\text{ degrees below zero}"], []),
        ("7000000", [r"7\text{ million}", "7 million people", r"\$7\text{ million}"], [r"7\text{ billion}"]),
        ("20", ["20 fifth graders"], []),
    ],
    "decimals": [
        (r"0.\overline{36}", [r"\frac{4}{11}", r"0.3636\ldots", "0.(36)"], ["0.36", r"0.\overline{63}",
         r"0.3\overline{6}"]),
        (r"\frac{7}{6}", [r"1.1\overline{6}", r"1.1\dot{6}", "1.1666..."], ["1.17", "1.1666", r"1.\overline{16}"]),
        (r"\frac{2}{7}", [r"0.\dot{2}8571\dot{4}"], []),
        ("7500", [r"7\,500", "7 500", "7{,}500", "\uff17\uff15\uff10\uff10"], ["75 00", "7.500"]),
        (r"3\frac{2}{5}", [r"\frac{17}{5}", "3 2/5", r"3\tfrac25"], [r"\frac{6}{5}", r"\frac25"]),
        (r"\frac{2}{3}", [r"66\frac{2}{3}\%", r"66.\overline{6}\%"], ["66.6", r"0.66\%"]),
    ],
    "formulas": [
        ("q - r", ["-r+q", "q+(-r)"], ["r-q", "q+r"]),
        (r"\sqrt[4]{3}", ["3**(1/4)", r"\sqrt{\sqrt{3}}", "3^(1/4)"], [r"\sqrt{3}"]),
        (r"\frac{1}{\sqrt{m}}", [r"\sqrt{1/m}", r"\frac{\sqrt m}{m}"], [r"\frac1m"]),
        (r"\sqrt{u}\sqrt{v}", [r"\sqrt{uv}"], [r"\sqrt{u+v}"]),
        (r"\sqrt{u^2}", ["|u|"], ["u"]),
        (r"\ln|u|", [], [r"\ln u"]),
        (r"\log_3(u-70)", [r"\frac{\ln(u-70)}{\ln 3}"], [r"\log_3 u-70"]),
        (r"\arcsin u", [r"\frac{\pi}{2}-\arccos u"], [r"\arccos u", r"\frac{1}{\sin u}"]),
        (r"\sqrt{4-u^2}", [r"\sqrt{(2-u)(2+u)}"], [r"\sqrt{u^2-4}"]),
        (r"(-1)^m", [r"(-1)^{m+2}", r"\cos(m\pi)"], [r"(-1)^{m+1}", "1"]),
        (r"\left\lfloor \frac{m+1}{2} \right\rfloor", [r"\lceil m/2 \rceil"], [r"\lfloor m/2 \rfloor", "m/2"]),
        (r"\lceil u \rceil", [], [r"\lfloor u \rfloor + 1", "u"]),
        (r"{m \choose 2}", [r"\frac{m(m-1)}{2}", r"\binom{m}{m-2}"], [r"\binom{m}{3}"]),
        (r"\sum_{j=1}^{m} a_j b_{m-j}", [r"\sum_{j=1}^{m} b_{m-j} a_j"], [r"\sum_{j=1}^{m} a_j", r"m a_j b_{m-j}"]),
        (r"\sum_{j=1}^{m} j", [r"\frac{m(m+1)}{2}", r"\sum_{l=1}^{m} l"], [r"\frac{m(m-1)}{2}"]),
        (r"\cos 36^\circ", [r"\frac{1+\sqrt5}{4}"], [r"\cos 36"]),
        (r"2\operatorname{cis} 60^\circ", [r"1+i\sqrt{3}"], [r"1-i\sqrt{3}"]),
        (r"\sqrt[3]{-64}", ["-4"], ["4"]),
        ("y < 3", ["3 > y", "2y < 6", "-y > -3"], ["-y < -3", r"y \le 3", "y > 3"]),
        ("(u+v)^2 = u^2+2uv+v^2", ["u^2+v^2+2uv = (u+v)(u+v)"], ["0 = 0", "u = u"]),
        # letters that are no real numbers
        (r"|z|^2", [r"|z| \cdot |z|"], ["z^2"]), ("A^T A", [], ["A A^T"]), (r"\angle KLM", [], [r"\angle KML"]),
        (r"\vec{u} \times \vec{v}", [], [r"\vec{v} \times \vec{u}"]), (r"\nabla \cdot u", [], [r"\nabla \times u"]),
        (r"\lim_{u \to 0} g(u)", [], ["g(u)", r"\lim_{u \to 1} g(u)"]), (r"\lim_{n \to \infty} b_n", [], ["b_n"]),
        # what the parser leaves out without a word
        ("g'(u)", [], ["g(u)"]), ("A^T", [], ["A"]), (r"\gcd(a,b)", [], ["1"]), (r"1+2+\ldots+m", [], ["m+3"]),
        ("7!!", [], ["105!", "5040!"]), (r"\operatorname{sech} u", [], [r"\sec (hu)"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_equal_only_if_they_are_so_exactly(verifier, kind):
    pairs = {
        (gold, answer): right
        for gold, good, bad in KINDS[kind]
        for right, answers in ((True, [gold, *good]), (False, bad))
        for answer in answers
    }
    verdicts = verifier.grade([gold for gold, _ in pairs], [rf"\boxed{{{answer}}}" for _, answer in pairs])
    assert not [
        (*pair, verdict.reason)
        for (pair, right), verdict in zip(pairs.items(), verdicts, strict=True)
        if verdict.correct != right
    ]


def test_a_unit_is_read_as_powers_of_base_units():
    value, unit = without_unit(r"3\text{ thousand kilowatt hours per square foot}")
    assert value == "3000"
    assert dict(unit.powers) == {"g": 1, "s": -2}
    assert unit.size == 1000 * 1000 * 3600 / Fraction(3048, 10000) ** 2
    assert not without_unit(r"3\text{ pears}")[1]
    assert without_unit("2 xy") == ("2 xy", without_unit("7")[1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"0.\overline{142857}", Fraction(1, 7)), (r"-2.0\bar{3}", -Fraction(61, 30)),
         (r"0.\dot1\dot2", Fraction(4, 33)),
        (r"0.1212\ldots", Fraction(4, 33)), (r"3.14159\ldots", None), ("4 1/2", Fraction(9, 2)),
         (r"4\frac12", Fraction(9, 2)),
        ("4 7/2", None),
    ],
)  # fmt: skip
def test_decimals_that_go_on(text, value):
    assert getattr(number(tidy(text)), "value", None) == value


@pytest.mark.parametrize(
    "text",
    [
        r"5\text{cm" + "^9" * 300 + "}", "5" + "\u4ebf " * 450, "5 " + "million " * 120, "about " * 160 + "5",
        "one " + "hundred " * 120,
        "0." + "1234567890" * 39 + r"\ldots",
        "5 feet " * 140, "5 m" + "/m" * 490, "5" + " km" * 330, r"1e2000\text{ trillion}",
        r"\text{" * 160, "5" * 990, "0." + r"\dot{1}" * 120,
    ],
)  # fmt: skip
def test_hostile_units_are_read_at_once(text):
    started = time.monotonic()
    number(tidy(text))
    str(without_unit(tidy(text)))
    assert time.monotonic() - started < 1
