"""Makes a tiny random Qwen2 with its own tokenizer, and a file of sums to practise on.

python -m recipes.verl_grpo_cpu.make_assets FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512
PROMPTS = 64
END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(a: int, b: int) -> str:
    """Return a prompt."""
    return f"what is {a} + {b} ?"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the prompts themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, BEGIN_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{question(a, b)} the answer is {a + b}" for a in range(40) for b in range(40)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_TURN, pad_token=END, model_max_length=2048
    )
    fast.chat_template = CHAT
    return fast


def make_model() -> Qwen2ForCausalLM:
    """Make a two-layer Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def make_data() -> pandas.DataFrame:
    """Make prompts in the form of verl's GSM8K example, whose reward function checks them."""
    numbers = random.Random(0)
    rows = []
    for index in range(PROMPTS):
        a, b = numbers.randint(1, 39), numbers.randint(1, 39)
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question(a, b)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return pandas.DataFrame(rows)


def main(folder: Path) -> None:
    """Write ``model/`` and ``train.parquet`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder / "model")
    make_model().save_pretrained(folder / "model")
    make_data().to_parquet(folder / "train.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
