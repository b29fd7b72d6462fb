"""How exact the score tape is: largest relative errors against loop autograd.

    python -m benchmarks.exactness

Five configurations, one random batch of left-padded prompts each. transformers takes norms, rotary angles and softmaxes
in float32 inside; for the float64 rows they are taken in float64.
"""

import torch
from tests.scores.models import CONFIGURATIONS, batch, build, compare
from tests.scores.stay_double import StayDouble


def main() -> None:
    torch.set_num_threads(1)
    print("| configuration | dtype | squared norms | group norms | weighted gradient |\n|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float64):
        for seed, name in enumerate(CONFIGURATIONS):
            torch.manual_seed(seed)
            with StayDouble():  # touches float64 tensors only
                errors = compare(build(name, dtype), batch(), torch.randn(6, dtype=dtype), group_size=3)
            print(f"| {name} | {str(dtype)[6:]} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")


if __name__ == "__main__":
    main()
