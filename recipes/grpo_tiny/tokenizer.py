"""A tokenizer for trainers that want one: its tokens are the numbers of the task."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_profiling.integrations.tiny_grpo import END, NUMBERS

END_TEXT = "<end>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; ``"3 2 1 0 <end>"`` is five tokens."""
    vocabulary = {str(number): number for number in range(NUMBERS)} | {END_TEXT: END}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_TEXT, pad_token=END_TEXT
    )
