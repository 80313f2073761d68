"""Faults of recurrent states, and of latents (MLA) on GPUs."""

from __future__ import annotations

from tests.faults.fault import Fault

STATES, UNIT = "vllm_specplug/cpu/states.py", "tests/unit/hosts/test_states.py::"
KERNELS, V2 = "vllm_specplug/gpu/kernels/", "tests/v2/test_state_kernels.py::"

STATE_FAULTS = [
    Fault(
        "a node continues the state of the row before it",
        "states",
        STATES,
        "above = place[request[at], parents[request[at], row[at]]] if depth",
        "above = place[request[at], row[at] - 1] if depth",
        UNIT + "test_a_node_continues_its_parent",
    ),
    Fault(
        "tree rows run on the request's own state",
        "states",
        STATES,
        "        before = after\n",
        "        before = own\n",
        UNIT + "test_a_node_continues_its_parent",
    ),
    Fault(
        "the commit leaves the root's state out",
        "states",
        STATES,
        "    accepted, depths = paths >= 0,",
        "    accepted, depths = (paths >= 0) & (paths != paths[:, :1]),",
        UNIT + "test_commit_follows_the_accepted_path",
    ),
    Fault(
        "a state does not move on to the next block",
        "states",
        STATES,
        "Sequences(starts, step.blocks[goes_on], blocks.gather(1, last).squeeze(1)[goes_on])",
        "Sequences(starts, step.blocks[goes_on], step.blocks[goes_on])",
        UNIT + "test_commit_follows_the_accepted_path",
    ),
    Fault(
        "drafts behind a prompt change its state",
        "states",
        STATES,
        "lens = (root + 1 - first)[others]",
        "lens = scheduled[others]",
        UNIT + "test_rows_are_sorted",
    ),
    Fault(
        "a convolution's window is shifted by one input",
        "states",
        STATES,
        "        before = after\n",
        "        before = [after[0].roll(1, 1), *after[1:]]\n",
        "tests/hosts/test_hybrid.py::test_trees_have_the_bits_of_plain_steps",
    ),
    Fault(
        "the proof does not see a state that is not committed",
        "states",
        "vllm_specplug/vllm/proof/proof.py",
        "plain, again = self._decode_on() if self._has_states else self._decode_plainly()",
        "plain, again = self._decode_plainly()",
        "tests/hosts/test_hybrid.py::test_the_proof_passes",
    ),
    Fault(
        "a row of a GPU's tree continues the row before it",
        "states",
        KERNELS + "tree_states.py",
        "return (other < row) & (((word >> (other % 64)) & 1) != 0)",
        "return (other < row) & (word != 0)",
        V2 + "test_a_wrong_parent_shows[1]",
    ),
    Fault(
        "a row of a GPU's tree leaves its parent's state of Mamba-2 behind",
        "states",
        KERNELS + "mamba2_tree.py",
        "    if COMMITS:\n        tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)\n    else:\n",
        "    tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)\n    if not COMMITS:\n",
        V2 + "test_mamba2[dtype0-1]",
    ),
    Fault(
        "a row of a GPU's tree leaves its parent's state of the gated delta rule behind",
        "states",
        KERNELS + "gated_delta_tree.py",
        "    if COMMITS:\n        tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)\n    else:\n",
        "    tl.store(own, state.to(states_ptr.dtype.element_ty), mask=inside)\n    if not COMMITS:\n",
        V2 + "test_gated_delta_rule[dtype0-1]",
    ),
    Fault(
        "a convolution's window on a GPU is shifted by one input",
        "states",
        KERNELS + "conv_tree.py",
        "place = emitted + tap  #",
        "place = emitted + tap - 1  #",
        V2 + "test_convolution[dtype0-1]",
    ),
    Fault(
        "a state on a GPU is not committed",
        "states",
        "vllm_specplug/gpu/runner.py",
        "        self.state_layers.commit(trees.plan.source_rows)\n",
        "",
        "tests/v2/test_hybrid.py::test_tokens",
    ),
    Fault(
        "rows of a GPU's tree see no positions of each other's latents",
        "latents",
        KERNELS + "latent_tree.py",
        "        scores += tl.dot(q_rotary, tl.trans(k_rotary), input_precision=PRECISION)\n",
        "",
        "tests/v2/test_latents.py::test_kernel[contexts0-rows0-4-sizes0-1-dtype0]",
    ),
    Fault(
        "a GPU's tree over latents forgets the context",
        "latents",
        KERNELS + "latent_tree.py",
        '    seen = sums > float("-inf")',
        '    seen = sums < float("-inf")',
        "tests/v2/test_latents.py::test_kernel[contexts0-rows0-4-sizes0-1-dtype0]",
    ),
]
