"""A reward that is neither mathematics nor right or wrong: the words that a summary shares with a reference.

    oblrpo train --data examples/summaries/passages.jsonl --sft-data examples/summaries/passages.jsonl \\
        --rewards examples/summaries/overlap.py:rouge_l --prompt-template '{prompt}\\nSummary:\\n' ...
"""

import re


def rouge_l(completions, summaries, **columns):
    """ROUGE-L F1 (Lin 2004) of each completion with the best of its references, in [0, 1]."""
    return [max(f1(one, text) for one in references) for text, references in zip(completions, summaries, strict=True)]


def f1(reference, text):
    """2 L / (m + n), L the length of the longest common subsequence of the m and n words."""
    wanted, written = (re.findall(r"[a-z0-9]+", passage.lower()) for passage in (reference, text))
    lengths = [0] * (len(written) + 1)  # of what the words so far have in common with the first 0, 1, 2 ... written
    for word in wanted:
        before = lengths.copy()
        for place, other in enumerate(written):
            lengths[place + 1] = before[place] + 1 if word == other else max(before[place + 1], lengths[place])
    return 2 * lengths[-1] / (len(wanted) + len(written)) if lengths[-1] else 0.0
