"""`oblrpo evaluate --completions`: scripted completions give known figures, mistakes one sentence."""

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import complained

pytest.importorskip("math_verify")


@pytest.fixture
def files(tmp_path):
    """Two problems with four completions each: 2 right of 4 with one wrong answer twice; 1 of 4 and a silent one."""
    data, completions = tmp_path / "data.jsonl", tmp_path / "completions.jsonl"
    rows = [{"problem": "p", "answer": r"\frac{1}{2}"}, {"problem": "q", "answer": "x+1"}]
    texts = [[r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{x+y}", r"\boxed{y+x}"]]
    texts += [[r"\boxed{1+x}", r"\boxed{3}", r"\boxed{4}", "I do not know"]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"index": i, "completion": text} for i, row in enumerate(texts) for text in row]
    completions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return data, completions


def call(oblrpo, files, *more):
    data, completions = files
    return oblrpo("evaluate", "--completions", completions, "--benchmark", "math500", "--data", data, *more)


def test_known_figures(oblrpo, files):
    code, out, err = call(oblrpo, files, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["benchmark"], result["problems"], result["samples"]) == ("math500", 2, 4)
    assert result["avg@k"]["value"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert {k: v["value"] for k, v in result["pass@k"].items()} == pytest.approx({"1": 3 / 8, "2": 2 / 3, "4": 1.0})
    # At 4: two against two (x+y and y+x are one answer), and one each of three answers.
    assert result["maj@k"]["4"]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert result["maj@k"]["1"]["value"] == pytest.approx(3 / 8)
    low, high = result["avg@k"]["interval"]
    assert low == pytest.approx(3 / 8 - 1.96 * 1 / 8, abs=1e-4)
    assert high == pytest.approx(3 / 8 + 1.96 * 1 / 8, abs=1e-4)
    assert (result["timeouts"], result["unparsable"], result["crashed"]) == (0, 1, 0)


def test_the_table_and_chosen_sizes(oblrpo, files):
    code, out, _ = call(oblrpo, files, "--k", "3")
    assert code == 0
    assert "avg@4" in out
    assert "pass@3" in out
    assert "pass@2" not in out
    assert "1 unparsable" in out


def test_mistakes(oblrpo, files, tmp_path):
    data, completions = files
    kept = completions.read_text().splitlines()

    def with_lines(*lines):
        completions.write_text("\n".join(lines) + "\n")
        return call(oblrpo, files)

    complained(with_lines(*kept[:4]), "completions.jsonl has no completion for index 1")
    complained(with_lines(*kept, kept[0]), "fewer completions for index 1 than the 5 of other problems", "equally many")
    complained(with_lines(*kept[:5], kept[7]), "fewer completions for index 1 than the 4")
    complained(with_lines("{"), "completions.jsonl line 1 is not JSON")
    complained(with_lines('{"index": 2, "completion": ""}'), "line 1", "'index'", "from 0 to 1")
    complained(with_lines('{"index": true, "completion": ""}'), "line 1", "'index'")
    complained(with_lines('{"index": 0}'), "line 1", "'completion' must be text")
    twice = '{"index": 0, "sample": 3, "completion": "x"}'
    complained(with_lines(twice, twice), "line 2: index 0, sample 3 is already in line 1")
    completions.write_text("\n".join(kept))
    complained(call(oblrpo, files, "--k", "5"), "k is 5", "from 1 to 4")
    complained(call(oblrpo, files, "--temperature", "0.5"), "remove --temperature")
    complained(call(oblrpo, files, "--seconds", "0"), "seconds must be a positive number")
    complained(oblrpo("evaluate", "--completions", completions, "--benchmark", "math50", "--data", data), "math500")
    complained(
        oblrpo("evaluate", "--completions", tmp_path / "none", "--benchmark", "math500", "--data", data), "Cannot read"
    )


def test_torch_stays_out(files):
    data, completions = files
    arguments = ["evaluate", "--completions", str(completions), "--benchmark", "math500", "--data", str(data)]
    code = (
        f"import sys; from oblrpo.cli import dispatch; dispatch({arguments}); "
        "assert not {'torch', 'sympy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
