#!/usr/bin/env python3
"""Trains one tiny language model on chained recall and writes it in the format of ../checkpoint.hpp.

The task. There are M keys k_0..k_M-1 (tokens 0..M-1) and M values (tokens M..2M-1); value v_j stands for
key k_j. Token 2M begins a prompt. A prompt lists n pairs `k_a v_next(a)` in random order, where `next` is a
random cycle over n random keys, then one value v_s. The model must go on with v_next(s), v_next(next(s)), ...
Every answer needs one pair from an arbitrary place in the prompt, so it needs that pair's KV rows intact.

The committed models (about a minute each on an H200; the .json beside each holds options and accuracy):

    train.py --seed 2 --seconds 110 --attention grouped --heads 8 --kv-heads 4 --head-dim 16 --out grouped.bin
    train.py --seed 2 --seconds 110 --attention latent --latent-dim 48 --rope-dim 16 --out latent.bin
"""
import argparse
import json
import math
import struct
import time

import torch
import torch.nn.functional as F

NORM_EPS = 1e-5
MAX_TOKENS = 1024
ROPE_THETA = 10000


def rope_tables(width, device):
    """cos and sin of position * theta^(-2i/width), as [MAX_TOKENS][width / 2]."""
    freq = ROPE_THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(MAX_TOKENS, dtype=torch.float64), freq)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x, tables):
    """Rotates adjacent pairs (x[2i], x[2i+1]) of [batch][head][token][width]."""
    cos, sin = (t[: x.shape[-2]] for t in tables)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def rms_norm(x, gain):
    return F.rms_norm(x, gain.shape, gain, NORM_EPS)


class TinyLlm(torch.nn.Module):
    """Parameters are named and shaped as in the checkpoint; matrices are [in][out]."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        dim, head = c.dim, c.head_dim
        self.order = []

        def add(name, *shape, std=None):
            value = torch.ones(shape) if std is None else torch.randn(shape) * std
            self.register_parameter(name, torch.nn.Parameter(value))
            self.order.append(name)

        narrow, small = dim**-0.5, 0.3 * dim**-0.5
        add("embedding", c.vocab, dim, std=narrow)
        for i in range(c.layers):
            p = f"l{i}_"
            add(p + "attention_norm", dim)
            if c.attention == "grouped":
                add(p + "q", dim, c.heads * head, std=narrow)
                add(p + "k", dim, c.kv_heads * head, std=narrow)
                add(p + "v", dim, c.kv_heads * head, std=narrow)
            else:
                add(p + "q", dim, c.heads * (head + c.rope_dim), std=narrow)
                add(p + "down", dim, c.latent_dim + c.rope_dim, std=narrow)
                add(p + "latent_norm", c.latent_dim)
                add(p + "up_k", c.heads, head, c.latent_dim, std=c.latent_dim**-0.5)
                add(p + "up_v", c.heads, c.latent_dim, head, std=c.latent_dim**-0.5)
            add(p + "o", c.heads * head, dim, std=small)
            add(p + "ffn_norm", dim)
            add(p + "gate", dim, c.hidden, std=narrow)
            add(p + "up", dim, c.hidden, std=narrow)
            add(p + "out", c.hidden, dim, std=small)
        add("final_norm", dim)
        # A value starts out as its key plus a common offset: the two must be matched anyway.
        with torch.no_grad():
            self.embedding[c.keys : 2 * c.keys] = self.embedding[: c.keys] + torch.randn(dim) * narrow
        self.rope = rope_tables(head if c.attention == "grouped" else c.rope_dim, c.device)

    def attend(self, p, x):
        c, w = self.c, lambda name: getattr(self, p + name)
        batch, tokens, _ = x.shape

        def heads(y, count):
            return y.view(batch, tokens, count, -1).transpose(1, 2)

        q = heads(x @ w("q"), c.heads)
        if c.attention == "grouped":
            q = rotate(q, self.rope)
            k = rotate(heads(x @ w("k"), c.kv_heads), self.rope)
            v = heads(x @ w("v"), c.kv_heads)
            k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=1) for t in (k, v))
        else:
            down = x @ w("down")
            latent = rms_norm(down[..., : c.latent_dim], w("latent_norm"))
            shared = rotate(heads(down[..., c.latent_dim :], 1), self.rope)
            k = torch.einsum("btl,hdl->bhtd", latent, w("up_k"))
            v = torch.einsum("btl,hld->bhtd", latent, w("up_v"))
            q = torch.cat((q[..., : c.head_dim], rotate(q[..., c.head_dim :], self.rope)), -1)
            k = torch.cat((k, shared.expand(-1, c.heads, -1, -1)), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale: 1/sqrt(width of q)
        return y.transpose(1, 2).reshape(batch, tokens, -1) @ w("o")

    def forward(self, tokens, answers):
        """Logits of the last `answers` positions."""
        x = self.embedding[tokens]
        for i in range(self.c.layers):
            p = f"l{i}_"
            x = x + self.attend(p, rms_norm(x, getattr(self, p + "attention_norm")))
            h = rms_norm(x, getattr(self, p + "ffn_norm"))
            h = F.silu(h @ getattr(self, p + "gate")) * (h @ getattr(self, p + "up"))
            x = x + h @ getattr(self, p + "out")
        return rms_norm(x[:, -answers:], self.final_norm) @ self.embedding.t()

    def checkpoint(self):
        c = self.c
        latent = c.attention == "latent"
        header = struct.pack(
            "<8s14I", b"tinyllm\0", 1, 2 if latent else 1, c.dim, c.hidden, c.layers, c.heads,
            1 if latent else c.kv_heads, c.head_dim, c.latent_dim if latent else 0,
            c.rope_dim if latent else 0, c.vocab, MAX_TOKENS, ROPE_THETA, c.keys)
        weights = (getattr(self, name).detach().float().cpu().numpy().astype("<f4").tobytes() for name in self.order)
        return header + b"".join(weights)


def batch_of(c, size, pairs, answers, generator):
    """Prompts of `pairs` pairs followed by their first `answers` answers; and those answers' targets."""
    def shuffled(count):
        return torch.rand(size, count, generator=generator, device=c.device).argsort(1)

    cycle = shuffled(c.keys)[:, :pairs]
    key, value = cycle, cycle.roll(-1, 1) + c.keys
    order = shuffled(pairs)
    listed = torch.stack((key.gather(1, order), value.gather(1, order)), -1).flatten(1)
    chain = torch.cat((cycle, cycle[:, :1]), 1)[:, : answers + 1] + c.keys
    begin = torch.full((size, 1), 2 * c.keys, device=c.device)
    return torch.cat((begin, listed, chain[:, :-1]), 1), chain[:, 1:]


