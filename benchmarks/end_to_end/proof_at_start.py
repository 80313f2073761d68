"""Measures the proof at start: its time, and how far trees and the control are from plain decoding over many texts.

    python -m benchmarks.end_to_end.proof_at_start --out proof.json                  # SmolLM2, bfloat16, compiled
    python -m benchmarks.end_to_end.proof_at_start --parameters 1.5 --eager --out big.json   # a random Llama

The method is lookup, which needs no drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Read by vLLM at import: the engine runs in this process.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")

import torch
from safetensors.torch import save_file

from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare


def write_llama(path: Path, billions: float) -> Path:
    """Write a random Llama of about so many parameters, in bfloat16."""
    hidden, inner, heads, kv_heads, head_size, vocab = 2048, 5632, 32, 8, 64, 32000
    per_layer = hidden * head_size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    num_layers = round((billions * 1e9 - 2 * vocab * hidden) / per_layer)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale * columns**-0.5).bfloat16()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden, hidden**0.5),
        "lm_head.weight": random(vocab, hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": random(heads * head_size, hidden, 2.0),
            f"{name}.self_attn.k_proj.weight": random(kv_heads * head_size, hidden, 2.0),
            f"{name}.self_attn.v_proj.weight": random(kv_heads * head_size, hidden),
            f"{name}.self_attn.o_proj.weight": random(hidden, heads * head_size),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden),
            f"{name}.mlp.up_proj.weight": random(inner, hidden),
            f"{name}.mlp.down_proj.weight": random(hidden, inner),
            f"{name}.input_layernorm.weight": ones.clone(),
            f"{name}.post_attention_layernorm.weight": ones.clone(),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def measure(target: Path, dtype: str, eager: bool, texts: int) -> dict[str, Any]:
    """Start an engine, and run the proof again on other texts."""
    from vllm import LLM

    from vllm_specplug.utils.proof_files import kept
    from vllm_specplug.vllm.proof.driver import DriverV1
    from vllm_specplug.vllm.proof.proof import Proof

    began = time.perf_counter()
    llm = LLM(
        str(target),
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=256 << 20,
        speculative_config={"method": "lookup"},
    )
    started = time.perf_counter() - began
    [proof] = kept()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found = []
    for seed in range(texts):
        evidence = Proof(DriverV1(worker), seed).run()
        summary = evidence.summary()
        found.append({"share_of_control": summary["difference"] / summary["control"], "fault": evidence.fault()})
    numbers = {key: value for key, value in proof.items() if key not in ("facts", "date")}
    return {"start_seconds": round(started, 2), "proof": numbers, "texts": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--parameters", type=float, help="instead: billions of parameters of a random Llama")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--texts", type=int, default=0, help="texts on which the proof is run again")
    parser.add_argument("--out", type=Path, required=True, help="JSON file that receives the result")
    args = parser.parse_args()
    target = args.target or (prepare() if args.parameters is None else None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no proof is kept from before
        target = target or write_llama(Path(folder) / "llama", args.parameters)
        result = measure(target, args.dtype, args.eager, args.texts)
    result["settings"] = {"model": target.name, "parameters": args.parameters, "dtype": args.dtype, "eager": args.eager}
    result["provenance"] = provenance(baseline="plain vLLM's logits in the same engine")
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("start_seconds", "proof")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
