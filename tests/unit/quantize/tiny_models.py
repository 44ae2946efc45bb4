"""Tiny random models of every supported architecture, with values no default would guess."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quantize.vocabulary import _QWEN2

CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "34*7-52=? The answer is 186. 12345 678 90 can't we'll it's",
    "Grüße aus Zürich naïve café 日本語のテキスト мир हिन्दी",
    "def f(x):\n\treturn x\r\n\r\n  two  spaces   three",
    '{"name": "calc", "arguments": {"expression": "34*7-52"}}',
] * 3


def qwen2_split() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make_tokenizer(
    *,
    size: int = 420,
    pre: Any = None,
    specials: tuple[str, ...] = ("<|pad|>", "<|im_start|>", "<|im_end|>"),
    template: str | None = TEMPLATE,
    **roles: str,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE over every byte; `roles` default to pad and eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or qwen2_split()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(specials),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    roles = roles or {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.chat_template = template
    return fast


def make_model(
    arch: str,
    *,
    rows: int = 448,
    seed: int = 0,
    theta: float = 5000.0,
    rope: dict | None = None,
    **overrides: Any,
) -> torch.nn.Module:
    """Two layers, hidden 256, head_dim 32 (not hidden / heads), random norms and biases."""
    config_class, model_class = CLASSES[arch]
    settings: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 3e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if arch != "qwen2":
        settings["head_dim"] = 32
    torch.manual_seed(seed)
    model = model_class(config_class(**settings | overrides)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def hf_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    return model(input_ids=torch.tensor([ids])).logits[0].float().numpy()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Mean KL(P‖Q), nats, written out here so that the tests do not lean on the code they test."""
    p, q = (x.astype(np.float64) for x in (p, q))
    logp = (
        p
        - np.log(np.exp(p - p.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - p.max(-1, keepdims=True)
    )
    logq = (
        q
        - np.log(np.exp(q - q.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - q.max(-1, keepdims=True)
    )
    return float((np.exp(logp) * (logp - logq)).sum(-1).mean())
