"""Squared score norms of whole sequences, and the weighted gradient, from one forward and one backward.

The way of one `nn.Linear`, y = x W' + b, through the tape: six hops, and the functions in the order in which they run.

`with tape:`
  1. recorder. `ScoreTape.__enter__` calls `ForwardRecorder.start`. It lists the modules that own trainable parameters
     (`trainable_layers.trainable_layers`, by `rules.rule_for`) and hooks each (`ForwardRecorder._hook`).
     In the forward, `_before_forward` hides W and b from autograd (`TrainableLayer.hide_parameters`), so that no
     backward makes their gradients. `_after_forward` shows them again, and notes a call (`tapped_call`) of a
     `ParameterPiece` for each of W and b.
  2. tapped calls. The output y passes through `OutputTap.forward`, an identity that keeps x.

`tape.record(logps_S)`
     It checks once that rows do not mix (`rows.check_rows`), and runs autograd down to the taps
     (`ForwardRecorder.backward`). `OutputTap.backward` sees the gradient of y, and gives it with x to
     `ShareCollector.receive`.
  3. layout. `ShareCollector.rows` puts both in rows by sequence (`Layout.rows`): (S, T, C) and (S, T, R).
  4. rules. `rules.linear` makes of them the factored gradient of W, `Outer`, and that of b, `Vector` (`contributions`).
  5. stores. `ShareCollector.deliver` gives a piece's shares, once it has those of all its calls, to `ScoreTape._take`.
     It takes the inner products and sketches that `record` was asked for (`gram`), and holds the shares in a store
     (`stores.held`): `Factors` as they are, `PerSequence` multiplied out. "streamed" takes the norms alone.

`tape.norm2()`
  6. norms. `stores.norm2_of` adds up all parameters' norms; those of `Factors` come by `norms.norm2` and
     `norms.gram_norm2`, without the gradients themselves.

`tape.accumulate(coef_S, group_size)`
     The store's `group_sums` takes sum_s coef_s G_s, group by group, and `ParameterPiece.add` adds it to `.grad`.

An embedding or a norm differs in its rule alone. Other ways to the same stores: `head` (log-probabilities without all
logits), `experts` (batched ones; LoRA on them is in `trainable_layers`), `tapped_operations`, `operations` and
`functions` (parameters without a rule). `proxies` are weights from a forward alone. `oracle` is loop autograd, which
everything is tested against.
"""

from oblrpo.scores import oracle
from oblrpo.scores.contributions import Outer, Vector
from oblrpo.scores.gram import Sketch
from oblrpo.scores.head import TokenLogps, chunked_logps, token_logps
from oblrpo.scores.proxies import PROXIES, CalibratedProxy, Features, agreement, log_error, logit_norm2
from oblrpo.scores.rules import LayerCall, UnsupportedModelError, register_rule
from oblrpo.scores.stores import METHODS
from oblrpo.scores.tape import ScoreTape
from oblrpo.scores.trainable_layers import by_operations

__all__ = [
    "METHODS",
    "PROXIES",
    "CalibratedProxy",
    "Features",
    "LayerCall",
    "Outer",
    "ScoreTape",
    "Sketch",
    "TokenLogps",
    "UnsupportedModelError",
    "Vector",
    "agreement",
    "by_operations",
    "chunked_logps",
    "log_error",
    "logit_norm2",
    "oracle",
    "register_rule",
    "token_logps",
]
