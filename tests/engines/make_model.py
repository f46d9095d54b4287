# SPDX-License-Identifier: Apache-2.0
"""Make the small random Llama that the engine tests run.

    python make_model.py DIRECTORY

No download, no torch: the weights come from one fixed seed, so the same versions of NumPy and
safetensors write the same bytes. The model answers nonsense; the tests ask only that every way of
serving it answers the *same* nonsense, and that its KV cache is small and of a known size (4 KiB a
token in float32).

The tokenizer is a bijection. Token ``i`` is the one word ``w`` + four digits of ``i``, words are
separated by one space, and nothing is added on encode. So a prompt of n words is n tokens, the text
of an answer tells its token ids, and prompt + answer tokenises to the ids of both: a follow-up turn
extends the cached prefix exactly. The first four ids are the specials; their rows of the output
layer are zero, hence the greedy choice never takes them (the best of 4,092 random logits is far
above 0) and no answer ends early or loses a word to "skip special tokens".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

VOCABULARY: Final = 4096
HIDDEN: Final = 256
INTERMEDIATE: Final = 512
LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
MAX_TOKENS: Final = 8192
SEED: Final = 20_261_129
STD: Final = 0.08
"""Wide enough that the greedy choice varies with the prompt; at 0.02 most answers repeat a word."""

SPECIALS: Final = ("<unk>", "<s>", "</s>", "<pad>")
UNKNOWN, BEGIN, END, PAD = range(len(SPECIALS))

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message['content'] }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
)
"""Contents joined by spaces: a chat of n words is n tokens too. Dynamo refuses to do without."""


def word(token: int) -> str:
    """Return the text of one token id.

    Raises:
        ValueError: if there is no such token.
    """
    if not 0 <= token < VOCABULARY:
        raise ValueError(f"token {token} is not in the vocabulary of {VOCABULARY}")
    return SPECIALS[token] if token < len(SPECIALS) else f"w{token:04d}"


def text(tokens: list[int]) -> str:
    """Return the prompt or answer that tokenises to exactly these ids."""
    return " ".join(map(word, tokens))


def weights() -> dict[str, npt.NDArray[np.float32]]:
    """Draw all weights, always in the same order from the same seed."""
    generator = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        drawn = generator.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(STD)

    def ones() -> npt.NDArray[np.float32]:
        return np.ones(HIDDEN, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            f"{at}.input_layernorm.weight": ones(),
            f"{at}.post_attention_layernorm.weight": ones(),
        }
    tensors["model.norm.weight"] = ones()
    output = matrix(VOCABULARY, HIDDEN)
    output[: len(SPECIALS)] = 0.0
    tensors["lm_head.weight"] = output
    return tensors


def config() -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }


def tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: one word, one token.

    There is no decoder on purpose: `tokenizers` then joins token texts with a space, in a stream
    (`DecodeStream`) as well as at once.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, content in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word(token): token for token in range(VOCABULARY)},
            "unk_token": SPECIALS[UNKNOWN],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIALS[UNKNOWN],
        "bos_token": SPECIALS[BEGIN],
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[PAD],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, Any]:
    """Return generation_config.json: nothing that would change the sampling of a request."""
    return {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}


def make_model(directory: Path) -> None:
    """Write the model into `directory`, which is created when it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config()),
        ("generation_config.json", generation_config()),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        path = directory / name
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description="Make the random Llama of the engine tests.")
    parser.add_argument("directory", type=Path, help="where to write it")
    make_model(parser.parse_args().directory)


if __name__ == "__main__":
    main()
