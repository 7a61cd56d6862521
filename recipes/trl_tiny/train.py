"""TRL's GRPOTrainer with a tiny model, on a CPU: ``python -m recipes.trl_tiny.train``."""

from pathlib import Path
from typing import Any

import hydra
from accelerate import PartialState
from datasets import Dataset
from omegaconf import DictConfig
from trl import GRPOConfig, GRPOTrainer

from recipes.grpo_tiny.model import build_model
from recipes.grpo_tiny.tokenizer import make_tokenizer
from verl_profiling.integrations.tiny_grpo import NUMBERS, reward
from verl_profiling.integrations.trl import TRLProfilingCallback


def count_down(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the task's reward of each completion."""
    return [reward([int(prompt)], ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]


def make_trainer(config: DictConfig, **more: Any) -> GRPOTrainer:
    """Return the trainer, before it is profiled; it is given what is ``more``."""
    model = Path(config.output_dir, "model")  # TRL loads the policy, and the reference once more
    with PartialState(cpu=True).main_process_first():
        if not model.exists():
            build_model(config.model, seed=0).save_pretrained(model)
    prompts = [{"prompt": str(number)} for number in range(1, NUMBERS)] * 40
    return GRPOTrainer(
        model=str(model),
        processing_class=make_tokenizer(),
        reward_funcs=count_down,
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(prompts[: NUMBERS - 1]),
        args=GRPOConfig(
            output_dir=config.output_dir,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            **config.grpo,
        ),
        **more,
    )


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Train, on this rank."""
    trainer = make_trainer(config)
    trainer.add_callback(TRLProfilingCallback(trainer, config.profiling))
    trainer.train()


if __name__ == "__main__":
    main()
