"""How exact the score tape is: largest relative errors against loop autograd.

    python -m benchmarks.exactness

Five configurations, one random batch of left-padded prompts each. transformers' RMSNorm computes in float32 inside; for
the float64 rows it is replaced by one that keeps its dtype.
"""

import torch
from tests.scores.models import CONFIGURATIONS, batch, build, compare, norms_in_their_own_dtype


def main() -> None:
    torch.set_num_threads(1)
    print("| configuration | dtype | squared norms | group norms | weighted gradient |\n|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float64):
        if dtype is torch.float64:
            norms_in_their_own_dtype()
        for seed, name in enumerate(CONFIGURATIONS):
            torch.manual_seed(seed)
            errors = compare(build(name, dtype), batch(), torch.randn(6, dtype=dtype), group_size=3)
            print(f"| {name} | {str(dtype)[6:]} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")


if __name__ == "__main__":
    main()
