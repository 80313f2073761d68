"""`specplug train eagle`: prompts -> answers -> features -> training -> checkpoint. Every step resumes."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..eagle2.checkpoint import load_head, offsets, save_head, target_ids
from ..eagle2.head import EagleHead, HeadConfig
from .answers import content_hash, read_answers, read_prompts, select_draft_vocabulary
from .evaluate import chain_acceptance
from .features import FeatureSet, extract, load_features, target_head
from .initialise import initialise, input_scale
from .loop import Batch, learning_rate, load_state, make_batch, plan, save_state
from .losses import distillation_loss, feature_loss
from .provenance import provenance


@dataclass(frozen=True)
class EagleOptions:
    """What a training run depends on, besides the target and the data."""

    epochs: int = 8
    batch_tokens: int = 4096
    lr: float = 1e-3
    weight_decay: float = 0.05
    clip: float = 1.0  # of the gradient's norm
    align_steps: int = 1  # HASS context alignment; 1 is EAGLE
    align_from: float = 0.0  # share of the steps made with align_steps 1 first
    step_weight: float = 1.0  # weight of alignment step j is step_weight ** (j - 1)
    feature_weight: float = 1.0
    ce_weight: float = 0.1
    topk: int = 10
    topk_weight: float = 0.0  # HASS's top-K term
    prompt_share: float = 0.0  # share of the rows inside the prompt that is trained on, drawn anew in each step
    noise: float = 0.2  # width of the uniform noise on the input features
    draft_vocab_size: int = 8192
    bias: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.align_steps < 1:
            raise ValueError(f"align_steps must be at least 1 (1 is EAGLE), got {self.align_steps}")
        if self.topk_weight and not self.ce_weight:
            raise ValueError("topk_weight needs ce_weight > 0: the top-K term is computed with the cross-entropy")


def train_eagle(
    target_dir: str,
    data: FeatureSet,
    out_dir: str,
    draft_ids: torch.Tensor,
    options: EagleOptions,
    dev: FeatureSet | None = None,
    facts: dict | None = None,
    save_every_s: float = 60.0,
    max_steps: int | None = None,
    init_from: str | None = None,
    progress: bool = True,
) -> EagleHead:
    """Train on `data` and write the checkpoint to `out_dir`; `max_steps` stops early, leaving the state to resume.

    draft_ids: int64 [draft_vocab], the target ids the head can propose, ascending.
    """
    target_config, embedding, lm_head = target_head(target_dir)
    objective = Objective(embedding, lm_head, draft_ids, options)
    head = EagleHead(HeadConfig.from_dict(target_config, bias=options.bias))
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    batches = list(plan(data.lengths.tolist(), options.batch_tokens, options.seed, options.epochs))
    plan_id = _plan_id(options, data, draft_ids)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    state_file = Path(out_dir) / "training_state.pt"
    state = load_state(state_file, plan_id) or {"step": 0, "seconds": 0.0}
    _start(head, optimizer, state, init_from, data, embedding, options.seed)

    started = saved = time.monotonic()
    smooth: dict[str, float] = {}
    stop = len(batches) if max_steps is None else min(max_steps, len(batches))
    steps = range(state["step"], stop)
    with tqdm(steps, initial=state["step"], total=len(batches), desc="train", disable=not progress) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(batches), options.lr)
            aligned = step >= options.align_from * len(batches)
            generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
            batch = make_batch(data, batches[step])
            losses = objective.losses(head, batch, options.align_steps if aligned else 1, generator)
            optimizer.zero_grad(set_to_none=True)
            sum(losses.values()).backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), options.clip)
            optimizer.step()
            for name, loss in losses.items():
                smooth[name] = 0.97 * smooth.get(name, loss.item()) + 0.03 * loss.item()
            bar.set_postfix_str(" ".join(f"{name} {value:.3f}" for name, value in smooth.items()), refresh=False)
            if time.monotonic() - saved > save_every_s or step + 1 == stop:
                saved = time.monotonic()
                seconds = state["seconds"] + saved - started
                _save(state_file, plan_id, head, optimizer, step + 1, seconds)
    head.eval()
    if stop == len(batches):
        facts = (facts or {}) | {
            "options": asdict(options),
            "init_from": Path(init_from).name if init_from else None,
            "steps": stop,
            "train_seconds": round(state["seconds"] + time.monotonic() - started),
        }
        if dev is not None:
            facts |= _measure(head, dev, embedding, objective.draft_head, draft_ids)
        export(head, target_config, draft_ids, out_dir, provenance(target_dir, **facts))
    return head


class Objective:
    """The loss of a batch: everything about it that stays the same over a run."""

    def __init__(self, embedding: torch.Tensor, lm_head: torch.Tensor, draft_ids: torch.Tensor, options: EagleOptions):
        self.embedding = embedding
        self.draft_head = lm_head[draft_ids].to(torch.bfloat16).contiguous()  # [draft_vocab, h]
        self.in_draft = torch.zeros(lm_head.shape[0], dtype=torch.bool)  # [vocab]
        self.in_draft[draft_ids] = True
        self.options = options

    def losses(self, head: EagleHead, batch: Batch, steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The named terms, summed over alignment steps, averaged over the weighted rows."""
        options = self.options
        drawn = batch.in_answer | (torch.rand(batch.in_answer.shape, generator=generator) < options.prompt_share)
        rows = (drawn & (batch.label_ids >= 0)).flatten().nonzero()[:, 0]
        weights = torch.full((rows.numel(),), 1 / max(rows.numel(), 1))
        # a token outside the draft vocabulary cannot be proposed: no cross-entropy there, only the feature
        ce_weights = weights * self.in_draft[batch.label_ids.flatten()[rows]]
        noise = (torch.rand(batch.features.shape, generator=generator) - 0.5) * options.noise
        inputs = batch.features + noise.to(batch.features.dtype)
        targets = batch.target_features.flatten(0, 1)[rows]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = head.aligned(self.embedding[batch.next_ids].to(inputs.dtype), inputs, steps)
        # the top-K term has its weight relative to the cross-entropy, whose chunks it shares
        topk_share = options.topk_weight / options.ce_weight if options.topk_weight else 0.0
        feature, ce = torch.zeros(()), torch.zeros(())
        for step, output in enumerate(outputs):
            predicted = output.flatten(0, 1)[rows]
            scale = options.step_weight**step
            feature = feature + scale * feature_loss(predicted, targets, weights)
            ce = ce + scale * distillation_loss(
                predicted, targets, self.draft_head, ce_weights, options.topk, topk_share
            )
        return {"feature": options.feature_weight * feature, "ce": options.ce_weight * ce}