@torch.no_grad()
def accuracy(model, pairs, prompts, generator):
    right = total = 0
    for _ in range(0, prompts, 64):
        tokens, targets = batch_of(model.c, 64, pairs, pairs, generator)
        right += (model(tokens, pairs).argmax(-1) == targets).sum().item()
        total += targets.numel()
    return right / total


def train(c):
    torch.manual_seed(c.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    generator = torch.Generator(device=c.device).manual_seed(c.seed)
    held_out = torch.Generator(device=c.device).manual_seed(1_000_000 + c.seed)
    model = TinyLlm(c).to(c.device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.98), weight_decay=0.01,
                                  fused=c.device == "cuda")
    began, pairs, cooldown, smooth = time.time(), min(8, c.pairs), None, 0.0
    for step in range(c.steps):
        # Constant rate after a warm-up, then down to zero once the full length is solved.
        fade = 1.0 if cooldown is None else (cooldown - step) / c.cooldown
        for group in optimizer.param_groups:
            group["lr"] = c.lr * min(1.0, (step + 1) / 200) * fade
        low = 4 if torch.rand(()) < 0.2 else pairs // 2  # mostly long prompts, without forgetting short ones
        n = int(torch.randint(low, pairs + 1, ()))
        tokens, targets = batch_of(c, max(16, c.batch_tokens // (3 * n + 1)), n, n, generator)
        logits = model(tokens, n)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            hit = (logits.argmax(-1) == targets).float().mean().item()
            smooth = 0.7 * smooth + 0.3 * hit
            if smooth > (0.99 if pairs == c.pairs else 0.8) and cooldown is None:
                if pairs == c.pairs:
                    cooldown = step + c.cooldown
                else:
                    pairs, smooth = min(2 * pairs, c.pairs), 0.0
                    print(f"{c.out}: step {step + 1} pairs {pairs} at {time.time() - began:.0f} s", flush=True)
            late = time.time() - began > c.seconds - c.fade_seconds
            if late and cooldown is None:
                cooldown = step + c.cooldown
            if step % 200 == 199:
                print(f"{c.out}: step {step + 1} loss {loss.item():.4f} hit {hit:.4f} pairs {pairs} "
                      f"{time.time() - began:.0f} s", flush=True)
        if (cooldown is not None and step + 1 >= cooldown) or time.time() - began > c.seconds:
            break
    torch.backends.cuda.matmul.allow_tf32 = False
    result = {
        "attention": c.attention, "seed": c.seed, "parameters": parameters, "steps": step + 1,
        "train_seconds": round(time.time() - began), "pairs": c.pairs,
        "held_out_prompts": c.eval_prompts,
        "held_out_accuracy": {str(n): accuracy(model, n, c.eval_prompts, held_out)
                              for n in (c.pairs, c.pairs // 4, c.pairs // 16)},
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if c.device == "cuda" else "cpu",
        "options": {k: v for k, v in vars(c).items() if k not in ("out", "device", "vocab")},
    }
    with open(c.out, "wb") as f:
        f.write(model.checkpoint())
    with open(c.out.removesuffix(".bin") + ".json", "w") as f:
        json.dump(result, f, indent=2)
        f.write("\n")
    print(f"{c.out}: done {json.dumps(result)}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--attention", choices=("grouped", "latent"), required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--keys", type=int, default=256)
    p.add_argument("--pairs", type=int, default=256, help="pairs in a full-length prompt")
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--latent-dim", type=int, default=64)
    p.add_argument("--rope-dim", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch-tokens", type=int, default=16384)
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--cooldown", type=int, default=1000, help="steps from full rate to zero")
    p.add_argument("--seconds", type=float, default=1e9, help="stop here, whatever the accuracy")
    p.add_argument("--fade-seconds", type=float, default=20, help="start the cool-down this long before")
    p.add_argument("--eval-prompts", type=int, default=2048)
    c = p.parse_args()
    c.vocab = 2 * c.keys + 1
    c.device = "cuda" if torch.cuda.is_available() else "cpu"
    train(c)


if __name__ == "__main__":
    main()
