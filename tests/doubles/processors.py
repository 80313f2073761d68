"""A custom logits processor: it changes greedy answers too, and looks at the tokens so far."""

from __future__ import annotations

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Avoid(AdapterLogitsProcessor):
    """With ``extra_args={"avoid": n}``, makes the ids within ``n`` of the newest token, and of the count, unlikely."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        distance = (params.extra_args or {}).get("avoid")
        if distance is None:
            return None

        def apply(output_token_ids, logits):
            for center in (output_token_ids[-1] if output_token_ids else 50, 3 + 7 * len(output_token_ids)):
                logits[max(center - distance, 0) : center + distance] -= 9.0
            return logits

        return apply