def export(head: EagleHead, target_config: dict, draft_ids: torch.Tensor, out_dir: str, source: dict) -> None:
    """Write the head as a bf16 checkpoint without embedding and LM head: the target's are shared."""
    keys = ("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters", "vocab_size")
    keys += ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: target_config[key] for key in keys if key in target_config},
        "num_hidden_layers": 1,
        "bias": head.config.bias,
        "draft_vocab_size": draft_ids.numel(),
        "torch_dtype": "bfloat16",
        "specplug": source,
    }
    state = {name: tensor.to(torch.bfloat16) for name, tensor in head.folded_state().items()}
    if draft_ids.numel() < target_config["vocab_size"]:
        state["d2t"] = offsets(draft_ids)
    save_head(out_dir, config, state)


def load_trained(path: str) -> tuple[EagleHead, torch.Tensor]:
    """An exported head as a module (float32), and its draft ids int64 [draft_vocab]."""
    config, state = load_head(path)
    head = EagleHead(HeadConfig.from_dict(config, bias="fc.bias" in state))
    ids = target_ids(state["d2t"]) if "d2t" in state else torch.arange(config["vocab_size"])
    head.load_state_dict({name: state[name].float() for name in head.state_dict()})
    return head.eval(), ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug train eagle`."""
    parser.add_argument("--target", required=True, help="Hugging Face folder of the target")
    parser.add_argument("--prompts", nargs="+", default=[], help="prompts, JSON lines (.gz too): prompt or turns")
    parser.add_argument("--answers", help="answers file (default: OUT/answers.jsonl); made from the prompts if absent")
    parser.add_argument("--dev-answers", help="answers to measure acceptance on; never trained on")
    parser.add_argument("--features", help="folder of the feature cache (default: OUT/features)")
    parser.add_argument("--out", required=True, help="where the checkpoint and the training state go")
    parser.add_argument("--init-from", help="start from this checkpoint of the same shape")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    defaults = EagleOptions()
    for name, value in asdict(defaults).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")


def run(args: argparse.Namespace) -> int:
    """All steps, for the command line."""
    if args.threads:
        torch.set_num_threads(args.threads)
    out = Path(args.out)
    answers_file = Path(args.answers or out / "answers.jsonl")
    if args.prompts:
        from vllm_specplug.hosts.offline import answer_prompts

        answer_prompts(args.target, read_prompts(args.prompts), answers_file, max_tokens=args.max_tokens)
    if not answers_file.exists():
        raise SystemExit(f"There is no answers file {answers_file}: give --prompts to make one, or --answers.")
    answers = read_answers(answers_file)
    features = Path(args.features or out / "features")
    data = load_features(extract(args.target, answers, features))
    dev = None
    if args.dev_answers:
        dev = load_features(extract(args.target, read_answers(args.dev_answers), features.with_name("dev_features")))
    options = EagleOptions(**{name: getattr(args, name) for name in asdict(EagleOptions())})
    target_config = json.loads((Path(args.target) / "config.json").read_text())
    vocab_size, end = target_config["vocab_size"], target_config.get("eos_token_id")
    keep = end if isinstance(end, list) else [end] if end is not None else []
    draft_ids = select_draft_vocabulary(answers, options.draft_vocab_size, vocab_size, keep)
    facts = {
        "data_sha256": content_hash(answers),
        "prompts": len(answers),
        "answer_tokens": sum(len(answer.answer_ids) for answer in answers),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
    }
    train_eagle(args.target, data, str(out), draft_ids, options, dev, facts, init_from=args.init_from)
    return 0


def _start(head: EagleHead, optimizer, state: dict, init_from: str | None, data, embedding, seed: int) -> None:
    """Weights to begin with: the saved state's, another checkpoint's, or the initialisation's."""
    head.input_scale.copy_(input_scale(data, embedding))
    if "head" in state:
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
    elif init_from:
        tensors = load_head(init_from)[1]
        head.load_state_dict({name: tensors[name].float() for name in head.state_dict()})
        head.fc.weight.data /= head.input_scale
    else:
        initialise(head, data, embedding, seed)


def _measure(head: EagleHead, dev: FeatureSet, embedding, draft_head, draft_ids) -> dict:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = chain_acceptance(head, dev, embedding, draft_head, draft_ids)
    print(f"dev: {result}")
    return {"dev_chain_tau": round(result.tau, 4), "dev_alpha": [round(alpha, 4) for alpha in result.alphas]}


def _plan_id(options: EagleOptions, data: FeatureSet, draft_ids: torch.Tensor) -> dict:
    return asdict(options) | {
        "data": hashlib.sha256(data.ids.numpy().tobytes()).hexdigest(),
        "draft_ids": hashlib.sha256(draft_ids.numpy().tobytes()).hexdigest(),
    }


def _save(file: Path, plan_id: dict, head, optimizer, step: int, seconds: float) -> None:
    state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
    save_state(file, state | {"plan": plan_id})
