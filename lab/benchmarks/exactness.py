"""How exact the score tape is: largest relative errors against loop autograd.

    python -m lab.benchmarks.exactness

Every family of the tests' model zoo, one random batch of left-padded prompts each. transformers takes norms, rotary
angles and softmaxes in float32 inside; for the float64 rows they are taken in float64.
"""

import torch

from tests.scores.models import batch, compare
from tests.scores.stay_double import StayDouble
from tests.scores.zoo import FAMILIES, build_family


def main() -> None:
    torch.set_num_threads(1)
    titles = [f"{dtype}: {what}" for dtype in ("float32", "float64") for what in ("norms", "group norms", "gradient")]
    print(f"| family | {' | '.join(titles)} |\n" + "|---" * 7 + "|")
    for seed, name in enumerate(FAMILIES):
        errors: list[float] = []
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(seed)
            with StayDouble():  # touches float64 tensors only
                model = build_family(name, dtype, "eager" if name.startswith("gemma2") else "sdpa")
                errors += compare(model, batch(), torch.randn(6, dtype=dtype), group_size=3)
        print(f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")


if __name__ == "__main__":
    main()
